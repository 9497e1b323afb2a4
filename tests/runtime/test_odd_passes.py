"""Passes that do not go as usual: failed, recomputed, compiled, and stretches whose end does not come."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, OfObjects, PatchingAdapter
from prism_sdk.runtime.adapters import Naming, TracerNamer
from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.hooks import _is_traced
from prism_sdk.runtime.tracer import Tracer
from prism_sdk.testing import NullNamer, unit_order
from prismtrace import GraphKind, Op, ProcessGroup, TraceReader, TraceWriter

GROUP = GroupState("dp_group", (0, 1), 0, "gloo", "mesh_dp", 77)


class Rank:
    """A tracer with no program behind it, and the namer of one adapter."""

    def __init__(self, path: Path) -> None:
        self.path, self.seq = path, 0
        self.tracer = Tracer(0, TraceWriter(path, graph_kind=GraphKind.BARE, world_size=2), memory=lambda: 0)
        self.tracer.add_group(ProcessGroup(77, "dp_group", "mesh_dp", "gloo", (0, 1)))
        self.naming = Naming(self.tracer)
        self.namer = TracerNamer(self.naming, "one")

    def talk(self) -> None:
        self.tracer.communication(Call(Op.ALL_REDUCE, GROUP, native=lambda: None), self.tracer.now(), self.seq)
        self.seq += 1

    def written(self) -> tuple[list[Any], str]:
        self.naming.write()
        self.tracer.finish("complete")
        with TraceReader(self.path) as reader:
            reasons = reader.metadata.get("rank.0.fidelity_reasons", "")
        return [unit for unit in unit_order(self.path, 0, named_only=False) if unit.op is not None], reasons


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path / "out.prism")
    yield rank
    rank.tracer.finish("complete")


def test_leaving_again_what_has_ended_ends_nothing_else(rank: Rank) -> None:
    ended = rank.namer.enter(layer="a")
    rank.namer.leave(ended)
    rank.namer.enter("forward", microbatch=1)
    rank.namer.enter(layer="b")
    rank.namer.leave(ended)
    rank.talk()
    (unit,), _ = rank.written()
    assert (unit.phase, unit.microbatch, unit.layer) == ("forward", 1, "b")


@pytest.mark.parametrize("is_left", [True, False])
def test_a_stretch_whose_end_does_not_come_ends_with_the_pass(rank: Rank, is_left: bool) -> None:
    outer = rank.namer.enter("forward", microbatch=0)
    token = rank.namer.enter(layer="failed")
    rank.namer.ends_later(token)
    if is_left:
        rank.namer.leave(token)
    else:
        rank.namer.ends_later(outer)  # the exception went through both
    rank.tracer.optimizer_begins()
    rank.talk()
    rank.tracer.optimizer_ends()
    (unit,), reasons = rank.written()
    assert unit.layer is None and unit.phase == "optimizer"
    assert (unit.microbatch is None) is not is_left
    assert ("never ended" in reasons) is not is_left


def test_an_optimizer_in_a_backward_pass_leaves_its_names_alone(rank: Rank) -> None:
    rank.namer.assume(microbatch=2)
    rank.tracer.backward_begins([])
    token = rank.namer.enter(part="grad_sync", layer="a")
    rank.namer.ends_later(token)
    rank.tracer.optimizer_begins()
    rank.talk()
    rank.tracer.optimizer_ends()
    rank.talk()
    rank.namer.leave(token)
    rank.talk()
    found, reasons = rank.written()
    assert [(unit.phase, unit.microbatch, unit.layer, unit.part) for unit in found] == [
        ("optimizer", None, None, None), ("backward", 2, "a", "grad_sync"), ("backward", 2, None, None),
    ]  # fmt: skip
    assert not reasons


def test_a_reducer_inside_of_a_named_backward_pass_is_told_apart(rank: Rank) -> None:
    rank.namer.part_of_group("dp_group", part="grad_sync", phase="backward")
    for part in ("backward", "param_gather"):
        token = rank.namer.enter("backward", microbatch=1, part=part)
        rank.talk()
        rank.namer.leave(token)
    found, _ = rank.written()
    assert [(unit.part, unit.microbatch) for unit in found] == [("grad_sync", 1), ("param_gather", 1)]


def test_a_stage_without_microbatch_owns_the_schedule_too(rank: Rank) -> None:
    assert not rank.namer.is_scheduled
    rank.namer.enter(stage=1, label="shapes")
    assert rank.namer.is_scheduled


def test_what_is_known_of_an_object_goes_with_it() -> None:
    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    known: OfObjects[str] = OfObjects()
    first, second = Equal(), Equal()
    known[first] = "first"
    known[first] = "again"
    assert known.get(first) == "again" and second not in known and known.get(None) is None
    known[second] = "second"
    address = id(first)
    del first
    gc.collect()
    assert address not in known._values and known.get(second) == "second"


# --- torch.compile ---------------------------------------------------------------------------------------------------


class Adapter(PatchingAdapter):
    name, description, distribution = "math", "an adapter of functions that exist here only", "torch"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def hooks(self) -> list[AdapterHook]:
        return [
            AdapterHook("tiny_math", "inner"),
            AdapterHook("tiny_math", "outer"),
            AdapterHook("tiny_math", "broken"),
        ]

    def around(self, namer: UnitNamer) -> list[Around]:
        def begin(x: Any) -> int:
            self.seen.append(type(x).__name__)
            return namer.enter("forward")

        inner, outer, broken = self.hooks()
        return [
            Around(inner, before=begin),
            Around(outer, before=begin),
            Around(broken, before=begin, is_compiled=False),
        ]


@pytest.fixture
def tiny_math() -> Iterator[Any]:
    module = types.ModuleType("tiny_math")
    exec(
        "import torch\n"
        "def inner(x):\n    return x * 2\n"
        "def outer(x):\n    return fused(x)\n"
        "def broken(x):\n    torch._dynamo.graph_break()\n    return x + 1\n"
        "def fused(x):\n    return inner(x) + 1\n",
        vars(module),
    )
    sys.modules["tiny_math"] = module
    yield module
    del sys.modules["tiny_math"]
    torch._dynamo.reset()


def test_a_graph_in_one_piece_stays_one_and_the_trace_says_what_is_not_named(tiny_math: Any) -> None:
    adapter, namer, x = Adapter(), NullNamer(), torch.ones(3)
    with adapter.activate(namer):
        fused = tiny_math.fused = torch.compile(tiny_math.fused, backend="eager", fullgraph=True)
        assert torch.equal(fused(x), torch.full((3,), 3.0))
        assert adapter.seen == [] and namer.reasons == [
            "tiny_math.inner is inside of what torch.compile compiled: not named there"
        ]
        assert torch.equal(tiny_math.outer(x), torch.full((3,), 3.0))  # this call is Python's
        assert adapter.seen == ["Tensor"]


def test_frames_of_wrappers_are_not_compiled_where_a_graph_breaks(tiny_math: Any) -> None:
    adapter, namer, x = Adapter(), NullNamer(), torch.ones(3)
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    with adapter.activate(namer):
        step = torch.compile(lambda y: tiny_math.broken(y * 3) * 2, backend=backend)
        assert [step(x).tolist() for _ in range(2)] == [[8.0] * 3] * 2
    assert adapter.seen == ["Tensor"] * 2 and namer.reasons == []


def test_a_compiler_that_looks_at_a_backward_pass_is_no_backward_pass() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    seen: list[bool] = []

    def gradient(x: Any) -> Any:
        seen.append(_is_traced())
        y = x.detach().requires_grad_()
        return torch.autograd.grad((y * y).sum(), y)[0]

    make_fx(gradient)(torch.ones(2))
    assert seen == [True] and not _is_traced()


def test_hooks_are_looked_after_where_a_step_ends_and_a_group_begins(rank: Rank) -> None:
    seen: list[str] = []

    def looked() -> None:
        seen.append("group")
        raise ValueError("no")

    rank.namer.watch(step_ends=lambda: seen.append("step"), group_begins=looked)
    rank.tracer.add_group(ProcessGroup(78, "tp_group", "mesh_tp", "gloo", (0, 1)))
    for _ in range(2):
        rank.tracer.backward_begins([])
        rank.tracer.backward_ends()
        for _ in range(2):  # several optimizers are one step
            rank.tracer.optimizer_begins()
            rank.tracer.optimizer_ends()
    rank.naming.close()
    rank.tracer.add_group(ProcessGroup(79, "pp_group", "mesh_pp", "gloo", (0, 1)))
    assert seen == ["group", "step", "step"]
    assert rank.naming.lowered == {"one": ["watching its hooks: ValueError: no"]}
