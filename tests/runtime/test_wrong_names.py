"""What adapters say wrongly: it lowers the fidelity, the rest of the trace is written, and nothing reaches the rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from prism_sdk.abc import AdapterHook
from prism_sdk.adapting import Around
from prism_sdk.adapting.patching import _wrapped
from prism_sdk.adapting.places import Place
from prism_sdk.adapting.replaced import Wrapped
from prism_sdk.runtime.adapters import Naming, TracerNamer
from prism_sdk.runtime.fidelity import report_lowered
from prism_sdk.runtime.tracer import Tracer
from prismtrace import GraphKind, TraceReader, TraceWriter


def traced(path: Path, say: Callable[[Any], object]) -> tuple[list[int | None], list[str | None], dict[str, str]]:
    """Microbatches and labels of a rank whose adapter says something, and the metadata of its trace."""
    tracer = Tracer(0, TraceWriter(path, graph_kind=GraphKind.BARE, world_size=1), memory=lambda: 0)
    naming = Naming(tracer)
    namer = TracerNamer(naming, "one")
    say(namer)
    token = namer.enter(layer="last")
    namer.leave(token)
    naming.write()
    tracer.finish("complete")
    with TraceReader(path) as reader:
        units, facts = reader.units(0), dict(reader.metadata)
        columns = dict(units.columns())
        assert "last" in set(columns["prism.layer"])
        microbatches = columns["microbatch"].tolist() if "microbatch" in columns else []
        return microbatches, list(columns["label"]) if "label" in columns else [], facts


class Odd:
    """A value that says nothing good of itself."""

    def __hash__(self) -> int:
        raise TypeError("no hash")

    def __index__(self) -> int:
        raise RuntimeError("no index")


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "a word as microbatch": (lambda namer: namer.enter(microbatch="three"), "microbatch: 'str' object cannot"),
    "half a microbatch": (lambda namer: namer.enter(microbatch=1.5), "microbatch: 'float' object cannot"),
    "a negative microbatch": (lambda namer: namer.enter(microbatch=-1), "and not -1"),
    "a huge stage": (lambda namer: namer.enter(stage=1 << 40), "stage: an index is from 0 to 2147483647"),
    "an odd chunk": (lambda namer: namer.enter(model_chunk=Odd()), "model_chunk: no index"),
    "a number as label": (lambda namer: namer.enter(label=7), "label: a text is needed, and not int"),
    "a list as layer": (lambda namer: namer.enter(layer=["a"]), "layer: a text is needed, and not list"),
    "a long label": (lambda namer: namer.enter(label="x" * 5_000_000), "label: a text of 5000000 bytes is too long"),
    "a phase that is none": (lambda namer: namer.enter("foward", layer="a"), "no phase 'foward'"),
    "an assumption": (lambda namer: namer.assume(microbatch="x"), "microbatch: "),
    "a word that is none": (lambda namer: namer.next_units([{"mikrobatch": 1}]), "there is no name mikrobatch"),
    "next units that are none": (lambda namer: namer.next_units([7]), "next_units: "),
    "a note of words": (lambda namer: namer.note("my.column", ["a"]), "note my.column: ValueError"),
    "a note of no list": (lambda namer: namer.note("my.column", 7), "note my.column: TypeError"),
    "a note that fails": (lambda namer: namer.note("my.column", lambda: 1 // 0), "note my.column: ZeroDivisionError"),
    "a note too large": (lambda namer: namer.note("my.column", [1 << 70]), "no integer of 64 bits"),
    "a note without owner": (lambda namer: namer.note("column", [1]), "'column' is not OWNER.NAME"),
    "a note in a column of ours": (lambda namer: namer.note("prism.part", [1]), "one of Prism's own"),
    "a purpose": (lambda namer: namer.purposes({"default_pg": 7}), "purposes: a text is needed"),
    "a coordinate": (lambda namer: namer.coordinates({"dp": "first"}), "coordinates: 'str' object"),
    "an axis": (lambda namer: namer.coordinates({"a=b,c": 1}), "'a=b,c' is no name of an axis"),
    "a part of a group": (lambda namer: namer.part_of_group("g", part=3, phase="forward"), "part_of_group: a text"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_left_out_and_said(what: str, tmp_path: Path) -> None:
    say, reason = WRONG[what]
    _, _, facts = traced(tmp_path / "out.prism", say)
    assert facts["rank.0.fidelity"] == "reduced"
    assert reason.removesuffix("") in facts["rank.0.fidelity_reasons"]


def test_numbers_of_other_libraries_and_letters_of_other_tongues_are_right(tmp_path: Path) -> None:
    import numpy as np
    import torch

    def say(namer: Any) -> None:
        namer.leave(namer.enter(microbatch=np.int64(3), label="mikrobätch 漢字 🚂"))
        namer.leave(namer.enter(microbatch=torch.tensor(4), label="half \ud800"))

    microbatches, labels, facts = traced(tmp_path / "out.prism", say)
    assert {3, 4} < set(microbatches) and {"mikrobätch 漢字 🚂", "half \\ud800"} < set(labels)
    assert facts["rank.0.fidelity"] == "full"


def test_reasons_stay_few_and_on_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def say(namer: Any) -> None:
        namer.lower(RuntimeError("first; second\nthird"))
        namer.lower(RuntimeError("first; second\nthird"))
        for number in range(1000):
            namer.lower(f"{number}" + "x" * 10_000)

    _, _, facts = traced(tmp_path / "out.prism", say)
    reasons = facts["rank.0.fidelity_reasons"]
    assert reasons.startswith("one: first, second third; one: 0xxx") and reasons.endswith("one: and more")
    assert len(reasons) < 20_000
    report_lowered([{"fidelity_reasons": reasons}])
    assert capsys.readouterr().err.startswith(
        "prism: names are not complete (1 rank): adapter one: first, second third"
    )


def test_stretches_that_nobody_leaves_are_forgotten(tmp_path: Path) -> None:
    depths = []

    def say(namer: Any) -> None:
        for number in range(5_000):
            namer.enter(microbatch=number % 3)
            depths.append(len(namer._stack))

    _, _, facts = traced(tmp_path / "out.prism", say)
    assert max(depths) < 3_000
    assert "entered and never left" in facts["rank.0.fidelity_reasons"]


def test_a_token_that_is_none_does_not_reach_the_training(tmp_path: Path) -> None:
    results = []

    def say(namer: Any) -> None:
        def before() -> Any:
            namer.enter(microbatch=1)
            return "token"

        hook = AdapterHook("module", "function")
        wrapped = _wrapped(lambda: 5, Around(hook, before=before), namer, Wrapped(hook, Place(None, "function")))
        results.extend([wrapped(), wrapped()])

    _, _, facts = traced(tmp_path / "out.prism", say)
    assert results == [5, 5]
    assert "before returned 'token', which is no token" in facts["rank.0.fidelity_reasons"]


def test_threads_that_name_at_once_break_nothing(tmp_path: Path) -> None:
    def say(namer: Any) -> None:
        def work(number: int) -> None:
            for at in range(300):
                namer.leave(namer.enter("backward", microbatch=number, label=f"{at % 5}"))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    microbatches, _, _ = traced(tmp_path / "out.prism", say)
    assert set(microbatches) & {0, 1, 2, 3}
