"""Registry of the c10d conformance cases, and what a case is handed; it launches nothing and compares nothing.

A case is a function of one ``Context`` that every rank calls. What it returns (tensors, numbers, text, nested in
lists, tuples and dicts) is its result; an exception is its result too. Cases must not depend on each other, must work
at world sizes 2 to 4, and draw random numbers only after the runner has seeded them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["EXACT", "LOOSE", "Case", "Context", "WrongAnswer", "attempt", "case", "expect", "load_cases"]

EXACT = 0.0
"""Tolerance of a result in which nothing is summed, or only whole numbers are."""

LOOSE = 2e-4
"""Tolerance of trained values: two backends may sum in different orders."""

_MODULES = (
    "collectives",
    "shapes",
    "handles",
    "groups",
    "p2p",
    "dtensor",
    "stores",
    "refusals",
    "training",
    "pipelines",
)
_LAST_MODULE = "lifecycle"


@dataclass(frozen=True)
class Context:
    """What a case knows about the job."""

    rank: int
    world_size: int
    scratch: Path
    """A folder that all ranks share, empty when the case starts."""

    @property
    def peers(self) -> range:
        return range(self.world_size)


@dataclass(frozen=True)
class Case:
    """One named case."""

    name: str
    run: Callable[[Context], Any]
    tolerance: float
    """Relative and absolute tolerance of floating-point results; 0 asks for equality."""
    is_slow: bool
    is_optional: bool
    """Plain gloo is known to refuse it or to answer wrongly: another backend may refuse it too, or be right."""


_registry: dict[str, Case] = {}


def case(
    name: str | None = None, *, tolerance: float = EXACT, slow: bool = False, optional: bool = False,
    needs_torch: str = "2.9",
) -> Callable[[Callable[[Context], Any]], Callable[[Context], Any]]:
    """Register the decorated function as a case under ``name`` (its own name when absent).

    ``needs_torch``: with an older one there is nothing to compare with: gloo ends the process or lacks the operation.
    """

    def register(function: Callable[[Context], Any]) -> Callable[[Context], Any]:
        key = name or function.__name__
        if key in _registry:
            raise ValueError(f"two conformance cases are called {key!r}: rename one of them")
        if _version(torch.__version__) < _version(needs_torch):
            return function
        _registry[key] = Case(name=key, run=function, tolerance=tolerance, is_slow=slow, is_optional=optional)
        return function

    return register


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


def load_cases() -> dict[str, Case]:
    """Every case by name, in the order in which they run; the ones that tear the job down come last."""
    for module in (*_MODULES, _LAST_MODULE):
        importlib.import_module(f"{__name__}.{module}")
    return dict(_registry)


class WrongAnswer(AssertionError):
    """A backend answered, and wrongly. Raised by the cases in which gloo cannot be the judge."""


def expect(actual: torch.Tensor | list[torch.Tensor], wanted: torch.Tensor | list[torch.Tensor]) -> None:
    """Raise ``WrongAnswer`` unless ``actual`` equals what the case itself works out."""
    pairs = zip(actual, wanted, strict=True) if isinstance(actual, list) else ((actual, wanted),)
    for left, right in pairs:
        if not torch.equal(left, right):
            raise WrongAnswer(f"{left.tolist()} in place of {right.tolist()}")


def attempt(function: Callable[[], Any], *, text: bool = True) -> str:
    """What ``function`` raises, as text: its type and, with ``text``, the first line of its message."""
    try:
        function()
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__}: {message}" if text else type(error).__name__
    return "no error"
