"""Says what each layer, or FSDP unit, costs in time and communication. It needs the layers that adapters name.

The layer of a unit is its column ``prism.layer``; a wait has that of what it waits for. Times are sums over the steady
steps, divided by their number, and then means over the ranks that have the layer:

- *forward*, *backward*, *other*: COMPUTE units by phase; recomputation in a backward pass counts as backward.
- *waiting*: WAIT units, so communication that nothing hides, and waiting for other ranks.
- *communication*: from post to completion, hidden or not; what overlaps counts more than once.
- *bytes*: what the rank hands over or gets, the larger of the two (as S of ``bandwidths`` for one member).
- *share*: computing and waiting, of the step time of all ranks, also of those that do not have the layer: the shares of
  all layers and of units without one add up to the share of the time that ranks compute or wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.job import Job
from prismtrace import ABSENT, ABSENT32, DictionaryColumn, DType, Op, Phase, TraceReader, UnitKind

__all__ = ["LayerCost", "layer_costs"]

Int64Array = npt.NDArray[np.int64]
_COLUMN = "prism.layer"
_ENUMS: dict[str, type[IntEnum]] = {"kind": UnitKind, "phase": Phase, "op": Op, "dtype": DType}
#: What ranks differ in that are alike otherwise (``folded``).
_OF_NUMBERS = ("group_id", "peer")
_FIGURES = ("forward_ns", "backward_ns", "other_ns", "waiting_ns", "communication_ns", "communication_bytes")
_NUM_TIMES = 4  # the first ones make up ``time_ns``
_ITEM_BYTES = np.array([DType(number).itemsize_bytes if number in DType._value2member_map_ else 0
                        for number in range(256)], dtype=np.int64)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer; times and bytes are those of a step, means over ``num_ranks`` ranks."""

    #: As the adapter calls it (or the value of another column); None for units without.
    layer: str | None
    num_ranks: int
    forward_ns: float
    backward_ns: float
    other_ns: float
    waiting_ns: float
    communication_ns: float
    communication_bytes: float
    #: Of the step time of all ranks, 0 to 1: what this layer holds them up for.
    share: float

    @property
    def time_ns(self) -> float:
        """What the layer holds the rank up for: computing and waiting."""
        return self.forward_ns + self.backward_ns + self.other_ns + self.waiting_ns


def layer_costs(source: TraceReader, job: Job, *, column: str = _COLUMN) -> tuple[LayerCost, ...]:
    """The layers of a job, the dearest first; () where no unit has a layer.

    Args:
        source: the trace of ``job``.
        job: what was loaded of it; a trace without steps has no layers.
        column: another column of names or whole numbers, such as ``prism.part`` or ``microbatch``, in place of layers.
    """
    windows = job.windows
    numbers = np.unique(windows.step)
    steps = range(int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) and numbers[0] != ABSENT32 else None
    has_own = job.fold is not None and column in _OF_NUMBERS  # of ranks that are otherwise alike
    keys = list(range(len(job.ranks))) if has_own else job.place.tolist()
    ranks = job.ranks if has_own else job.graph.ranks
    places = dict(zip(keys, job.place.tolist(), strict=True))

    def names(key: int) -> tuple[Int64Array, DictionaryColumn[str]]:
        return _names(source, job, places[key], ranks[key], steps, column)

    if not any(len(names(key)[1].values) for key in places):
        return ()
    found: dict[str | None, list[npt.NDArray[np.float64]]] = {}
    known: dict[int, dict[str | None, npt.NDArray[np.float64]]] = {}
    lengths: dict[int, tuple[Int64Array, float]] = {}  # by place: the steps that count, and how long one takes
    step_ns = 0.0
    for position, (key, place) in enumerate(zip(keys, job.place.tolist(), strict=True)):
        if place not in lengths:
            chosen = slice(int(job.window_bounds[position]), int(job.window_bounds[position + 1]))
            is_steady = windows.is_steady[chosen]
            steady = np.unique(windows.step[chosen][is_steady])
            lengths[place] = steady, float(windows.length_ns[chosen][is_steady].sum()) / max(len(steady), 1)
        steady, length_ns = lengths[place]
        if not len(steady):
            continue
        step_ns += length_ns
        if key not in known:
            known[key] = _of_rank(job, *names(key), steady)
        for layer, cost in known[key].items():
            found.setdefault(layer, []).append(cost)
    if not found.keys() - {None}:
        return ()
    costs = []
    for layer, each in found.items():
        figures = dict(zip(_FIGURES, np.mean(each, axis=0).tolist(), strict=True))
        held_ns = float(np.sum(each, axis=0)[:_NUM_TIMES].sum())
        costs.append(LayerCost(layer=layer, num_ranks=len(each), share=held_ns / step_ns if step_ns else 0.0,
                               **figures))  # fmt: skip
    return tuple(sorted(costs, key=lambda cost: -cost.time_ns))


def _names(
    source: TraceReader, job: Job, place: int, rank: int, steps: range | None, column: str
) -> tuple[Int64Array, DictionaryColumn[str]]:
    """The rows that a rank of the graph has, and their values of the column for ``rank``, which it stands for."""
    graph = job.graph
    table = source.units(rank, steps=steps, columns=[column])
    layers = table.columns().get(column)
    if isinstance(layers, np.ndarray) and layers.dtype.kind in "iu":
        absent = {"i4": ABSENT32, "i8": ABSENT}.get(layers.dtype.str[1:], 0)  # 0: UNSPECIFIED, or no group
        known = layers != absent
        numbers, codes = np.unique(layers[known], return_inverse=True)
        numbered = np.full(len(layers), -1, dtype=np.int32)
        numbered[known] = codes
        words = {int(item): item.name.lower() for item in _ENUMS.get(column, ())}
        layers = DictionaryColumn(numbered, tuple(words.get(number, str(number)) for number in numbers.tolist()))
    if not isinstance(layers, DictionaryColumn):  # no unit of this rank has a value, or one that names nothing
        layers = DictionaryColumn(np.full(len(table), -1, dtype=np.int32), ())
    rows = table.row_index - int(graph.first_index[place]) + int(graph.offsets[place])
    inside = (rows >= graph.offsets[place]) & (rows < graph.offsets[place + 1])
    return rows[inside], layers.take(inside)


def _of_rank(
    job: Job, rows: Int64Array, layers: DictionaryColumn[str], steady: Int64Array
) -> dict[str | None, npt.NDArray[np.float64]]:
    """The figures of each layer of one rank, a step."""
    c = {name: job.graph.columns[name][rows] for name in (
        "kind", "phase", "step", "start_ns", "end_ns", "dtype", "num_elements_in", "num_elements_out")}  # fmt: skip
    used = np.unique(layers.codes)
    texts = sorted({layers.values[code] for code in used.tolist() if code >= 0})
    code_of: dict[str | None, int] = {None: 0, **{text: number for number, text in enumerate(texts, 1)}}
    numbers = np.array([0 if code < 0 else code_of[layers.values[code]] for code in used.tolist()], dtype=np.int64)
    codes = numbers[np.searchsorted(used, layers.codes)]
    kind, start, completion = c["kind"], c["start_ns"], job.completion_ns[rows]
    host = (c["end_ns"] != ABSENT) & (start != ABSENT)
    talks = (kind >= UnitKind.COLLECTIVE) & (kind <= UnitKind.RECV)
    computes = host & (kind == UnitKind.COMPUTE)
    flies = talks & (completion != ABSENT) & (start != ABSENT)
    lasts = np.where(flies, np.maximum(completion - start, 0), c["end_ns"] - start)
    size = np.maximum(np.maximum(c["num_elements_in"], c["num_elements_out"]), 0) * _ITEM_BYTES[c["dtype"]]
    is_forward, is_backward = c["phase"] == Phase.FORWARD, c["phase"] == Phase.BACKWARD
    figures = (
        (computes & is_forward, lasts), (computes & is_backward, lasts), (computes & ~is_forward & ~is_backward, lasts),
        (host & (kind == UnitKind.WAIT), lasts), (flies, lasts), (talks, size),
    )  # fmt: skip
    counted = np.isin(c["step"], steady)
    total = np.zeros((len(texts) + 1, len(figures)))
    for number, (chosen, values) in enumerate(figures):
        chosen = chosen & counted
        np.add.at(total[:, number], codes[chosen], values[chosen])
    present = set(codes[counted].tolist())
    return {layer: total[code] / len(steady) for layer, code in code_of.items() if code in present}
