"""One recording by roles, from the launch to the file.

Responsible for the order of things, and for starting again when more roles turn up or a sampled rank cannot be
followed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from prism_sdk.errors import AsymmetryError, PrismError, RunError, UnsupportedError
from prism_sdk.runtime.config import LaunchConfig, LaunchResult
from prism_sdk.runtime.cpus import num_cpus
from prism_sdk.runtime.launcher import run_job
from prism_sdk.runtime.progress import Progress
from prism_sdk.runtime.ranks import RankSpec
from prism_sdk.runtime.roles.coordinating import SCOUT, RoleCoordinator, RolesChanged
from prism_sdk.runtime.roles.layout import RolePlan
from prism_sdk.runtime.roles.mapping import Mapper
from prism_sdk.runtime.roles.stating import AUTO, stated_plan
from prism_sdk.runtime.roles.verifying import Disagreement, disagreements
from prism_sdk.runtime.roles.writing import write_all_ranks
from prism_sdk.runtime.shards import merge_shards
from prism_sdk.wording import counted
from prismtrace import TraceReader

_MAX_STARTS = 8


def record_by_roles(
    config: LaunchConfig, progress: Progress, *, equip: Callable[[RoleCoordinator], None] = lambda policy: None
) -> LaunchResult:  # fmt: skip
    """Record the job of `config` with one real rank a role; the trace has all ranks.

    `equip` gives the coordinator of each attempt slots and a host other than this machine's.

    Raises PrismError as a recording of all ranks does, and AsymmetryError where a rank that stands for others cannot.
    """
    plan = stated_plan(config)
    is_stated, left_out = plan is not None, list[Disagreement]()
    for start in range(_MAX_STARTS):
        attempt = _Attempt(config, plan, is_stated=is_stated, left_out=left_out, progress=progress)
        equip(attempt.policy)
        try:
            return attempt.run()
        except RolesChanged as change:
            if start == _MAX_STARTS - 1:
                raise
            plan = change.plan
            progress.say(f"{change}: the job starts again")
        except AsymmetryError as error:
            known = attempt.policy.plan
            if known is None or error.rank not in known.samples or start == _MAX_STARTS - 1:
                _blame_roles(error, config, known)
                raise
            left_out.append(Disagreement(error.rank or 0, error.representative, None, 0, error.what))
            plan = replace(known, samples=tuple(rank for rank in known.samples if rank != error.rank))
            progress.say(f"{left_out[-1]}; the job starts again without that rank")
        except (RunError, UnsupportedError) as error:
            _blame_roles(error, config, attempt.policy.plan)
            raise
    raise AssertionError("unreachable")


def _blame_roles(error: PrismError, config: LaunchConfig, plan: RolePlan | None) -> None:
    """Say in the hint of a failure which ranks were taken to do the same: that may be what is wrong, not the script."""
    if plan is None or not (plan.notes or (config.roles or "").strip() != AUTO):
        return
    if plan.notes:
        said = f"{'; '.join(plan.notes)}: if they do not do the same, this follows from it; let more processes run"
    else:
        stated = f"the roles were stated, --roles {config.roles}"
        said = f"{stated}: if ranks of one role do not do the same, this follows from it; " \
               "try another layout, or --roles auto"  # fmt: skip
    error.hint = said if not error.hint else f"{said}; else {error.hint}"


class _Attempt:
    """One run of the program."""

    def __init__(
        self, config: LaunchConfig, plan: RolePlan | None, *, is_stated: bool, left_out: list[Disagreement],
        progress: Progress,
    ) -> None:  # fmt: skip
        self._config, self._left_out, self._progress = config, left_out, progress
        self._plan, self._is_stated = plan, is_stated
        self.policy = RoleCoordinator(
            config.num_slots or num_cpus(), world_size=config.world_size, num_samples=config.num_samples,
            max_roles=config.max_roles, sample_ranks=config.sample_ranks, plan=plan, is_stated=is_stated,
            pin=config.pin,
        )  # fmt: skip

    def run(self) -> LaunchResult:
        return run_job(self._config, self.policy, self._progress, ranks=(SCOUT,), adjust=self._adjust,
                       write=self._write)  # fmt: skip

    def _adjust(self, spec: RankSpec) -> RankSpec:
        return replace(spec, by_roles=True, plan=self.policy.plan)

    def _write(self, parts: Path, output: Path, metadata: Mapping[str, str]) -> bool:
        """Write all ranks; of a job that failed those that ran, and nothing if it is to start again."""
        policy = self.policy
        if policy.starts_again:
            return False
        plan = policy.plan
        if plan is None or metadata.get("job.status") != "complete":
            return merge_shards(parts, output, metadata) > 0
        ran = parts.with_name(parts.name + ".ran")
        try:
            if not merge_shards(parts, ran, metadata):
                return False
            mapper = Mapper(policy.families)
            with TraceReader(ran) as reader:
                found = [*self._left_out, *disagreements(reader, plan, mapper)]
            for note in policy.notes:
                self._progress.say(f"an approximation: {note}")
            for line in _lines(found):
                self._progress.say(line)
            if self._is_stated and any(not one.is_routing for one in found):
                self._progress.say(f"the stated layout does not fit: --roles {self._config.roles} says that these "
                                   "ranks do the same; state another one, or --roles auto")  # fmt: skip
            if plan.samples and not found:
                who = "1 sampled rank does" if len(plan.samples) == 1 else f"{len(plan.samples)} sampled ranks do"
                self._progress.say(f"{who} the same as those that stand for them")
            write_all_ranks(
                ran, output, plan=plan, families=policy.families, mapper=mapper, metadata=_facts(policy, plan, found)
            )
        finally:
            ran.unlink(missing_ok=True)
        return True


def _lines(found: list[Disagreement]) -> list[str]:
    """What is said of disagreements; of ranks that only send other numbers of tokens one line."""
    routed = [one for one in found if one.is_routing]
    lines = [str(one) for one in found if not one.is_routing]
    if routed:
        first = routed[0]
        lines.append(
            f"sizes of all-to-alls follow from data, so {counted(len(routed), 'sampled rank')} had others than the "
            f"ranks that stand for them, and did the same otherwise: first, {first}"
        )
    return lines


def _facts(policy: RoleCoordinator, plan: RolePlan, found: list[Disagreement]) -> dict[str, str]:
    families = [
        {"name": one.description, "size": one.size, "num_groups": len(one.groups), "kind": one.kind}
        for one in policy.families.all
    ]  # fmt: skip
    return {
        "roles.origin": plan.origin,
        "roles.num_roles": str(plan.num_roles),
        "roles.representatives": json.dumps(plan.representatives),
        "roles.samples": json.dumps(plan.samples),
        "roles.disagreements": json.dumps([one.values() for one in found]),
        "roles.approximations": json.dumps([*plan.notes, *policy.notes]),
        "roles.families": json.dumps(families),
    }
