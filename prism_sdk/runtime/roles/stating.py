"""Roles as the user states them: a layout such as ``tp=2,dp=1024,pp=4``, or a file that lists the ranks of each role.

Responsible for reading what was stated and saying what is wrong with it.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from prism_sdk.errors import UsageError
from prism_sdk.runtime.config import LaunchConfig
from prism_sdk.runtime.roles.layout import RolePlan, make_plan, parse_layout, plan_of_layout, with_samples

AUTO = "auto"

_LONGEST_RANGE = 60  # characters; Python refuses to read numbers of thousands of digits

_HINT = "auto, a layout such as tp=2,dp=1024,pp=4 (the first varies fastest), or a file with the ranks of a role a line"


def stated_plan(config: LaunchConfig) -> RolePlan | None:
    """The plan that --roles states; None for ``auto``.

    Raises UsageError where what was stated does not fit the job.
    """
    text = AUTO if config.roles is None else config.roles.strip()
    if text == AUTO:
        return None
    if not text:
        raise UsageError("--roles is empty", hint=f"give {_HINT}")
    if Path(text).is_file():
        return _plan_of_file(Path(text), config)
    if "=" not in text:
        raise UsageError(f"--roles: {text!r} is no file, and not a layout either", hint=f"give {_HINT}")
    try:
        axes = parse_layout(text, config.world_size)
    except ValueError as error:
        raise UsageError(f"--roles: {error}", hint=f"give {_HINT}") from None
    return _checked(plan_of_layout(axes, num_samples=config.num_samples, wanted_ranks=config.sample_ranks), config)


def _plan_of_file(path: Path, config: LaunchConfig) -> RolePlan:
    keys = np.full(config.world_size, -1, np.int64)
    representatives: list[int] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"--roles: {path} is not a text file that can be read: {error}"
        raise UsageError(message, hint=f"give {_HINT}") from None
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = [_ranks_of(part.strip(), path, number) for part in text.split(",")]
        outside = [part for part in found if part[-1] >= config.world_size]
        if outside:  # before a list is made of them: it might be longer than memory
            raise UsageError(
                f"{path}, line {number}: rank {outside[0][-1]} does not exist in a job of {config.world_size}"
            )
        ranks = [rank for part in found for rank in part]
        taken = [rank for rank in ranks if keys[rank] >= 0]
        if taken:
            raise UsageError(f"{path}, line {number}: rank {taken[0]} has a role already")
        keys[ranks] = len(representatives)
        representatives.append(ranks[0])
    missing = np.flatnonzero(keys < 0)
    if len(missing):
        raise UsageError(f"{path} gives no role to {len(missing)} ranks, the first of them {missing[0]}")
    order = sorted(range(len(representatives)), key=lambda role: int(np.flatnonzero(keys == role)[0]))
    plan = make_plan(
        keys, num_samples=config.num_samples, origin=f"stated in {path.name}",
        representatives=[representatives[role] for role in order],
    )  # fmt: skip
    return _checked(with_samples(plan, config.sample_ranks), config)


def _ranks_of(part: str, path: Path, number: int) -> range:
    match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
    if match is None or len(part) > _LONGEST_RANGE or (match[3] is not None and int(match[3]) < 1):
        raise UsageError(f"{path}, line {number}: {part!r} is neither a rank nor a range such as 0-63 or 0-62:2")
    ranks = range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
    if not ranks:
        raise UsageError(f"{path}, line {number}: the range {part!r} ends before it begins")
    return ranks


def _checked(plan: RolePlan, config: LaunchConfig) -> RolePlan:
    if 0 not in plan.representatives:
        raise UsageError("rank 0 must be the first rank of its role: it is the one that starts the job")
    return plan
