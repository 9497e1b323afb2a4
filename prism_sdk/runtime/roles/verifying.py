"""Compares sampled ranks of a recording by roles with the ranks that stand for them.

Responsible for saying what differs, in words; what follows from it is the user's.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime.roles.layout import RolePlan
from prism_sdk.runtime.roles.mapping import Mapper
from prismtrace import ABSENT, Op, Phase, TraceReader, UnitKind, UnitTable
from prismtrace.structure import column_numbers

_COLUMNS = (
    "kind", "phase", "step", "op", "reduce_op", "dtype", "num_elements_in", "num_elements_out", "tag", "is_async",
    "seq", "microbatch", "stage", "model_chunk", "label", "splits_in", "splits_out",
)  # fmt: skip
_SIZES = frozenset({"num_elements_in", "num_elements_out", "splits_in", "splits_out"})
_NAMED = {"kind": UnitKind, "phase": Phase, "op": Op}


@dataclass(frozen=True)
class Disagreement:
    """A rank that does not do what the rank does that was to stand for it. `unit_index`: the first that differs."""

    rank: int
    representative: int
    unit_index: int | None
    num_units: int
    """How many units differ; 0 where the rank could not be followed to its end."""
    what: str
    is_routing: bool = False
    """Whether only sizes of all-to-alls differ, as they do where a rank has data of its own."""

    def __str__(self) -> str:
        where = "" if self.unit_index is None else f", at unit {self.unit_index}"
        whom = f"rank {self.representative}, which stands for its role"
        return f"rank {self.rank} differs from {whom}{where}: {self.what}"

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def disagreements(reader: TraceReader, plan: RolePlan, mapper: Mapper) -> list[Disagreement]:
    """What differs in the structure of sampled ranks, in a trace of the ranks that ran."""
    found = []
    for rank in plan.samples:
        standing = plan.representatives[int(plan.role_of[rank])]
        difference = _compare(reader, rank, standing, mapper)
        if difference is not None:
            found.append(difference)
    return found


def _compare(reader: TraceReader, rank: int, standing: int, mapper: Mapper) -> Disagreement | None:
    mine, theirs = reader.units(rank), reader.units(standing)
    num = min(len(mine), len(theirs))
    differs = np.zeros(num, np.bool_)
    columns: dict[str, NDArray[np.bool_]] = {}
    for name, (one, other) in _columns(mine, theirs, rank, standing, mapper).items():
        columns[name] = one[:num] != other[:num]
        differs |= columns[name]
    count = int(differs.sum()) + abs(len(mine) - len(theirs))
    if not count:
        return None
    is_routing = (
        len(mine) == len(theirs)
        and set(np.unique(mine.op[differs]).tolist()) == {int(Op.ALL_TO_ALL)}
        and not any(values.any() for name, values in columns.items() if name not in _SIZES)
    )
    first = int(differs.argmax()) if differs.any() else num
    if first == num:
        more, table, who = (mine, mine, rank) if len(mine) > num else (theirs, theirs, standing)
        what = f"rank {who} has {len(more) - num} units more, the first of them {_describe(table, first)}"
        return Disagreement(rank, standing, first, count, what)
    kind = ("kind", "op")
    if any(name in columns and columns[name][first] for name in kind):
        what = f"{_describe(mine, first)}, and not {_describe(theirs, first)}"
    else:
        parts = [f"{name} is {_value(mine, name, first)}, not {_value(theirs, name, first)}"
                 for name, different in columns.items() if different[first]]  # fmt: skip
        what = f"{_describe(mine, first)}: {'; '.join(parts)}"
    return Disagreement(rank, standing, first, count, what, is_routing)


def _columns(
    mine: UnitTable, theirs: UnitTable, rank: int, standing: int, mapper: Mapper
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    found = {name: (column_numbers(mine[name]), column_numbers(theirs[name])) for name in _COLUMNS}
    found["awaits"] = _back(mine), _back(theirs)
    found["group_id"] = mine.group_id.view(np.int64), theirs.group_id.view(np.int64)
    found["peer"] = mine.peer.astype(np.int64), theirs.peer.astype(np.int64)
    with contextlib.suppress(UnsupportedError):  # the rank lacks a group of its representative: the ids will differ
        for name, (codes, values) in mapper.columns(theirs, standing, [rank]).items():
            own, other = found[name]
            found[name] = own, np.where(codes >= 0, values[codes, 0], other)
    return found


def _back(units: UnitTable) -> NDArray[np.int64]:
    return np.where(units.awaits == ABSENT, ABSENT, units.row_index - units.awaits)


def _describe(units: UnitTable, row: int) -> str:
    kind = UnitKind(int(units.kind[row])).name.lower()
    name = Op(int(units.op[row])).name.lower() if units.op[row] else kind
    return f"{name} of step {int(units.step[row])}"


def _value(units: UnitTable, name: str, row: int) -> str:
    value: Any = units[name][row]
    if name in _NAMED:
        return str(_NAMED[name](int(value)).name.lower())
    if name.startswith("splits") and value is not None:
        return str(value.tolist())
    return "absent" if value is None or value == ABSENT else str(value)
