"""What users write on the command line, turned into values: rank lists, step ranges, options, launch targets.

It reads no trace and starts nothing. A mistake becomes a ``click.BadParameter`` that shows the offending part.
"""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from prism_sdk.bounds import MAX_RANKS
from prism_sdk.errors import ScriptNotFoundError
from prism_sdk.runtime.config import StepRange

__all__ = [
    "NNODES",
    "NPROC",
    "Number",
    "RANKS",
    "SIZE",
    "STEPS",
    "STEP_OR_STEPS",
    "TIME_WINDOW",
    "Target",
    "key_values",
    "once",
    "parse_ranks",
    "parse_size",
    "parse_step_or_steps",
    "parse_target",
    "parse_time_window",
]


def _number(text: str, *, what: str, whole: str) -> int:
    stripped = text.strip()
    if not (stripped.isascii() and stripped.isdigit()):
        shown = f"{stripped!r} in {whole!r}" if stripped != whole else repr(whole)
        raise ValueError(f"{shown} is not {what}" if stripped else f"{what} is missing in {whole!r}")
    return int(stripped)


def parse_ranks(text: str) -> tuple[int, ...]:
    """``0,5-7`` -> ``(0, 5, 6, 7)``: ascending; a range includes both ends.

    Raises:
        ValueError: what is wrong, naming the offending part.
    """
    found: set[int] = set()
    for part in text.split(","):
        first_text, dash, last_text = part.partition("-")
        first = _number(first_text, what="a rank number", whole=text)
        last = _number(last_text, what="a rank number", whole=text) if dash else first
        if last < first:
            raise ValueError(f"the range {part.strip()!r} runs backwards; write {last}-{first}")
        if last >= MAX_RANKS:
            raise ValueError(f"the rank {last} is above the largest possible, {MAX_RANKS - 1}")
        again = found.intersection(range(first, last + 1))
        if again:
            raise ValueError(f"rank {min(again)} is named twice in {text!r}")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def parse_step_or_steps(text: str) -> StepRange:
    """``N`` or ``A:B``.

    Raises:
        ValueError: what is wrong.
    """
    if ":" in text:
        return StepRange.parse(text)
    step = _number(text, what="a step number", whole=text)
    return StepRange(step, step + 1)


_UNITS_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}


def parse_time_window(text: str) -> tuple[int | None, int | None, bool]:
    """``A:B`` -> first and last nanosecond (exclusive; None where left out), and whether they carry a unit.

    Raises:
        ValueError: what is wrong.
    """
    parts = text.split(":")
    if len(parts) != 2 or not any(part.strip() for part in parts):
        raise ValueError(f"{text!r} is not of the form A:B; write 1.5s:2s, or nanoseconds")
    values: list[int | None] = []
    units: set[bool] = set()
    for part in parts:
        match = re.fullmatch(r"(-?\d+)(\.\d+)?\s*(ns|us|ms|s)?", part.strip())
        if not part.strip():
            values.append(None)
        elif match is None or (match[2] and not match[3]):
            raise ValueError(f"{part.strip()!r} in {text!r} is no time; write 1.5s, 300ms, 20us, or whole nanoseconds")
        else:
            scale = _UNITS_NS[match[3] or "ns"]
            values.append(round(float(match[1] + match[2]) * scale) if match[2] else int(match[1]) * scale)
            units.add(match[3] is not None)
    low, high = values
    early = [part.strip() for part, value in zip(parts, values, strict=True) if value is not None and value < 0]
    if True in units and early:
        raise ValueError(f"{early[0]!r} in {text!r} is before the trace, from whose start times with a unit count")
    if len(units) > 1:
        raise ValueError(f"{text!r} has one end with a unit and one without")
    if low is not None and high is not None and high <= low:
        raise ValueError(f"{text!r} holds no time: its end is not above its start")
    return low, high, True in units


_UNITS_BYTES: dict[str, int] = {"": 1, "b": 1, **{f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")}} | {
    f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")
}


def parse_size(text: str) -> int:
    """``80GiB``, ``1.5 GB``, ``0`` -> bytes.

    Raises:
        ValueError: what is wrong.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS_BYTES:
        raise ValueError(f"{text!r} is no size; write 80GiB, 512MiB, 80GB, or bytes")
    return int(float(match[1]) * _UNITS_BYTES[match[2]])


class _Parsed(click.ParamType[Any]):
    """A parameter type made of a function that raises ``ValueError``."""

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self.function = function

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.function(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


class Number(click.FloatRange):
    """A number in a range. `nan`, which no comparison finds outside of any, and which none is above, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not a number.", param, ctx)
        return number


def once(*names: str, **settings: Any) -> Callable[[Any], Any]:
    """A ``click.option`` that says what is selected: given again it is refused, where click takes the last silently."""
    return click.option(*names, multiple=True, callback=_only_one, **settings)


def _only_one(context: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
    if len(values) > 1:
        raise click.BadParameter(f"it is given {len(values)} times, and only one counts: give it once",
                                 ctx=context, param=parameter)  # fmt: skip
    return values[0] if values else None


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{text!r} is not of the form key=value")
    return key.strip(), value


def key_values(*, metavar: str | None = None, help: str) -> Callable[[Any], Any]:
    """Options of plugins; a key that is given again is refused, where a dictionary would take the last silently."""
    return click.option("-O", "--option", "options", type=_Parsed("key=value", _key_value), multiple=True,
                        callback=_each_once, metavar=metavar, help=help)  # fmt: skip


def _each_once(context: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
    keys = [key for key, _ in values]
    if again := next((key for key in keys if keys.count(key) > 1), None):
        raise click.BadParameter(f"{again!r} is given {keys.count(again)} times, and only one counts: give it once",
                                 ctx=context, param=parameter)  # fmt: skip
    return values


def _num_devices() -> int:
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _nproc(text: str) -> int:
    if text == "cpu":
        return os.cpu_count() or 1
    if text in ("gpu", "auto"):
        devices = _num_devices()
        if devices == 0 and text == "gpu":
            raise ValueError("'gpu' was given, and this machine has no NVIDIA GPU; give a number")
        return devices or os.cpu_count() or 1
    value = _number(text, what="a number, or one of auto, cpu, gpu", whole=text)
    if not 1 <= value <= MAX_RANKS:
        raise ValueError(f"{text} is not between 1 and {MAX_RANKS}")
    return value


def _nnodes(text: str) -> int:
    low_text, colon, high_text = text.partition(":")
    low = _number(low_text, what="a number of nodes", whole=text)
    high = _number(high_text, what="a number of nodes", whole=text) if colon else low
    if low != high:
        raise ValueError(f"{text!r} is elastic; a graph has one world size, so give one number")
    if low < 1:
        raise ValueError("a job has at least 1 node")
    return low


SIZE = _Parsed("size", parse_size)
RANKS = _Parsed("ranks", parse_ranks)
STEPS = _Parsed("A:B", StepRange.parse)
STEP_OR_STEPS = _Parsed("N|A:B", parse_step_or_steps)
TIME_WINDOW = _Parsed("A:B", parse_time_window)
NPROC = _Parsed("n|auto|cpu|gpu", _nproc)
NNODES = _Parsed("n", _nnodes)


@dataclass(frozen=True)
class Target:
    """What to run: a script's path or a module's name, and its arguments."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]


def parse_target(words: Sequence[str], *, is_module: bool) -> Target:
    """Split the words after Prism's options into script or module and its arguments, and check that it exists.

    Raises:
        click.UsageError: nothing to run was given.
        ScriptNotFoundError: the script or module does not exist.
    """
    rest = list(words)
    if rest and rest[0] in ("-m", "--module") and not is_module:
        is_module = True
        rest.pop(0)
    if not rest:
        what = "module" if is_module else "script"
        raise click.UsageError(
            f"which {what}? End the line with it: ... -- {'-m pkg.train' if is_module else 'train.py'}"
        )
    name, *arguments = rest
    target = Target(name=name, is_module=is_module, arguments=tuple(arguments))
    (_check_module if is_module else _check_script)(target)
    return target


def _check_script(target: Target) -> None:
    path = Path(target.name)
    if path.is_file():
        return
    base = path.name.lower()
    hint = "give the path of the training script, as seen from this folder"
    if base.startswith("python"):
        hint = "leave the interpreter out: `prism record -- train.py`, not `-- python train.py`"
    elif base in ("torchrun", "torch.distributed.run", "accelerate", "deepspeed", "srun", "mpirun"):
        hint = f"Prism takes the place of {base}: leave it out, and move its launch flags before the `--`"
    elif path.is_dir():
        hint = "this is a folder; give the script inside it"
    elif path.with_name(path.name + ".py").is_file():
        hint = f"did you mean {path.with_name(path.name + '.py')}?"
    elif target.name.startswith("-"):
        hint = "options of Prism come before the script; this one is not known to Prism"
    elif _find_module(target.name):
        hint = f"there is a module of that name: write -m {target.name}"
    raise ScriptNotFoundError(target.name, hint=hint)


def _check_module(target: Target) -> None:
    if _find_module(target.name):
        return
    hint = "the module must be installed, or lie in this folder"
    if target.name.endswith(".py") and Path(target.name).is_file():
        hint = "this is a file: leave out -m"
    raise ScriptNotFoundError(target.name, is_module=True, hint=hint)


def _find_module(name: str) -> bool:
    """Whether ``python -m name`` would find something. Imports no part of it: a package may import torch."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return False
    path = [os.getcwd(), *sys.path]
    spec = importlib.machinery.PathFinder.find_spec(parts[0], path) or _installed_spec(parts[0])
    for index in range(1, len(parts)):
        if spec is None or spec.submodule_search_locations is None:
            return False
        locations = list(spec.submodule_search_locations)
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: index + 1]), locations)
    return spec is not None


def _installed_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)  # a top-level name: asks finders of editable installs, imports nothing
    except (ImportError, ValueError):
        return None
