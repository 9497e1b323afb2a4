"""Hooks in modules that an installed framework does not have, and tables of hooks that make no sense."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, PatchingAdapter
from prism_sdk.testing import FrameworkAdapterContract, NullNamer


class Moved(PatchingAdapter):
    """An adapter for a package whose modules have moved since it was written."""

    name, description, distribution = "moved", "for tests", "moved_package"
    beside = AdapterHook("moved_package.part", "run")
    there = ("moved_package.lazy", "moved_package.lazy.gone", "moved_package.broken")  # none of these is imported

    def __init__(self, *more: AdapterHook) -> None:
        self.more = more

    def hooks(self) -> Sequence[AdapterHook]:
        return [self.beside, *(AdapterHook(module, "run") for module in self.there), *self.more]

    def around(self, namer: UnitNamer) -> Sequence[Around]:
        return [Around(hook, before=lambda: namer.enter()) for hook in self.hooks()]


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize(
    ("hook", "is_reported"),
    [
        (AdapterHook("moved_package.gone", "run"), True),
        (AdapterHook("moved_package.gone.deeper", "run"), True),
        (AdapterHook("moved_package.part.inside", "run"), True),  # a module where a package was
        (AdapterHook("moved_package.gone", "run", required=False), False),
        (AdapterHook("moved_package.gone", "run", max_version="1.9"), False),
        (AdapterHook("moved_package.gone", "run", option="moe_skew"), False),
        (AdapterHook("package_that_nobody_uses.gone", "run"), False),
    ],
)
def test_a_hook_in_a_module_that_the_framework_no_longer_has_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: AdapterHook, is_reported: bool, is_trained: bool
) -> None:
    for name, text in (
        ("__init__", "__version__ = '2.0'"), ("part", "def run(): pass"), ("broken", "import no_such_library"),
        ("lazy/__init__", "def run(): pass"),
    ):  # fmt: skip
        path = tmp_path / f"moved_package/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, _Awkward()])
    namer, adapter = NullNamer(), Moved(hook)
    said: list[str] = []
    try:
        with adapter.activate(namer):
            importlib.import_module("moved_package.part").run()
            said += namer.reasons
            if is_trained:
                namer.end_step()
                said += namer.reasons
        again = NullNamer()
        with adapter.activate(again):  # another module is there meanwhile, so that one of them is not
            importlib.import_module("moved_package.lazy")
    finally:
        for name in ("moved_package", "moved_package.part", "moved_package.lazy"):
            sys.modules.pop(name, None)
    reason = [f"hook {hook.module}.run is absent in moved_package 2.0"] if is_reported else []
    assert namer.reasons == reason and said == (reason if is_trained else [])
    assert again.reasons == ["hook moved_package.lazy.gone.run is absent in moved_package 2.0", *reason]


class _Awkward:
    """A finder of another library, which fails for one module of its own: that one counts as there."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "moved_package.broken":
            raise RuntimeError("not today")


@pytest.mark.parametrize("name", ["min_version", "max_version"])
def test_a_bound_that_is_no_version_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"some\.module\.Thing\.run: 'newest' is no version"):
        AdapterHook("some.module", "Thing.run", **{name: "newest"})  # type: ignore[arg-type]


def test_the_contract_names_what_is_wrapped_and_not_declared_and_what_does_nothing() -> None:
    declared, around = [Moved.beside], [Around(Moved.beside, after=lambda *_: None)]

    class Table(Moved):
        def hooks(self) -> Sequence[AdapterHook]:
            return declared

        def around(self, namer: UnitNamer) -> Sequence[Around]:
            return around

    class Contract(FrameworkAdapterContract):
        def make_adapter(self) -> PatchingAdapter:
            return Table()

    Contract().test_what_it_wraps_is_declared()
    around.append(Around(Moved.beside))
    with pytest.raises(AssertionError, match=r"neither before nor after: \['run'\]"):
        Contract().test_what_it_wraps_is_declared()
    declared.clear()
    with pytest.raises(AssertionError, match=r"not in hooks\(\): \['run', 'run'\]"):
        Contract().test_what_it_wraps_is_declared()
