"""Holds the boundary plan of a hybrid emulation: when the virtual members arrive at each boundary operation.

It does not compute the plan (``contract``) and holds no communication back (the runtime).

A *boundary operation* is a collective with sandbox and virtual members, or a message between a sandbox and a virtual
rank. Operation j starts at its last arrival

    A(j) = max(posts of its sandbox members, max over its terms (i, w) of A(i) + w)

where A(START) is the origin of the job's clock and terms refer to operations before j. It completes for a sandbox
member m at ``A(j) + transfer(j, m)``. A send of a sandbox rank has no terms: A(j) is its post. The busy time of the
group's communication stream is a term too, so an engine needs the posts and nothing else.

Beyond the recorded steps the plan goes on periodically: an operation of step L + k (L the last recorded step) is the
operation of the same ordinal of its stream in step L, with each source moved by k steps likewise. Recorded weights
are kept. A START term moves with its own growth over the step. A source without a counterpart is dropped: of a step
in which its stream has another number of operations (as DDP's first steps have, before it makes its buckets anew) the
same ordinal means something else. An operation left without terms follows itself one step before by ``period_ns``.
Where step L - 1 was unlike step L (it logged something), terms are those of the latest step before that was like both
L and its own predecessor. Where kinds of steps take turns (``turns``), terms are those of the latest such step whose
turn it was, and START terms grow from one round of turns to the next.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prism_sdk.errors import OutputError, UnreadableError
from prism_sdk.graph.errors import GraphError
from prismtrace import ABSENT, ABSENT32, UnitKind

__all__ = ["BoundaryPlan", "START", "Stream", "Term", "evaluate"]

Int64Array = npt.NDArray[np.int64]

#: The source that stands for the origin of the job's clock.
START = -1

_MAGIC = b"PRISMBP1"
_ALIGNMENT = 64
_TYPES: dict[str, type[np.generic]] = {
    "kind": np.uint8,
    "group_id": np.uint64,
    "source_rank": np.int32,
    "destination_rank": np.int32,
    "tag": np.int64,
    "seq": np.int64,
    "step": np.int32,
    "term_offsets": np.int64,
    "term_source": np.int32,
    "term_weight_ns": np.int64,
    "member_offsets": np.int64,
    "member_rank": np.int32,
    "member_transfer_ns": np.int64,
}


class Stream(NamedTuple):
    """What numbers its operations by ``seq``: the collectives of a group, or the messages of one (src, dst, tag).

    ``kind`` is as the sandbox sees it: COLLECTIVE, SEND (to a virtual rank) or RECV (from a virtual rank).
    """

    kind: int
    group_id: int
    source_rank: int = ABSENT32
    destination_rank: int = ABSENT32
    tag: int = ABSENT


class Term(NamedTuple):
    """One term of an arrival: operation ``source``, moved by ``shift`` steps, plus ``weight_ns``."""

    source: int
    shift: int
    weight_ns: int


@dataclass(frozen=True, kw_only=True)
class BoundaryPlan:
    """The boundary operations in a causal order, with their terms and sandbox members. Arrays are read-only."""

    world_size: int
    sandbox_ranks: tuple[int, ...]
    #: The length of a step where nothing better is known, for operations beyond the recorded steps.
    period_ns: int
    #: The last whole step, which stands for all later ones; operations after it (a final barrier) have a higher step.
    last_step: int
    #: After how many steps the same kind of step comes again.
    turns: int = 1
    kind: npt.NDArray[np.uint8]
    group_id: npt.NDArray[np.uint64]
    source_rank: npt.NDArray[np.int32]
    destination_rank: npt.NDArray[np.int32]
    tag: Int64Array
    seq: Int64Array
    step: npt.NDArray[np.int32]
    term_offsets: Int64Array = field(repr=False)
    term_source: npt.NDArray[np.int32] = field(repr=False)
    term_weight_ns: Int64Array = field(repr=False)
    member_offsets: Int64Array = field(repr=False)
    member_rank: npt.NDArray[np.int32] = field(repr=False)
    member_transfer_ns: Int64Array = field(repr=False)

    def __len__(self) -> int:
        return len(self.kind)

    def stream(self, index: int) -> Stream:
        """The stream of an operation."""
        return Stream(int(self.kind[index]), int(self.group_id[index]), int(self.source_rank[index]),
                      int(self.destination_rank[index]), int(self.tag[index]))  # fmt: skip

    def members(self, index: int) -> tuple[tuple[int, int], ...]:
        """The sandbox members of an operation, each with its own transfer time in ns."""
        span = slice(int(self.member_offsets[index]), int(self.member_offsets[index + 1]))
        return tuple(zip(self.member_rank[span].tolist(), self.member_transfer_ns[span].tolist(), strict=True))

    def find(self, stream: Stream, *, seq: int) -> tuple[int, int]:
        """The operation that stands for number ``seq`` of a stream, and by how many steps it is moved (0: recorded).

        Raises GraphError where the stream is no part of the boundary, or has nothing to go on with.
        """
        known = self._streams.get(stream)
        if known is None:
            raise GraphError(f"{_name(stream)} has no boundary operation in the graph",
                             hint="the program does something that the recorded job did not")  # fmt: skip
        seqs, indexes, num_last = known
        at = bisect_left(seqs, seq)
        if at < len(seqs):
            if seqs[at] != seq:
                raise GraphError(f"{_name(stream)} has no operation {seq} in the graph, only {seqs[0]} to {seqs[-1]}")
            return indexes[at], 0
        if not num_last:
            raise GraphError(f"{_name(stream)} ends with operation {seqs[-1]}, and had none in the last recorded step "
                             f"{self.last_step}", hint="record more steps, or emulate fewer")  # fmt: skip
        beyond = seq - seqs[-1] - 1
        return indexes[len(indexes) - num_last + beyond % num_last], 1 + beyond // num_last

    def terms(self, index: int, *, shift: int = 0) -> tuple[Term, ...]:
        """The terms of an operation, as recorded or (``shift`` > 0, last recorded step only) some steps later."""
        if not shift:
            return tuple(Term(source, 0, weight) for source, weight in self._recorded(index))
        last = self.last_step
        if self.step[index] != last:
            raise GraphError(f"only operations of the last recorded step {last} can stand for later ones")
        steady = self._steady_steps[(last + shift) % self.turns]
        beyond = last + shift - steady
        like = self._counterpart(index, step=steady)
        assert like is not None
        recorded, terms = self._recorded(like), []
        for source, weight in recorded:
            if source == START:
                growth = self._start_growth(like, weight)
                if growth is not None:
                    terms.append(Term(START, 0, weight + beyond * growth // self.turns))
                continue
            to_step = int(self.step[source]) + beyond
            moved = self._counterpart(source, step=min(to_step, last))
            if moved is not None:
                terms.append(Term(moved, max(0, to_step - last), weight))
        if not terms and recorded:
            terms.append(Term(index, shift - 1, self.period_ns))
        return tuple(terms)

    def _recorded(self, index: int) -> list[tuple[int, int]]:
        span = slice(int(self.term_offsets[index]), int(self.term_offsets[index + 1]))
        return list(zip(self.term_source[span].tolist(), self.term_weight_ns[span].tolist(), strict=True))

    @cached_property
    def _steady_steps(self) -> list[int]:
        """By turn, the latest step that is like the last one and follows one like it.

        Where a turn has none, it is that of any turn; the last step itself where none is.
        """
        numbers: dict[int, dict[Stream, int]] = {}
        for (stream, step), there in self._ordinals[1].items():
            numbers.setdefault(step, {})[stream] = len(there)
        last = self.last_step
        alike = {step for step, found in numbers.items() if found == numbers.get(last)}
        steady = [step for step in sorted(alike) if step <= last and step - 1 in alike] or [last]
        return [max((step for step in steady if step % self.turns == turn), default=steady[-1])
                for turn in range(self.turns)]  # fmt: skip

    def _start_growth(self, index: int, weight_ns: int) -> int | None:
        """By how much the START term of an operation grows in a round of turns."""
        before = self._counterpart(index, step=int(self.step[index]) - self.turns)
        if before is None:
            return None
        for source, _, weight in self.terms(before):
            if source == START:
                return weight_ns - weight
        return None

    def _counterpart(self, index: int, *, step: int) -> int | None:
        """The operation of the same ordinal in a step that is like the operation's own."""
        ordinals, by_step = self._ordinals
        stream = self.stream(index)
        here, there = by_step[stream, int(self.step[index])], by_step.get((stream, step), ())
        return there[ordinals[index]] if len(there) == len(here) else None

    @cached_property
    def _streams(self) -> dict[Stream, tuple[list[int], list[int], int]]:
        """For each stream its seqs in order, their operations, and how many of them are in the last step."""
        found: dict[Stream, list[tuple[int, int]]] = {}
        for index in range(len(self)):
            found.setdefault(self.stream(index), []).append((int(self.seq[index]), index))
        last = self.last_step
        result = {}
        for stream, entries in found.items():
            entries.sort()
            num_last = sum(1 for _, index in entries if self.step[index] == last)
            result[stream] = ([seq for seq, _ in entries], [index for _, index in entries], num_last)
        return result

    @cached_property
    def _ordinals(self) -> tuple[list[int], dict[tuple[Stream, int], list[int]]]:
        """The ordinal of each operation among those of its stream and step, and these lists."""
        ordinals = [0] * len(self)
        by_step: dict[tuple[Stream, int], list[int]] = {}
        for stream, (_, indexes, _) in self._streams.items():
            for index in indexes:
                there = by_step.setdefault((stream, int(self.step[index])), [])
                ordinals[index] = len(there)
                there.append(index)
        return ordinals, by_step

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all."""
        arrays = {name: np.ascontiguousarray(getattr(self, name), dtype=dtype) for name, dtype in _TYPES.items()}
        table: dict[str, list[int]] = {}
        at = 0
        for name, array in arrays.items():
            table[name] = [at, len(array)]
            at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        header = json.dumps(
            {"world_size": self.world_size, "sandbox_ranks": list(self.sandbox_ranks), "period_ns": self.period_ns,
             "last_step": self.last_step, "turns": self.turns, "arrays": table, "num_bytes": at}
        ).encode()  # fmt: skip
        body = -(-(len(_MAGIC) + 8 + len(header)) // _ALIGNMENT) * _ALIGNMENT
        temporary = f"{os.fspath(path)}.tmp{os.getpid()}"
        try:
            with open(temporary, "wb") as file:
                file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
                for name, array in arrays.items():
                    file.seek(body + table[name][0])
                    file.write(array.tobytes())
                file.truncate(body + at)
            os.replace(temporary, path)
        except OSError as error:
            raise OutputError(os.fspath(path), reason=error.strerror or str(error)) from error
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BoundaryPlan:
        """Map a saved plan into memory; raises UnreadableError where it is no whole plan."""
        name = os.fspath(path)
        try:
            mapped = np.memmap(name, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise UnreadableError(name, reason=str(error)) from error
        try:
            if bytes(mapped[: len(_MAGIC)]) != _MAGIC:
                raise ValueError("it is no boundary plan of this version")
            length = int.from_bytes(bytes(mapped[len(_MAGIC) : len(_MAGIC) + 8]), "little")
            header: dict[str, Any] = json.loads(bytes(mapped[len(_MAGIC) + 8 : len(_MAGIC) + 8 + length]))
            body = mapped[-(-(len(_MAGIC) + 8 + length) // _ALIGNMENT) * _ALIGNMENT :]
            if len(body) != header["num_bytes"]:
                raise ValueError("it is cut short")
            arrays = {}
            for column, dtype in _TYPES.items():
                at, count = header["arrays"][column]
                arrays[column] = body[at : at + count * np.dtype(dtype).itemsize].view(dtype)
            return cls(world_size=header["world_size"], sandbox_ranks=tuple(header["sandbox_ranks"]),
                       period_ns=header["period_ns"], last_step=header["last_step"], turns=header["turns"],
                       **arrays)  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableError(name, reason=str(error)) from error


def _name(stream: Stream) -> str:
    if stream.kind == UnitKind.COLLECTIVE:
        return f"group {stream.group_id:#x}"
    ends = f"rank {stream.source_rank} to {stream.destination_rank}"
    return f"the messages from {ends} tag {stream.tag} in group {stream.group_id:#x}"


def evaluate(
    plan: BoundaryPlan, posts_ns: Sequence[int] | Mapping[int, int], *, origin_ns: int = 0
) -> tuple[list[int], list[dict[int, int]]]:
    """What the runtime does, in a few lines: the last arrival of each operation, and its completion by sandbox member.

    ``posts_ns[j]`` is the last post of the sandbox members at operation j.
    """
    arrivals: list[int] = []
    completions: list[dict[int, int]] = []
    for index in range(len(plan)):
        at = int(posts_ns[index])
        for source, _, weight in plan.terms(index):
            at = max(at, (origin_ns if source == START else arrivals[source]) + weight)
        arrivals.append(at)
        completions.append({rank: at + transfer for rank, transfer in plan.members(index)})
    return arrivals, completions


assert set(_TYPES) <= {item.name for item in fields(BoundaryPlan)}
