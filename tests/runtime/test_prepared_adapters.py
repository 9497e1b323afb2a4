"""Adapters whose wrappers are in place before ranks are forked: what a rank takes over, and what is left to it."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from prism_sdk.abc import AdapterHook, FrameworkAdapter, UnitNamer
from prism_sdk.adapting import Around, PatchingAdapter
from prism_sdk.runtime import activating as subject
from prism_sdk.runtime.tracer import Tracer
from prismtrace import GraphKind, TraceWriter

RUN = AdapterHook("prepared_engine", "run")
GONE = AdapterHook("prepared_engine", "gone")


class Table(PatchingAdapter):
    """Names each run; `gone` is not there."""

    name = "table"
    description = "for tests"
    distribution = "prepared-engine"

    def hooks(self) -> Sequence[AdapterHook]:
        return [RUN, GONE]

    def around(self, namer: UnitNamer) -> Sequence[Around]:
        return [Around(RUN, before=lambda: namer.enter(label="run")), Around(GONE)]


class Curious(Table):
    """Asks for an option when it is activated."""

    name = "curious"

    def around(self, namer: UnitNamer) -> Sequence[Around]:
        namer.option("moe_skew")
        return super().around(namer)


class Own(FrameworkAdapter):
    """Not a table of wrappers."""

    name = "own"
    description = "for tests"
    num_activations = 0

    def hooks(self) -> Sequence[AdapterHook]:
        return []

    @contextlib.contextmanager
    def activate(self, namer: UnitNamer) -> Iterator[None]:
        self.num_activations += 1
        yield


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module: Any = types.ModuleType("prepared_engine")
    module.run = lambda: None
    monkeypatch.setitem(sys.modules, "prepared_engine", module)
    monkeypatch.setattr(subject, "_loaded", {one.name: one for one in (Table(), Curious(), Own())})
    yield module
    subject.release_adapters()


@pytest.fixture
def tracer(tmp_path: Path) -> Iterator[Tracer]:
    tracer = Tracer(
        0, TraceWriter(tmp_path / "out.prism", graph_kind=GraphKind.BARE, world_size=1), memory=lambda: 0
    )  # fmt: skip
    yield tracer
    tracer.finish("complete")


def test_a_rank_takes_over_the_wrappers_and_what_they_have_said(engine: Any, tracer: Tracer) -> None:
    plain = engine.run
    subject.prepare_adapters(["table"])
    wrapper = engine.run
    assert wrapper is not plain
    wrapper()  # nobody's yet: says nothing, and is not left out for it
    with contextlib.ExitStack() as until:
        naming = subject.activate_adapters(["table"], (), tracer, until)
        assert engine.run is wrapper
        assert naming.lowered == {
            "table": ["hook prepared_engine.gone is absent in prepared-engine of unknown version"]
        }
        engine.run()
        assert naming.used == {"table"}
    assert engine.run is plain
    assert not naming.is_open


def test_what_a_rank_did_not_ask_for_is_taken_out_again(engine: Any, tracer: Tracer) -> None:
    plain = engine.run
    subject.prepare_adapters(["table"])
    with contextlib.ExitStack() as until:
        subject.activate_adapters([], (), tracer, until)
        assert engine.run is plain


def test_who_asks_at_once_is_left_to_the_rank(engine: Any, tracer: Tracer) -> None:
    plain = engine.run
    subject.prepare_adapters(["curious"])
    assert engine.run is plain
    with contextlib.ExitStack() as until:
        naming = subject.activate_adapters(["curious"], (), tracer, until, {"moe_skew": "1"})
        assert engine.run is not plain
        assert naming.taken == {"moe_skew"}


def test_only_tables_of_wrappers_are_for_the_time_before_a_fork(engine: Any) -> None:
    assert subject.adapters_before_fork(["own", "table", "not installed"]) == ["table"]
