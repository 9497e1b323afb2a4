"""Compares what two runs of the c10d conformance suite returned; it runs nothing and knows no backend.

python compare.py REFERENCE OTHER
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from c10d_cases import load_cases

__all__ = ["Comparison", "Difference", "compare_results", "first_difference", "read_results"]

_UNREACHED = "have no result: the run ended before"


@dataclass(frozen=True)
class Difference:
    """One case that did not come out alike on one rank."""

    case: str
    rank: int
    message: str

    def __str__(self) -> str:
        return f"{self.case} (rank {self.rank}): {self.message}"


@dataclass(frozen=True)
class Comparison:
    """The verdict over all cases and ranks."""

    num_equal: int
    failures: tuple[Difference, ...]
    notes: tuple[Difference, ...]
    """Differences in cases that plain gloo refuses or answers wrongly; only a wrong answer fails there."""

    def __str__(self) -> str:
        lines = [f"{self.num_equal} results equal, {len(self.failures)} failures, {len(self.notes)} notes"]
        lines += [f"FAILED {line}" for line in _by_case(self.failures)]
        lines += [f"note   {line}" for line in _by_case(self.notes)]
        return "\n".join(lines)


def _by_case(differences: tuple[Difference, ...], *, limit: int = 30) -> list[str]:
    """One line a case with the first rank's words; cases that were never reached share one line."""
    cases: dict[str, list[Difference]] = {}
    for difference in differences:
        cases.setdefault(difference.case, []).append(difference)
    unreached = [name for name, found in cases.items() if all(entry.message == _UNREACHED for entry in found)]
    judged = [found for name, found in cases.items() if name not in unreached]
    lines = [
        f"{found[0].case} (rank {', '.join(str(entry.rank) for entry in found)}): {found[0].message}"
        for found in judged[:limit]
    ]
    if len(judged) > limit:
        lines.append(f"... and {len(judged) - limit} more cases")
    if unreached:
        lines.append(f"{len(unreached)} cases, from {unreached[0]} on, {_UNREACHED}")
    return lines


def compare_results(
    reference: Path, other: Path, *, tolerance: float | None = None, with_slow: bool = True
) -> Comparison:
    """Compare the folders that two runs wrote.

    Args:
        reference: the run that is right by definition.
        other: the run to judge; what it has beyond the reference is not looked at.
        tolerance: used in place of every case's own; 0 asks for equal bits.
        with_slow: whether `other` ran the slow cases.
    """
    cases = load_cases()
    num_equal = 0
    failures: list[Difference] = []
    notes: list[Difference] = []
    files = sorted(reference.glob("rank-*.pickles"), key=_rank_of)
    if not files:
        raise FileNotFoundError(f"{reference} holds no rank-N.pickles: did the reference run?")
    for file in files:
        rank = _rank_of(file)
        counterpart = other / file.name
        if not counterpart.exists():
            failures.append(Difference("(all)", rank, f"no results: {counterpart} is missing"))
            continue
        expected, actual = read_results(file), read_results(counterpart)
        for name, wanted in expected.items():
            case = cases[name]
            if case.is_slow and not with_slow:
                continue
            message = _judge(wanted, actual.get(name), case.tolerance if tolerance is None else tolerance)
            if message is None:
                num_equal += 1
            else:
                is_excused = (case.is_optional or "error" in wanted) and not _is_wrong(actual.get(name))
                (notes if is_excused else failures).append(Difference(name, rank, message))
    return Comparison(num_equal=num_equal, failures=tuple(failures), notes=tuple(notes))


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """What a rank wrote, by case, up to where it ended."""
    results = {}
    with path.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            name, result = pickle.load(file)
            results[name] = result
    return results


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))


def _is_wrong(got: dict[str, Any] | None) -> bool:
    return got is None or got.get("error", "").startswith("WrongAnswer")


def _judge(wanted: dict[str, Any], got: dict[str, Any] | None, tolerance: float) -> str | None:
    if got is None:
        return _UNREACHED
    if "error" in wanted:
        if _is_wrong(got) and not _is_wrong(wanted):
            return f"answered wrongly: {got['error']}"
        return None if "error" in got else f"reference refused it ({wanted['error']}), the other one did it"
    if "error" in got:
        return f"failed: {got['error']}"
    return first_difference(wanted["value"], got["value"], tolerance=tolerance)


def first_difference(wanted: Any, got: Any, *, tolerance: float, where: str = "result") -> str | None:
    """Where two results part first, in words; ``None`` when they agree."""
    if type(wanted) is not type(got):
        return f"{where} is a {type(got).__name__}, not a {type(wanted).__name__}: {_short(got)}"
    if isinstance(wanted, torch.Tensor):
        return _tensor_difference(wanted, got, tolerance=tolerance, where=where)
    if isinstance(wanted, dict):
        if wanted.keys() != got.keys():
            return f"{where} has keys {sorted(got, key=str)}, not {sorted(wanted, key=str)}"
        pairs = [(f"{where}[{key!r}]", wanted[key], got[key]) for key in wanted]
    elif isinstance(wanted, list):
        if len(wanted) != len(got):
            return f"{where} has {len(got)} items, not {len(wanted)}"
        pairs = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(wanted, got, strict=True))]
    else:
        return None if wanted == got else f"{where} is {_short(got)}, not {_short(wanted)}"
    for place, left, right in pairs:
        message = first_difference(left, right, tolerance=tolerance, where=place)
        if message is not None:
            return message
    return None


def _tensor_difference(wanted: torch.Tensor, got: torch.Tensor, *, tolerance: float, where: str) -> str | None:
    if wanted.dtype != got.dtype or wanted.shape != got.shape:
        return f"{where} is {got.dtype} of shape {tuple(got.shape)}, not {wanted.dtype} of shape {tuple(wanted.shape)}"
    if torch.equal(wanted, got):
        return None
    if not wanted.is_floating_point() or tolerance == 0:
        return f"{where} is {_short(got)}, not {_short(wanted)}"
    if torch.allclose(wanted.double(), got.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
        return None
    gap = (wanted.double() - got.double()).abs().max().item()
    return f"{where} is off by up to {gap:.3g}, tolerance {tolerance:g}"


def _short(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, torch.Tensor) else value)
    return text if len(text) <= 120 else text[:117] + "..."


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    comparison = compare_results(Path(sys.argv[1]), Path(sys.argv[2]))
    print(comparison)
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    sys.exit(main())
