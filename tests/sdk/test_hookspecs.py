"""Every hook is documented in one form, named by the house rule, and known to the manager."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from prism_sdk import hookspecs

HOOKS = {name: function for name, function in vars(hookspecs).items() if hasattr(function, "prism_spec")}


def test_there_are_hooks() -> None:
    assert set(HOOKS) == {
        "prism_register_adapters",
        "prism_register_strategies",
        "prism_register_backends",
        "prism_register_importers",
        "prism_register_exporters",
        "prism_observe_run_start",
        "prism_observe_run_end",
    }


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_named_and_documented_by_the_skeleton(name: str) -> None:
    function: Callable[..., Any] = HOOKS[name]
    assert re.fullmatch(r"prism_(register|choose|observe)_[a-z_]+", name)
    assert name in hookspecs.__all__
    document = inspect.getdoc(function)
    assert document
    paragraphs = document.split("\n\n")
    assert "\n" not in paragraphs[0] and paragraphs[0].endswith("."), "one line first"
    assert paragraphs[1].startswith("Called "), "then when it is called"
    starts = [document.find(part) for part in ("\nArgs:\n", "\nReturns:\n", "\nRaises:\n", ".. versionadded:: ")]
    assert -1 not in starts and starts == sorted(starts)
    for argument in inspect.signature(function).parameters:
        assert re.search(rf"^    {argument}: \S", document, re.M), f"{argument} is not described"


def test_exports_are_sorted() -> None:
    assert hookspecs.__all__ == sorted(hookspecs.__all__)
