"""The recording seam: the rank hands its communication to the coordinator and gives up its slot when it must wait.

Responsible for the rank's side of an operation; matching and scheduling are the coordinator's.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import torch

from prism_sdk.errors import CollectiveMismatchError, PrismError
from prism_sdk.runtime import rows
from prism_sdk.runtime.arena import Arena
from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.coalescing import install_lists
from prism_sdk.runtime.config import PayloadMode
from prism_sdk.runtime.futures import install_futures, is_in_background
from prism_sdk.runtime.intercept import Seam
from prism_sdk.runtime.matching import Contribution, Key
from prism_sdk.runtime.observe import settle_any_source, take_number, trace_group
from prism_sdk.runtime.oncuda.footprint import FootprintReporter
from prism_sdk.runtime.oncuda.order import order_of
from prism_sdk.runtime.oncuda.shelf import Shelf, forget_message
from prism_sdk.runtime.ranks import RankSpec
from prism_sdk.runtime.tensors import Bytes, ReadInto, combine, deliver, deliver_locally
from prism_sdk.runtime.tracer import Tracer, now_ns
from prism_sdk.runtime.unwaited import Receives, install_destroying, place_before, prepare
from prism_sdk.runtime.wire import Channel
from prism_sdk.runtime.work import PrismWork, outstanding_works
from prismtrace.model import Op

_STEP_BACK_S = 0.002
# contributions up to this travel inside the message; in large groups a share of it, because every member gets them all
INLINE_BYTES = 16384
_LARGE_GROUP = 64


class Conversation:
    """Request and reply with the coordinator; one thread at a time.

    A thread that waits keeps the others out.  When nothing moves any more the coordinator asks where the ranks stand:
    a thread that keeps others out then steps back (`yield`), lets them speak, and asks again.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._lock = threading.RLock()
        self.learn: Callable[[Any], None] = lambda plan: None  # told which ranks run (roles)
        self._num_outside = 0  # threads that want to speak
        self._counting = threading.Lock()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._counting:
            self._num_outside += 1
        try:
            self._lock.acquire()
        finally:
            with self._counting:
                self._num_outside -= 1
        try:
            yield
        finally:
            self._lock.release()

    def tell(self, message: tuple[Any, ...]) -> None:
        with self._turn():
            self.channel.send(message)

    def ask(self, message: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send and block for the reply; meanwhile the coordinator may ask where this rank stands."""
        released: list[tuple[int, int]] = []
        while True:
            with self._turn():
                reply = self._exchange(message)
            released += reply[-1]
            if reply[0] != "again":
                return (*reply[:-1], released)
            time.sleep(_STEP_BACK_S)  # the lock is not fair

    def _exchange(self, message: tuple[Any, ...]) -> tuple[Any, ...]:
        self.channel.send(message)
        yielded = False
        while True:
            reply = self.channel.receive()
            if reply[0] == "plan":
                self.learn(reply[1])
                continue
            if reply[0] != "stack":
                return reply
            if self._num_outside and not yielded:
                yielded = True
                self.channel.send(("yield", user_stack()))
            else:
                self.channel.send(("stack", user_stack(), _others_may_act()))


def _others_may_act() -> bool:
    """Whether another thread of the program is alive, which may yet do what this one waits for."""
    me = threading.current_thread()
    return any(thread is not me for thread in threading.enumerate())


def user_stack() -> list[str]:
    """This thread's Python stack without Prism's own frames, innermost last."""
    own = __name__.rpartition(".")[0]
    frames = traceback.walk_stack(sys._getframe(1))
    lines = [
        f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        for frame, line in frames
        if not frame.f_globals.get("__name__", "").startswith(own)
    ]
    lines.reverse()
    start = next((i for i, text in enumerate(lines) if "<frozen runpy>" not in text and "forkserver" not in text), 0)
    return lines[start:]


def user_place() -> str:
    """File and line of the innermost frame outside torch and Prism."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch", "prism_sdk")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


class RecordSeam(Seam):
    """Every collective and message goes through the coordinator."""

    replaces_backend = True

    def __init__(self, spec: RankSpec, tracer: Tracer, channel: Channel) -> None:
        self.spec = spec
        self.tracer = tracer
        self.conversation = self.make_conversation(channel)
        self.arena = Arena(spec.arena_fd, spec.rank, num_ranks=spec.world_size)
        self.groups: list[GroupState] = []
        self._receives = Receives()
        self._shelf = Shelf()
        self._serial = 0
        self._told_step = -1
        self._footprint = FootprintReporter()
        self._clock = 0  # logical time (Lamport), which orders messages that a receive from any source may take

    def make_conversation(self, channel: Channel) -> Conversation:
        return Conversation(channel)

    def install(self) -> None:
        from prism_sdk.runtime.store import install_rendezvous

        install_rendezvous(self.conversation, self.release)
        install_lists()
        install_destroying(lambda: self.groups, self._shelf.forget)
        install_futures()

    def group_created(self, group: GroupState) -> None:
        self.groups.append(group)
        trace_group(self.tracer, group)
        ranks = group.ranks if group.group_rank == 0 else None
        self.conversation.tell(("group", group.group_id, group.label, ranks))

    # -- one operation ----------------------------------------------------------------------------------------------

    def issue(self, call: Call) -> Any:
        prepare(call)
        posted = now_ns()
        seq = take_number(call)
        unit = self.tracer.communication(call, posted, seq)
        if self.tracer.step != self._told_step:
            self._told_step = self.tracer.step
            self.conversation.tell(("step", self._told_step))
        key = self._key(call, seq)
        keeps = self.spec.payloads is not PayloadMode.NONE and self.tracer.step in self.spec.steps
        order = order_of(call)
        kept = self._shelf.add(call, order.scratch)
        if call.op is not Op.RECV:
            self._post(call, key, unit, keeps)
        if call.op is Op.SEND:  # its bytes are on their way
            forget_message(call)
        handle: PrismWork | None = None

        def complete(timeout: timedelta | None) -> None:
            began = now_ns()
            start = began if call.is_async else posted
            with order:
                clock = self._complete(call, key, unit, keeps, handle)
            self._shelf.brought(kept, now_ns() - began)
            if is_in_background():
                self.tracer.complete(unit, now_ns())
            else:
                self.tracer.wait(unit, start, now_ns(), blocked=True)
                place_before(call, seq, wait=True)
                self._receives.place(call, lambda receive: self._was_sent(receive, clock), wait=True)

        def poll() -> bool:
            return call.op is Op.SEND or bool(self._ask(("poll", key, call.needs, call.root))[1])

        def late_wait() -> None:
            self.tracer.wait(unit, now_ns(), now_ns(), blocked=False)

        line = None if call.is_p2p else (call.group.group_id, seq)
        handle = PrismWork(
            complete, poll, order.results, is_async=call.is_async, late_wait=late_wait, line=line, again=order.again
        )  # fmt: skip
        handle.kept = kept
        self._receives.add(call, key, handle)
        if call.op is Op.BARRIER and not call.is_async:
            handle.wait()  # monitored_barrier returns no handle
        self.tracer.resume()  # saving values and talking to the coordinator is no part of the job
        return handle

    def _key(self, call: Call, seq: int) -> Key:
        group = call.group
        if not call.is_p2p:
            return ("c", group.group_id, seq)
        me, tag = group.ranks[group.group_rank], call.tag or 0
        if call.peer is None:
            self._serial += 1
            return ("a", group.group_id, me, tag, self._serial)
        peer = group.ranks[call.peer]
        source, destination = (me, peer) if call.op is Op.SEND else (peer, me)
        return ("p", group.group_id, source, destination, tag, seq)

    def _post(self, call: Call, key: Key, unit: int, keeps: bool) -> None:
        contribution: Contribution = None
        given = self.given(call)
        if given is not None:
            data = Bytes(given)
            contribution = self._place(data, size=len(call.group.ranks))
            wanted = not call.is_reduction or self.spec.payloads is PayloadMode.FULL
            if keeps and wanted:
                self.tracer.amend(unit, rows.PAYLOAD_IN, self.tracer.writer.add_payload(data.joined()))
        self._clock += 1
        p2p = call.is_p2p
        size, group_rank = (1, 0) if p2p else (len(call.group.ranks), call.group.group_rank)
        self.conversation.tell(
            ("post", key, size, group_rank, call.signature(), contribution, call.send_bytes, user_place(), self._clock)
        )

    def given(self, call: Call) -> list[torch.Tensor] | None:
        """What this member contributes; None for nothing."""
        return call.contribution if call.has_contribution else None

    def combined(self, call: Call, sources: Any, read_into: ReadInto) -> list[torch.Tensor]:
        """The reduction of what all members gave."""
        return combine(call, len(call.group.ranks), read_into)

    def deliver(self, call: Call, sources: Any, read_into: ReadInto) -> None:
        """Fill the outputs from what the members gave."""
        deliver(call, read_into, lambda member: sources[member][1], in_pieces=True)

    def _place(self, data: Bytes, *, size: int = 1) -> Contribution:
        if data.num_bytes <= INLINE_BYTES * _LARGE_GROUP // max(size, _LARGE_GROUP):
            return bytes(data.joined())
        offset = self.arena.allocate(data.num_bytes)
        self.arena.write(offset, data.pieces())
        return (offset, data.num_bytes)

    def _complete(self, call: Call, key: Key, unit: int, keeps: bool, handle: PrismWork | None) -> int:
        """Bring the results into place. Returns the logical time at which the last member posted."""
        if call.op is Op.SEND:
            return 0
        self._receives.forget(key)
        self._footprint.report(self.conversation.tell)
        kind, sources, extra, clock, _ = self._ask(("wait", key, call.needs, call.root))
        self._clock = max(self._clock, clock) + 1
        if isinstance(sources, bytes):
            sources = pickle.loads(sources)
        read_into = self._reader(sources, call, key)
        digest = None
        if kind == "combine":
            totals = self.combined(call, sources, read_into)
            deliver_locally(call, totals)
            data = Bytes(totals)
            if keeps and call.op in (Op.ALL_REDUCE, Op.REDUCE):
                digest = self.tracer.writer.add_payload(data.joined())
            self.conversation.tell(("combined", key, self._place(data), digest))
        elif call.needs != "none":
            self._check_splits(call, key, sources)
            self.deliver(call, sources, read_into)
        elif call.op is Op.SCATTER:  # the root's own part
            deliver_locally(call, call.contribution)
        if call.peer is None and call.op is Op.RECV:
            key = extra
            source = call.group.ranks.index(key[2])
            settle_any_source(self.tracer, unit, call.group, source, call.tag or 0)
            if handle is not None:
                handle.source = source
        elif kind == "ready":
            digest = extra
        self.conversation.tell(("taken", key))
        if keeps and call.op is Op.REDUCE_SCATTER:
            digest = self.tracer.writer.add_payload(Bytes(call.outputs).joined())
        if digest is not None:
            self.tracer.amend(unit, rows.PAYLOAD_OUT, digest)
        return clock

    def _was_sent(self, key: Key, clock: int) -> bool:
        """Whether a message was sent before that logical time: the same in every recording."""
        return bool(self._ask(("poll", key, "all", None, clock))[1])

    def _check_splits(self, call: Call, key: Key, sources: dict[int, Any]) -> None:
        """What each member of an all-to-all sends here must be what this rank expects of it."""
        ranks, me = call.group.ranks, call.group.group_rank
        for member, tensor in enumerate(call.receive_tensors or ()):
            sent = sources[member][1][me]
            if sent != tensor.nbytes:
                raise CollectiveMismatchError(
                    call.group.label, seq=int(key[-1]), field="byte count",
                    values={ranks[me]: f"expects {tensor.nbytes} bytes of rank {ranks[member]} at {user_place()}",
                            ranks[member]: f"sends it {sent} bytes"} if member != me else
                           {ranks[me]: f"expects {tensor.nbytes} bytes of itself at {user_place()}, and sends {sent}"},
                )  # fmt: skip

    def _reader(self, sources: dict[int, Any], call: Call, key: Key) -> Callable[[int, int, memoryview], None]:
        def read_into(member: int, offset: int, view: memoryview) -> None:
            contribution = sources[member][0]
            available = len(contribution) if isinstance(contribution, bytes) else (contribution or (0, 0))[1]
            if offset + len(view) > available:
                raise CollectiveMismatchError(
                    call.group.label, seq=int(key[-1]), field="byte count",
                    values={call.group.ranks[call.group.group_rank]: f"expects {offset + len(view)} bytes or more of "
                            f"member {member} at {user_place()}, which gave {available}"},
                )  # fmt: skip
            if isinstance(contribution, bytes):
                view[:] = contribution[offset : offset + len(view)]
            else:
                self.arena.read_into(contribution[0] + offset, view)

        return read_into

    def _ask(self, message: tuple[Any, ...]) -> tuple[Any, ...]:
        reply = self.conversation.ask(message)
        self.release(reply[-1])
        return reply

    def release(self, regions: list[tuple[int, int]]) -> None:
        """Regions of ours that every member has read."""
        for offset, num_bytes in regions:
            self.arena.release(offset, num_bytes)

    def finish(self, status: str) -> None:
        if status != "complete":
            return
        for work in outstanding_works():  # results nobody waited for are still due to the other members
            try:
                if work.is_completed():
                    work.wait()
            except (PrismError, RuntimeError):
                return
