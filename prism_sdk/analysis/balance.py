"""Says how evenly experts are loaded, from the sizes of all-to-alls and the routers' counts. It knows no model.

The load of a member is what it receives: the sum of ``splits_out``, else ``num_elements_out``. For one operation with
members' loads L: *imbalance* = max(L) / mean(L), 1 when even: by this factor the most loaded member's experts have more
to do than with even routing. *Variation* = standard deviation / mean, the coefficient whose square is the load loss of
Shazeer et al., "Outrageously Large Neural Networks" (ICLR 2017).

Where adapters noted ``moe.tokens_per_expert``, the loads L are also known for each expert of a layer: the tokens that
all ranks of one step and microbatch routed to it, over all copies that data parallelism keeps of it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.folded import Fold
from prism_sdk.analysis.job import Job, group_titles
from prismtrace import ABSENT, ABSENT32, Op, TraceReader

__all__ = ["ExpertLoad", "GroupBalance", "balance_of_job", "expert_loads", "experts_of_job", "moe_balance"]

_TOKENS = "moe.tokens_per_expert"


@dataclass(frozen=True, kw_only=True)
class GroupBalance:
    """The all-to-alls of one group; those whose members all receive the same are counted, too."""

    group_id: int
    group_name: str
    ranks: tuple[int, ...]
    num_operations: int
    #: Means over the operations.
    imbalance: float
    variation: float
    worst_imbalance: float
    worst_seq: int
    #: (n,) each rank's share of all that was received; adds up to 1.
    shares: tuple[float, ...]


def moe_balance(
    source: str | os.PathLike[str] | TraceReader, *, ranks: Sequence[int] | None = None, steps: range | None = None
) -> tuple[GroupBalance, ...]:
    """The balance of each group with all-to-alls that all (chosen) members have and that have sizes."""
    if not isinstance(source, TraceReader):
        with TraceReader(os.fspath(source), allow_unfinished=True) as reader:
            return moe_balance(reader, ranks=ranks, steps=steps)
    wanted = sorted(set(source.ranks) if ranks is None else set(source.ranks) & set(ranks))
    loads: dict[int, dict[int, dict[int, int]]] = {}
    for rank in wanted:
        for group_id, seq, load in _loads(source, rank, steps):
            loads.setdefault(group_id, {}).setdefault(seq, {})[rank] = load
    present, titles = set(wanted), group_titles(source.groups, source.metadata)
    found = [_of_group(source, group_id, by_seq, present, titles.get(group_id, ""))
             for group_id, by_seq in sorted(loads.items())]  # fmt: skip
    return tuple(sorted((item for item in found if item is not None), key=lambda item: -item.imbalance))


def balance_of_job(source: TraceReader, job: Job, *, steps: range | None = None) -> tuple[GroupBalance, ...]:
    """As ``moe_balance``, for the ranks of a job."""
    fold = job.fold
    if fold is None:
        return moe_balance(source, ranks=job.ranks, steps=steps)
    class_of = {}  # of groups, for the ranks in the graph
    kept = np.flatnonzero(np.isin(fold.pair_position, fold.first_position))
    for pair in kept[~fold.is_message[fold.lane_of_pair[kept]]].tolist():
        lane = fold.lane_of_pair[pair]
        class_of[fold.ranks[fold.pair_position[pair]], int(fold.group_of_lane[lane])] = int(fold.class_of_lane[lane])
    loads: dict[tuple[int, int], dict[int, int]] = {}  # by place and class
    for place, rank in enumerate(job.graph.ranks):
        for group_id, seq, load in _loads(source, rank, steps):
            loads.setdefault((place, class_of[rank, group_id]), {})[seq] = load
    having, ranks = {number for _, number in loads}, np.array(fold.ranks)
    lanes = np.flatnonzero(np.isin(fold.class_of_lane, sorted(having)) & ~fold.is_message)
    known: dict[bytes, GroupBalance | None] = {}
    found = []
    for lane in lanes[np.argsort(fold.group_of_lane[lanes])].tolist():
        group_id, number = int(fold.group_of_lane[lane]), int(fold.class_of_lane[lane])
        places = _places(fold, ranks, group_id)
        key = np.append(places[1], number).tobytes()
        if key not in known:
            by_seq: dict[int, dict[int, int]] = {}
            for rank, place in zip(places[0].tolist(), places[1].tolist(), strict=True):
                for seq, load in loads.get((place, number), {}).items():
                    by_seq.setdefault(seq, {})[rank] = load
            known[key] = _of_group(source, group_id, by_seq, set(places[0].tolist()), job.titles[group_id])
        same = known[key]
        if same is not None:
            ranks_of_group = tuple(places[0].tolist())
            found.append(replace(same, group_id=group_id, group_name=job.titles[group_id], ranks=ranks_of_group))
    return tuple(sorted(found, key=lambda item: -item.imbalance))


def _places(
    fold: Fold, ranks: npt.NDArray[np.int64], group_id: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The members of a group that are analysed, in group order, and the places of those who stand for them."""
    members = np.array(fold.groups[group_id].ranks, dtype=np.int64)
    at = np.searchsorted(ranks, members).clip(0, len(ranks) - 1)
    inside = ranks[at] == members
    return members[inside], fold.place[at[inside]]


def _loads(reader: TraceReader, rank: int, steps: range | None) -> Iterator[tuple[int, int, int]]:
    names = ["op", "group_id", "seq", "num_elements_out", "splits_out"]
    for part in reader.iter_units(rank, steps=steps, columns=names):
        rows = np.flatnonzero((part.op == Op.ALL_TO_ALL) & (part.seq != ABSENT))
        splits = part.splits_out
        sums = np.concatenate([[0], np.cumsum(splits.values)])[splits.offsets]
        loads = np.where(splits.valid, sums[1:] - sums[:-1], part.num_elements_out)[rows]
        known = loads != ABSENT
        rows = rows[known]
        yield from zip(part.group_id[rows].tolist(), part.seq[rows].tolist(), loads[known].tolist(), strict=True)


def _of_group(
    reader: TraceReader, group_id: int, by_seq: dict[int, dict[int, int]], present: Collection[int], title: str
) -> GroupBalance | None:
    group = reader.groups.get(group_id)
    members = [rank for rank in (group.ranks if group is not None else ()) if rank in present]
    whole = {seq: [loads[rank] for rank in members] for seq, loads in by_seq.items()
             if len(members) > 1 and set(members) <= set(loads) and any(loads.values())}  # fmt: skip
    if not whole or group is None:
        return None
    table: npt.NDArray[np.float64] = np.array([whole[seq] for seq in sorted(whole)], dtype=np.float64)
    mean = table.mean(axis=1)
    imbalance = table.max(axis=1) / mean
    worst = int(np.argmax(imbalance))
    return GroupBalance(
        group_id=group_id, group_name=title, ranks=tuple(members), num_operations=len(table),
        imbalance=float(imbalance.mean()), variation=float((table.std(axis=1) / mean).mean()),
        worst_imbalance=float(imbalance[worst]), worst_seq=sorted(whole)[worst],
        shares=tuple((table.sum(axis=0) / table.sum()).tolist()),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """The experts of one layer; None: the router's units have no layer."""

    layer: str | None
    #: (E,) tokens that each expert got, over all ranks and steps; a token counts once for each of its experts.
    tokens: tuple[int, ...]
    num_ranks: int
    #: Microbatches, each of all ranks together, over which the means go.
    num_routings: int
    #: Largest over mean load, mean and largest over the routings.
    imbalance: float
    worst_imbalance: float


def expert_loads(
    source: str | os.PathLike[str] | TraceReader, *, ranks: Sequence[int] | None = None, steps: range | None = None
) -> tuple[ExpertLoad, ...]:
    """What routers decided, layer by layer, the least even first; () where no adapter noted it."""
    if not isinstance(source, TraceReader):
        with TraceReader(os.fspath(source), allow_unfinished=True) as reader:
            return expert_loads(reader, ranks=ranks, steps=steps)
    wanted = sorted(set(source.ranks) if ranks is None else set(source.ranks) & set(ranks))
    return _expert_loads(source, wanted, [1] * len(wanted), steps)


def experts_of_job(source: TraceReader, job: Job, *, steps: range | None = None) -> tuple[ExpertLoad, ...]:
    """As ``expert_loads``, for the ranks of a job."""
    return _expert_loads(source, job.graph.ranks, np.bincount(job.place).tolist(), steps)


def _expert_loads(
    source: TraceReader, ranks: Sequence[int], counts: Sequence[int], steps: range | None
) -> tuple[ExpertLoad, ...]:
    """`counts`: how many ranks have the routers of each."""
    # layer -> step, microbatch and how many times before in it -> tokens of each expert
    found: dict[str | None, dict[tuple[int, int, int], npt.NDArray[np.int64]]] = {}
    members: dict[str | None, dict[int, int]] = {}
    for rank, count in zip(ranks, counts, strict=True):
        seen: dict[tuple[str | None, int, int], int] = {}
        for layer, step, microbatch, tokens in _routings(source, rank, steps):
            times = seen[layer, step, microbatch] = seen.get((layer, step, microbatch), -1) + 1
            before = found.setdefault(layer, {}).setdefault((step, microbatch, times), np.zeros(0, dtype=np.int64))
            total = np.zeros(max(len(before), len(tokens)), dtype=np.int64)
            total[: len(before)] += before
            total[: len(tokens)] += tokens * count
            found[layer][step, microbatch, times] = total
            members.setdefault(layer, {})[rank] = count
    loads = [
        _of_layer(layer, list(routings.values()), sum(members[layer].values())) for layer, routings in found.items()
    ]
    return tuple(sorted((load for load in loads if load is not None), key=lambda load: -load.imbalance))


def _routings(
    reader: TraceReader, rank: int, steps: range | None
) -> Iterator[tuple[str | None, int, int, npt.NDArray[np.int64]]]:
    """Layer, step, microbatch (-1: unknown) and tokens of each expert, in the order of the program."""
    for part in reader.iter_units(rank, steps=steps, columns=["step", "microbatch", "prism.layer", _TOKENS]):
        columns: dict[str, Any] = dict(part.columns())
        if _TOKENS not in columns:
            continue
        layers = columns.get("prism.layer")
        for row, counts in enumerate(columns[_TOKENS]):
            if counts is not None and len(counts):
                microbatch = int(part.microbatch[row])
                yield (
                    None if layers is None else layers[row], int(part.step[row]),
                    -1 if microbatch == ABSENT32 else microbatch, np.asarray(counts, dtype=np.int64),
                )  # fmt: skip


def _of_layer(layer: str | None, routings: list[npt.NDArray[np.int64]], num_ranks: int) -> ExpertLoad | None:
    num_experts = max(map(len, routings))
    table = np.array([np.pad(one, (0, num_experts - len(one))) for one in routings if one.sum()], dtype=np.float64)
    if not len(table):
        return None
    imbalance = table.max(axis=1) / table.mean(axis=1)
    return ExpertLoad(
        layer=layer, tokens=tuple(int(one) for one in table.sum(axis=0)), num_ranks=num_ranks, num_routings=len(table),
        imbalance=float(imbalance.mean()), worst_imbalance=float(imbalance.max()),
    )  # fmt: skip
