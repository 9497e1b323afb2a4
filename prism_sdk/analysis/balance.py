"""Says how evenly experts are loaded, from the sizes of all-to-alls. It knows no router and no model.

The load of a member is what it receives: the sum of ``splits_out``, else ``num_elements_out``. For one operation with
members' loads L: *imbalance* = max(L) / mean(L), 1 when even: by this factor the most loaded member's experts have more
to do than with even routing. *Variation* = standard deviation / mean, the coefficient whose square is the load loss of
Shazeer et al., "Outrageously Large Neural Networks" (ICLR 2017).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prismtrace import ABSENT, Op, TraceReader

__all__ = ["GroupBalance", "moe_balance"]


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
    found = [_of_group(source, group_id, by_seq, wanted) for group_id, by_seq in sorted(loads.items())]
    return tuple(sorted((item for item in found if item is not None), key=lambda item: -item.imbalance))


def _loads(reader: TraceReader, rank: int, steps: range | None) -> Iterator[tuple[int, int, int]]:
    names = ["op", "group_id", "seq", "num_elements_out", "splits_out"]
    for part in reader.iter_units(rank, steps=steps, columns=names):
        for row in np.flatnonzero((part.op == Op.ALL_TO_ALL) & (part.seq != ABSENT)).tolist():
            splits = part.splits_out[row]
            load = int(splits.sum()) if splits is not None else int(part.num_elements_out[row])
            if load != ABSENT:
                yield int(part.group_id[row]), int(part.seq[row]), load


def _of_group(
    reader: TraceReader, group_id: int, by_seq: dict[int, dict[int, int]], wanted: Sequence[int]
) -> GroupBalance | None:
    group = reader.groups.get(group_id)
    present = set(wanted)
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
        group_id=group_id, group_name=group.description or group.name, ranks=tuple(members), num_operations=len(table),
        imbalance=float(imbalance.mean()), variation=float((table.std(axis=1) / mean).mean()),
        worst_imbalance=float(imbalance[worst]), worst_seq=sorted(whole)[worst],
        shares=tuple((table.sum(axis=0) / table.sum()).tolist()),
    )  # fmt: skip
