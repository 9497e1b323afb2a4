"""Compiles the inner loops with numba where it is installed, and runs them as plain Python where it is not.

It decides nothing about results: both ways give the same, one is some fifty times faster.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

__all__ = ["call", "compiled", "has_compiler", "helper"]

F = TypeVar("F", bound=Callable[..., Any])

numba: Any
try:
    numba = importlib.import_module("numba")
except ImportError:  # an optional dependency: the extra `simulate`
    numba = None

#: Below this number of units compiling, or loading what was compiled, takes longer than running.
PLAIN_UNITS = 20_000


def has_compiler() -> bool:
    """Whether numba is installed."""
    return numba is not None


def compiled(function: F) -> F:
    """``function`` compiled at its first call, and kept on disk; as it is without numba."""
    if numba is None:
        return function
    made: F = numba.njit(cache=True)(function)
    return made


def helper(function: F) -> F:
    """``function`` as a part of compiled ones that call it; plain where plain ones do."""
    if numba is None:
        return function
    made: F = importlib.import_module("numba.extending").register_jitable(function)
    return made


def call(function: Callable[..., Any], *arguments: Any, num_units: int) -> Any:
    """Call a compiled function; for few units as plain Python on lists, whose contents are then copied back."""
    plain = getattr(function, "py_func", function)
    if num_units >= PLAIN_UNITS and plain is not function:
        return function(*arguments)
    lists = [item.tolist() if isinstance(item, np.ndarray) else item for item in arguments]
    result = plain(*lists)
    for item, values in zip(arguments, lists, strict=True):
        if isinstance(item, np.ndarray) and item.flags.writeable and len(item):
            item[:] = values
    return result
