"""Holds the boundary plan of a hybrid emulation: when the virtual members arrive at each boundary operation.

It does not compute the plan (``contract``) and holds no communication back (the runtime).

A *boundary operation* is a collective with sandbox and virtual members, or a message between a sandbox and a virtual
rank. Operation j starts at its last arrival

    A(j) = max(posts of its sandbox members, max over its terms (i, w) of A(i) + w)

where A(START) is the origin of the job's clock and terms refer to operations before j. It completes for a sandbox
member m at ``A(j) + transfer(j, m)``. A send of a sandbox rank has no terms: A(j) is its post. The busy time of the
group's communication stream is a term too, so an engine needs the posts and nothing else.

Beyond the recorded steps the plan goes on periodically: the last n steps (a *round*; n is 1 but where steps are of
several kinds, rounds.py) follow each other again and again. An operation k rounds beyond is the recorded one of the
round, with each source moved by as many steps likewise. Recorded weights are kept. A START term moves with its own
growth over a round. A source without a counterpart is dropped: of a step in which its stream has another number of
operations (as DDP's first steps have, before it makes its buckets anew) the same ordinal means something else. An
operation left without terms follows itself one round before by ``period_ns``. Where the step before one of the round
was unlike what comes before it in later rounds (it logged something), terms are those of the latest step before, a
number of rounds away, that was like it and came after one that was.
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
    """One term of an arrival: operation ``source``, moved by ``shift`` rounds, plus ``weight_ns``."""

    source: int
    shift: int
    weight_ns: int


@dataclass(frozen=True, kw_only=True)
class BoundaryPlan:
    """The boundary operations in a causal order, with their terms and sandbox members. Arrays are read-only."""

    world_size: int
    sandbox_ranks: tuple[int, ...]
    #: The length of a round where nothing better is known, for operations beyond the recorded steps.
    period_ns: int
    #: The last whole step; operations after it (a final barrier) have a higher step.
    last_step: int
    #: How many steps, the last one among them, stand for all later ones.
    steps_per_round: int = 1
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
        """The operation that stands for number ``seq`` of a stream, and by how many rounds it is moved (0: recorded).

        Raises GraphError where the stream is no part of the boundary, or has nothing to go on with.
        """
        known = self._streams.get(stream)
        if known is None:
            raise GraphError(f"{_name(stream)} has no boundary operation in the graph",
                             hint="the program does something that the recorded job did not")  # fmt: skip
        seqs, indexes, of_round = known
        at = bisect_left(seqs, seq)
        if at < len(seqs):
            if seqs[at] != seq:
                raise GraphError(f"{_name(stream)} has no operation {seq} in the graph, only {seqs[0]} to {seqs[-1]}")
            return indexes[at], 0
        if not of_round:
            raise GraphError(f"{_name(stream)} ends with operation {seqs[-1]}, and had none in {self.round_name}",
                             hint="record more steps, or emulate fewer")  # fmt: skip
        beyond = seq - seqs[-1] - 1
        return of_round[beyond % len(of_round)], 1 + beyond // len(of_round)

    @property
    def round_name(self) -> str:
        """The steps that stand for later ones, for messages."""
        one = self.steps_per_round == 1
        return f"the last recorded step {self.last_step}" if one else f"the last {self.steps_per_round} recorded steps"

    def terms(self, index: int, *, shift: int = 0) -> tuple[Term, ...]:
        """The terms of an operation, as recorded or (``shift`` > 0, operations of a round only) some rounds later."""
        if not shift:
            return tuple(Term(source, 0, weight) for source, weight in self._recorded(index))
        step = int(self.step[index])
        if not self._is_of_round(step):
            raise GraphError(f"only operations of {self.round_name} can stand for later ones")
        steady = self._steady_steps[step]
        like = self._counterpart(index, step=steady)
        assert like is not None
        by = step - steady + shift * self.steps_per_round  # steps, a number of rounds
        recorded, terms = self._recorded(like), []
        for source, weight in recorded:
            if source == START:
                growth = self._start_growth(like, weight)
                if growth is not None:
                    terms.append(Term(START, 0, weight + by // self.steps_per_round * growth))
                continue
            to_step, rounds = self._place(int(self.step[source]) + by)
            moved = self._counterpart(source, step=to_step)
            if moved is not None:
                terms.append(Term(moved, rounds, weight))
        if not terms and recorded:
            terms.append(Term(index, shift - 1, self.period_ns))
        return tuple(terms)

    def _is_of_round(self, step: int) -> bool:
        return self.last_step - self.steps_per_round < step <= self.last_step

    def _place(self, step: int) -> tuple[int, int]:
        """The recorded step that stands for a step, and how many rounds beyond it lies."""
        beyond = step - self.last_step - 1
        if beyond < 0:
            return step, 0
        rounds, place = divmod(beyond, self.steps_per_round)
        return self.last_step - self.steps_per_round + 1 + place, 1 + rounds

    def _recorded(self, index: int) -> list[tuple[int, int]]:
        span = slice(int(self.term_offsets[index]), int(self.term_offsets[index + 1]))
        return list(zip(self.term_source[span].tolist(), self.term_weight_ns[span].tolist(), strict=True))

    @cached_property
    def _steady_steps(self) -> dict[int, int]:
        """For each step of the round the latest one, a number of rounds before, that is like it and follows one that is
        like what it follows in later rounds; itself where none does."""
        numbers: dict[int, dict[Stream, int]] = {}
        for (stream, step), there in self._ordinals[1].items():
            numbers.setdefault(step, {})[stream] = len(there)
        last, num = self.last_step, self.steps_per_round
        found = {}
        for step in range(last - num + 1, last + 1):
            kind, before = numbers.get(step), numbers.get(self._place(step + num - 1)[0])
            found[step] = next(
                (at for at in range(step, 0, -num) if numbers.get(at) == kind and numbers.get(at - 1) == before), step
            )
        return found

    def _start_growth(self, index: int, weight_ns: int) -> int | None:
        before = self._counterpart(index, step=int(self.step[index]) - self.steps_per_round)
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
    def _streams(self) -> dict[Stream, tuple[list[int], list[int], list[int]]]:
        """For each stream its seqs in order, their operations, and those of them that are in the round."""
        found: dict[Stream, list[tuple[int, int]]] = {}
        for index in range(len(self)):
            found.setdefault(self.stream(index), []).append((int(self.seq[index]), index))
        result = {}
        for stream, entries in found.items():
            entries.sort()
            indexes = [index for _, index in entries]
            of_round = [index for index in indexes if self._is_of_round(int(self.step[index]))]
            result[stream] = ([seq for seq, _ in entries], indexes, of_round)
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
             "last_step": self.last_step, "steps_per_round": self.steps_per_round, "arrays": table, "num_bytes": at}
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
                       period_ns=header["period_ns"], last_step=header["last_step"],
                       steps_per_round=header["steps_per_round"], **arrays)  # fmt: skip
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
