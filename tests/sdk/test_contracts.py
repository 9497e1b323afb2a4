"""The contract classes for plugin authors: they pass what keeps the contract and fail what does not."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from prism_sdk.abc import AdapterHook, FrameworkAdapter, ReplayBackend, ReplayContext, ReplaySession, UnitNamer
from prism_sdk.adapting import Around, PatchingAdapter
from prism_sdk.errors import UsageError
from prism_sdk.testing import (
    FrameworkAdapterContract,
    NamedUnit,
    NullNamer,
    ReplayBackendContract,
    ScriptedCalibration,
    check_golden,
)

pytest_plugins = ["prism_sdk.testing.fixtures"]


class _Sleeping(ReplaySession):
    def hold_until(self, deadline_ns: int) -> int:
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)
        return -left_ns

    def close(self) -> None:
        pass


class _SleepingBackend(ReplayBackend):
    name = "sleeping"
    description = "sleeps until the deadline"

    def open(self, context: ReplayContext) -> ReplaySession:
        return _Sleeping()


class TestSleepingBackend(ReplayBackendContract):
    def make_backend(self) -> ReplayBackend:
        return _SleepingBackend()


class _TextwrapAdapter(FrameworkAdapter):
    name = "textwrap"
    description = "names calls of the standard library"

    def hooks(self) -> Sequence[AdapterHook]:
        return [AdapterHook("textwrap", "TextWrapper.wrap"), AdapterHook("textwrap", "gone", required=False)]

    @contextmanager
    def activate(self, namer: UnitNamer) -> Iterator[None]:
        original = textwrap.TextWrapper.wrap

        def wrap(self: textwrap.TextWrapper, text: str) -> list[str]:
            namer.enter("forward", label="wrap")
            try:
                return original(self, text)
            finally:
                namer.leave()

        textwrap.TextWrapper.wrap = wrap  # type: ignore[method-assign]
        try:
            yield
        finally:
            textwrap.TextWrapper.wrap = original  # type: ignore[method-assign]


class TestTextwrapAdapter(FrameworkAdapterContract):
    def make_adapter(self) -> FrameworkAdapter:
        return _TextwrapAdapter()

    def test_it_works_while_active(self) -> None:
        with self.make_adapter().activate(NullNamer()):
            assert textwrap.fill("a b", width=1) == "a\nb"


class _Leaking(_TextwrapAdapter):
    @contextmanager
    def activate(self, namer: UnitNamer) -> Iterator[None]:
        textwrap.TextWrapper.wrap = lambda self, text: []  # type: ignore[method-assign]
        yield


def test_an_adapter_that_does_not_restore_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Contract(FrameworkAdapterContract):
        def make_adapter(self) -> FrameworkAdapter:
            return _Leaking()

    monkeypatch.setattr(textwrap.TextWrapper, "wrap", textwrap.TextWrapper.wrap)
    with pytest.raises(AssertionError):
        Contract().test_it_restores_what_it_wraps()


def test_a_framework_that_no_distribution_brought_has_a_contract_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the tutorial: one file beside the script. Its own `__version__` counts where it has one."""
    (tmp_path / "lonely_frame.py").write_text("__version__ = '2.0'\nclass Loop:\n    def step(self):\n        pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Lonely(PatchingAdapter):
        name, description, distribution = "lonely", "steps", "lonely_frame"

        def hooks(self) -> list[AdapterHook]:
            old = AdapterHook("lonely_frame", "Loop.gone", max_version="1.9")
            return [AdapterHook("lonely_frame", "Loop.step"), old]

        def around(self, namer: UnitNamer) -> list[Around]:
            return [Around(hook, before=lambda *_: namer.enter(part="forward")) for hook in self.hooks()]

    class Contract(FrameworkAdapterContract):
        def make_adapter(self) -> FrameworkAdapter:
            return Lonely()

    Contract().test_its_hooks_exist()
    Contract().test_it_restores_what_it_wraps()


def test_a_golden_order_is_one_line_a_unit_and_never_empty(tmp_path: Path) -> None:
    order = [NamedUnit("forward", label="mikrobätch\n7\x85", microbatch=0), NamedUnit("other", layer="a\u2028b")]
    for _ in range(2):  # the first writes it
        check_golden(tmp_path / "golden" / "rank0.txt", order)
    with pytest.raises(AssertionError, match="delete the file"):
        check_golden(tmp_path / "golden" / "rank0.txt", order[::-1])
    with pytest.raises(AssertionError, match="no unit has a name"):
        check_golden(tmp_path / "golden" / "rank1.txt", [])
    assert not (tmp_path / "golden" / "rank1.txt").exists()


def test_a_backend_that_returns_early_is_found(tmp_path: Path) -> None:
    class Early(_Sleeping):
        def hold_until(self, deadline_ns: int) -> int:
            return 0

    class EarlyBackend(_SleepingBackend):
        def open(self, context: ReplayContext) -> ReplaySession:
            return Early()

    class Contract(ReplayBackendContract):
        def make_backend(self) -> ReplayBackend:
            return EarlyBackend()

    with pytest.raises(AssertionError):
        Contract().test_it_holds_until_the_deadline(tmp_path)


def test_the_scripted_context_refuses_what_the_runtime_refuses(tmp_path: Path) -> None:
    context = ScriptedCalibration(tmp_path, world_size=4, num_slots=2)
    for ranks in ((), (0, 1, 2), (0, 0), (4,), (-1,)):
        with pytest.raises(UsageError):
            context.run_slice(ranks, graph_path=context.graph_path, label="x")
    assert context.slices == []


def test_the_isolated_manager_sees_nothing(isolated_plugins: object) -> None:
    assert isolated_plugins.records() == ()  # type: ignore[attr-defined]
