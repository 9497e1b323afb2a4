"""What the emulating seam knows of operations on a GPU: which of them the device holds, and what the releaser is told.

Responsible for opening the device at the first of them, in the order of issue; the streams are holding.py's.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from prism_sdk.abc import ReplaySession
from prism_sdk.errors import RunError
from prism_sdk.runtime.calls import Call
from prism_sdk.runtime.engine import BoundaryEngine
from prism_sdk.runtime.manifest import Expected, Script
from prism_sdk.runtime.oncuda import holdtable as fields
from prism_sdk.runtime.oncuda.holdtable import HoldTable
from prism_sdk.runtime.prefetch import Consumer
from prism_sdk.runtime.ranks import EmulateSpec, RankSpec

if TYPE_CHECKING:
    from prism_sdk.runtime.oncuda.holding import Held, StreamHold

_EARLY = 8192  # less than the table has slots


class HeldOperations:
    """Operations of one sandbox rank with virtual members, as far as a GPU is concerned."""

    def __init__(
        self, spec: RankSpec, facts: EmulateSpec, engine: BoundaryEngine, script: Script, source: Consumer,
        session: ReplaySession,
    ) -> None:  # fmt: skip
        self._rank, self._session = spec.rank, session
        self._table = HoldTable(facts.hold_fds[facts.sandbox.index(spec.rank)])
        self._engine, self._script, self._source, self._options = engine, script, source, facts.options
        self._hold: StreamHold | None = None
        self._refusal = ""
        self._early: deque[tuple[int, tuple[int, int], int]] = deque(maxlen=_EARLY)  # entries before there was a hold

    def start(self, origin_ns: int) -> None:
        """The job's clock begins."""
        self._table.origin_ns = origin_ns

    def takes(self, call: Call, device: torch.device) -> bool:
        """Whether the device holds this operation; opens it at the first one."""
        if self._refusal:
            return False
        if self._hold is None:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                self._try_to_open(device)
            if self._hold is None:
                return False
        return self._hold.takes(call, device)

    def _try_to_open(self, device: torch.device) -> None:
        joining = self._session.open_streams(device, self._script)  # what is wrong there ends the run
        try:
            self._hold = self._open(device, joining)
        except (RunError, OSError, AttributeError) as error:  # a driver that lacks something
            self._refusal = str(error)
            sys.stderr.write(f"prism: rank {self._rank}: the host is held in place of its streams, and times mean "
                             f"nothing: {error}\n")  # fmt: skip

    def _open(self, device: torch.device, joining: Any) -> StreamHold:
        from prism_sdk.runtime.oncuda.holding import StreamHold

        hold = StreamHold(self._table, self._engine, self._script, self._source, device, self._options, joining=joining)
        for kind, handle, value in self._early:
            self._table.append(kind, handle, posted_ns=value)
        self._early.clear()
        return hold

    def issue(self, call: Call, one: Expected, first: int, handle: tuple[int, int], *, posted: int) -> Held:
        """As StreamHold.issue."""
        assert self._hold is not None
        return self._hold.issue(call, one, first, handle, posted=posted)

    def wait(self, held: Held, call: Call) -> None:
        """As StreamHold.wait."""
        assert self._hold is not None
        self._hold.wait(held, call)

    def see(self, held: Held) -> None:
        """As StreamHold.see."""
        assert self._hold is not None
        self._hold.see(held)

    def is_done(self, held: Held) -> bool:
        """As StreamHold.is_done."""
        return self._hold is not None and self._hold.is_done(held)

    def ended(self, held: Held) -> int | None:
        """When the device passed the operation's end, in ns of the host's clock; None where it has not."""
        assert self._hold is not None
        self._hold.reap()
        return held.end.time_ns

    def host_post(self, handle: tuple[int, int], posted_ns: int, first: int, count: int) -> None:
        """The host has arrived at an operation and holds it, with `count` payloads from `first` on."""
        self._append(fields.HOST_POST, handle, posted_ns)
        if self._hold is not None and count:
            self._hold.pool.skip(first, count)

    def stand_in(self, met: int, meant: tuple[int, int]) -> None:
        """As BoundaryEngine.stand_in; of what was met it takes the row."""
        self._append(fields.STAND_IN, meant, met)

    def _append(self, kind: int, handle: tuple[int, int], value: int) -> None:
        if self._hold is None:
            self._early.append((kind, handle, value))
        else:
            self._hold.make_room()
            self._table.append(kind, handle, posted_ns=value)

    def finish(self, *, is_complete: bool) -> None:
        """The program has ended."""
        if self._hold is not None:
            self._hold.finish(is_complete=is_complete)
        self._table.close()

    def summary(self, on_host: int) -> dict[str, object]:
        """Facts for the trace's metadata; none where no operation came to a GPU."""
        if self._refusal:
            return {"streams_not_held": self._refusal}
        return {} if self._hold is None else self._hold.summary(on_host)
