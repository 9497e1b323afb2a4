"""What virtual members contribute: read from the recording, combined where a reduction needs it, ahead of time.

Responsible for the assistant's look-ahead; when something is sent is virtual.py's.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from prism_sdk.pruning import COMBINED
from prism_sdk.runtime.announce import REDUCTIONS
from prism_sdk.runtime.manifest import Expected, RecordedValues, Script
from prism_sdk.runtime.tensors import FOLD, memory_of
from prismtrace import Op, TraceReader

Key = tuple[int, int]  # group, number of the collective


@dataclass(frozen=True)
class Supply:
    """The recorded contributions of virtual members to one collective; of a reduction all of them combined."""

    by_member: Mapping[int, torch.Tensor] = field(default_factory=dict)  # bytes by rank in the group; or COMBINED
    splits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # all-to-all: bytes of each block
    is_complete: bool = True

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.by_member.values())


class Supplies:
    """Supplies of collectives in the order of their recording, held ready up to a limit of bytes."""

    def __init__(
        self, reader: TraceReader, scripts: Sequence[Script], sandbox: Sequence[int], *, limit_bytes: int
    ) -> None:
        self._reader, self._sandbox, self._limit = reader, frozenset(sandbox), limit_bytes
        self._values = RecordedValues(reader, reader.ranks)
        expected: dict[Key, Expected] = {}
        for script in scripts:
            for one in script.expected:
                if one.stream is not None and one.op not in (Op.SEND, Op.RECV, Op.BARRIER):
                    expected.setdefault((one.group_id, one.seq), one)
        self._expected = expected
        self._order = sorted(expected, key=lambda key: expected[key].unit_index)
        self._place = {key: place for place, key in enumerate(self._order)}
        is_of_round = scripts[0].is_of_round
        self._repeat_from = next((i for i, k in enumerate(self._order) if is_of_round(expected[k].step)), 0)
        self._ready: dict[Key, Supply] = {}
        self._held_bytes = 0
        self._next = 0
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self.hits = self.misses = 0
        if self._order:
            threading.Thread(target=self._look_ahead, daemon=True, name="prism-supply").start()

    def take(self, key: Key) -> Supply:
        """The supply of a collective; what is not ready is read now."""
        with self._changed:
            found = self._ready.pop(key, None)
            if found is not None:
                self.hits += 1
                self._held_bytes -= found.num_bytes
                self._changed.notify()
                return found
            self.misses += 1
            place = self._place.get(key)
            if place is not None:  # it went another way than expected: look ahead from here
                self._ready.clear()
                self._held_bytes = 0
                self._next = place + 1
                self._changed.notify()
        return self._read(key)

    def message(self, group_id: int, source: int, destination: int, tag: int, seq: int) -> torch.Tensor | None:
        """The bytes of a recorded message; global ranks."""
        digest = self._values.message.get((group_id, source, destination, tag, seq))
        return None if digest is None else self._payload(digest)

    def _look_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held_bytes < self._limit and len(self._ready) < len(self._order))
                if self._next >= len(self._order):
                    self._next = self._repeat_from
                key = self._order[self._next]
                self._next += 1
                if key in self._ready:
                    self._changed.wait()  # a round ahead already
                    continue
                generation = self._next
            supply = self._read(key)
            with self._changed:
                if self._next == generation:
                    self._ready[key] = supply
                    self._held_bytes += supply.num_bytes

    def _read(self, key: Key) -> Supply:
        one = self._expected.get(key)
        if one is None:
            return Supply(is_complete=False)
        ranks = one.group_ranks
        virtual = [member for member, rank in enumerate(ranks) if rank not in self._sandbox]
        if one.op in (Op.BROADCAST, Op.SCATTER):
            virtual = [member for member in virtual if ranks[member] == one.peer]
        elif one.op in (Op.GATHER, Op.REDUCE) and one.peer not in self._sandbox:
            virtual = []  # the result goes to a virtual rank
        found = {member: self._values.collective.get((*key, ranks[member]), (None, None)) for member in virtual}
        if any(digest is None for digest, _ in found.values()):
            return Supply(is_complete=False)
        splits = {member: sizes for member, (_, sizes) in found.items() if sizes is not None}
        if one.op not in REDUCTIONS:
            parts = {member: self._payload(digest) for member, (digest, _) in found.items() if digest is not None}
            return Supply(parts, splits)
        total: torch.Tensor | None = None
        dtype = getattr(torch, one.dtype.name.lower())
        fold = FOLD[one.reduce_op]
        for digest, _ in found.values():
            assert digest is not None
            part = self._payload(digest).view(dtype)
            if total is None:
                total = part
            else:
                fold(total, part)
        return Supply({} if total is None else {COMBINED: total})

    def _payload(self, digest: bytes) -> torch.Tensor:
        buffer = torch.empty(self._reader.payload_bytes(digest), dtype=torch.uint8)
        if buffer.numel():
            with self._reading:
                self._reader.read_payload_into(digest, memory_of(buffer))
        return buffer
