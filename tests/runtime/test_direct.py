"""Calls that pass neither the dispatcher nor a whole description: what a trace says of them, and who sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from prism_sdk.runtime.calls import GroupState  # noqa: E402
from prism_sdk.runtime.direct import _PLAIN, _REDUCTIONS, _device_of  # noqa: E402
from prism_sdk.runtime.observe import _outline_of  # noqa: E402
from prism_sdk.runtime.operators import OPERATORS  # noqa: E402
from prism_sdk.runtime.outlines import OUTLINES  # noqa: E402
from prismtrace import Op, TraceReader, UnitKind  # noqa: E402

GROUP = GroupState(name="g", ranks=(3, 5), group_rank=1, backend="gloo", description="", group_id=7)
ONE, TWO = torch.zeros(3, 4), torch.zeros(6, 4, dtype=torch.float64)
AVG = _REDUCTIONS[1]
ARGUMENTS: list[tuple[str, tuple[Any, ...]]] = [
    ("allreduce_", ([ONE], None, AVG, None, False)),
    ("allreduce_", ([ONE], None, AVG)),
    ("broadcast_", ([ONE], None, 0, 0, False)),
    ("broadcast_", ([ONE], None, 1, 0)),
    ("_allgather_base_", (TWO, ONE, None, False)),
    ("_allgather_base_", (TWO, ONE, None)),
    ("allgather_into_tensor_coalesced_", ([TWO, ONE], [ONE, ONE[:1]], None)),
    ("_reduce_scatter_base_", (ONE, TWO, None, AVG, False)),
    ("reduce_scatter_tensor_coalesced_", ([ONE, ONE], [TWO, TWO], None, AVG)),
    ("alltoall_base_", (ONE, TWO, None, [1, 2], [5, 1])),
    ("alltoall_base_", (TWO, TWO, None, [], [], False)),
    ("alltoall_base_", (torch.zeros(0, 4), ONE, None, [0, 0], [1, 2])),
    ("send", ([ONE], None, 0, 11)),
    ("recv_", ([TWO], None, 0, 11)),
]


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS)
def test_an_outline_says_what_the_whole_description_says(name: str, arguments: tuple[Any, ...]) -> None:
    outline = OUTLINES[name](GROUP, arguments)
    assert outline is not None
    whole = _outline_of(OPERATORS[name](GROUP, lambda: None, arguments))
    assert outline[:10] == whole[:10]
    assert [id(tensor) for tensor in outline[10]] == [id(tensor) for tensor in whole[10]]
    assert outline[11:] == whole[11:]


def test_each_outline_is_compared() -> None:
    assert {name for name, _ in ARGUMENTS} == OUTLINES.keys()


def test_what_only_a_whole_description_knows_has_no_outline() -> None:
    assert OUTLINES["allreduce_"](GROUP, ([ONE, ONE], None, AVG)) is None
    assert OUTLINES["_allgather_base_"](GROUP, (TWO.t(), ONE, None)) is None
    assert OUTLINES["allgather_into_tensor_coalesced_"](GROUP, ([], [], None)) is None


def test_only_plain_tensors_do_without_the_dispatcher() -> None:
    with torch.inference_mode():
        inference = torch.zeros(2)
    wants_gradient = torch.zeros(2, requires_grad=True)
    for plain in (ONE, torch.nn.Parameter(ONE, requires_grad=False), inference):
        assert _device_of(plain) == torch.device("cpu")
    with torch.no_grad():
        assert _device_of(wants_gradient) == torch.device("cpu")
    complex_ones = torch.zeros(2, dtype=torch.complex64)
    others = [
        wants_gradient, ONE.to_sparse(), ONE.to("meta"), complex_ones.conj(), complex_ones.conj().imag, None,
        torch.nn.parameter.UninitializedParameter(),
    ]  # fmt: skip
    assert [_device_of(other) for other in others] == [None] * len(others)
    torch.func.grad(lambda x: (_is_let_through(x), x.sum())[1])(torch.zeros(2))
    assert len(_PLAIN) == 4


def _is_let_through(wrapped: Any) -> None:
    with torch.no_grad():
        assert _device_of(wrapped) is None


SCRIPT = """
    import warnings
    import torch
    import torch.distributed as dist
    from torch.profiler import profile
    from torch.utils._python_dispatch import TorchDispatchMode

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    one, many = torch.ones(4), torch.ones(4 * size)

    def calls():
        results = []
        dist.all_reduce(one, op=dist.ReduceOp.MAX)
        work = dist.all_reduce(one, async_op=True)
        results.append(work.get_future().wait()[0] is not None and work.wait())
        dist.all_gather_into_tensor(many, one)
        dist.reduce_scatter_tensor(one, many, op=dist.ReduceOp.MIN)
        dist.broadcast(one, 1)
        dist.all_gather(list(many.chunk(size)), one)
        dist.all_to_all_single(many, many.clone())
        for request in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, one, (rank + 1) % size), dist.P2POp(dist.irecv, many[:4], (rank - 1) % size)]):
            request.wait()
        try:
            dist.all_reduce(torch.ones(3, dtype=torch.bfloat16), op=dist.ReduceOp.BAND)
        except RuntimeError as error:
            results.append(str(error).splitlines()[0])
        return results

    class Mode(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    plain = calls()
    with Mode() as mode:
        assert calls() == plain
    assert sum(name.startswith("c10d.") for name in mode.seen) == 10, mode.seen
    with profile() as profiled:
        assert calls() == plain
    assert sum(event.count for event in profiled.key_averages() if event.key.startswith("c10d::")) == 10

    graphs = []
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def step(value):
        doubled = value * 2
        dist.broadcast(doubled, 0)  # no graph holds it
        dist.barrier()
        return doubled + 1
    assert step(torch.ones(2)).tolist() == [3, 3] and len(graphs) == 2, len(graphs)
    print(plain)
"""


def test_a_trace_says_the_same_of_calls_that_modes_and_profilers_see(bench: Any) -> None:
    """Once past the dispatcher, then under a mode, then under the profiler; and where a compiled graph breaks."""
    ended = bench.run_shared("observe", bench.script(SCRIPT), "--nproc-per-node", "2", "-q")
    assert ended.code == 0, ended.err
    with TraceReader(bench.output) as reader:
        units = reader.units(0)
    first = units.kind != UnitKind.COMPUTE
    names = (
        "kind", "op", "reduce_op", "dtype", "num_elements_in", "num_elements_out", "peer", "tag", "is_async",
        "group_id",
    )  # fmt: skip
    rows = np.stack([np.asarray(getattr(units, name))[first] for name in names])
    repeated, rest = rows[:, :-4], rows[:, -4:]
    assert repeated.shape[1] % 3 == 0 and repeated.shape[1] >= 3 * 18
    for one in np.split(repeated, 3, axis=1)[1:]:
        assert one.tolist() == np.split(repeated, 3, axis=1)[0].tolist()
    assert rest[1].tolist() == [Op.BROADCAST, Op.UNSPECIFIED, Op.BARRIER, Op.UNSPECIFIED]
