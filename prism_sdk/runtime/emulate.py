"""The emulating seam: sandbox ranks run for real and meet a job that is replayed.

Responsible for following the recorded script, and for giving each boundary operation its time (engine.py) and its
values (prefetch.py).  Groups whose members are all sandbox ranks run on the script's own backend.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import prismtrace
from prism_sdk.abc import Carriage, CarriedOperation, ReplaySession
from prism_sdk.graph.plan import BoundaryPlan
from prism_sdk.runtime import rows
from prism_sdk.runtime.calls import COMBINED, Call, GroupState
from prism_sdk.runtime.coalescing import Blocks
from prism_sdk.runtime.cpus import CpuWaits
from prism_sdk.runtime.cursor import Cursor
from prism_sdk.runtime.engine import BoundaryEngine, PostBoard
from prism_sdk.runtime.futures import install_futures, is_in_background, is_seen
from prism_sdk.runtime.intercept import Seam
from prism_sdk.runtime.making_up import compensate, copy_view, fill_resized, give_own, is_without_values
from prism_sdk.runtime.manifest import OWN, Expected, Script
from prism_sdk.runtime.observe import TimedWork, settle_any_source, take_number, trace_group
from prism_sdk.runtime.oncuda.filling import fill_alone
from prism_sdk.runtime.oncuda.held import HeldOperations
from prism_sdk.runtime.oncuda.order import HostOrder, device_of, order_of
from prism_sdk.runtime.oncuda.scratch import results_of
from prism_sdk.runtime.oncuda.shelf import Kept, Shelf, forget_message
from prism_sdk.runtime.prefetch import Consumer
from prism_sdk.runtime.ranks import RankSpec
from prism_sdk.runtime.record import Conversation
from prism_sdk.runtime.tensors import (
    Bytes,
    deliver,
    deliver_locally,
    deliver_repeated,
    fill,
    memory_differs,
    memory_of,
    plain,
)
from prism_sdk.runtime.tracer import Tracer, now_ns
from prism_sdk.runtime.unwaited import Receives, install_destroying, place_before, prepare
from prism_sdk.runtime.wire import Channel
from prism_sdk.runtime.work import PrismWork
from prismtrace import Op


class EmulateSeam(Seam):
    """Follows the script; virtual members arrive when the engine says so."""

    replaces_backend = True

    def __init__(self, spec: RankSpec, tracer: Tracer, channel: Channel) -> None:
        assert spec.emulate is not None
        self.spec = spec
        self.tracer = tracer
        self.conversation = Conversation(channel)
        self.facts = spec.emulate
        folder = self.facts.plan.parent
        script = Script.load(folder / f"script-{spec.rank}")
        self.cursor = Cursor(script, str(self.facts.graph))
        plan = BoundaryPlan.load(self.facts.plan)
        self._sandbox = frozenset(self.facts.sandbox)
        board = PostBoard(self.facts.board_fd, len(self.facts.sandbox)) if self.facts.board_fd >= 0 else None
        self.engine = BoundaryEngine(plan, spec.rank, board)
        self.reader = prismtrace.TraceReader(self.facts.graph)
        ring_fd = self.facts.ring_fds[self.facts.sandbox.index(spec.rank)]
        self.pool = Consumer(ring_fd, self.reader, script.sequence)
        self.session = self._open_session()
        self.late_ns: list[int] = []
        self.num_deviating = 0  # reductions in which this rank contributed something else than recorded
        self.num_without_values = 0
        self.held: HeldOperations | None = None
        if self.session.holds_streams and self.facts.hold_fds:
            self.held = HeldOperations(spec, self.facts, self.engine, script, self.pool, self.session)
        self._cpu_waits: CpuWaits | None = None  # from the first operation on
        self.groups: list[GroupState] = []
        self._receives = Receives()
        self._shelf = Shelf()
        self._blocks = Blocks(tracer)
        self._mesh: Any = None  # transport between sandbox ranks, where the script's own groups cannot serve

    def _open_session(self) -> ReplaySession:
        from prism_sdk.runtime.backends import open_backend

        return open_backend(self.spec, self.facts)

    def install(self) -> None:
        from prism_sdk.runtime.store import install_rendezvous

        install_rendezvous(self.conversation, lambda regions: None)
        self._blocks.install(is_real=self.keeps_real_backend)
        install_destroying(lambda: self.groups, self._shelf.forget)
        install_futures()
        if self.facts.by_roles:
            from prism_sdk.runtime.roles.seam import skip_foreign_groups

            skip_foreign_groups(None)
        if self.facts.needs_mesh:
            self._mesh = _sandbox_mesh(self.conversation, self.facts.sandbox, self.spec.rank)

    def keeps_real_backend(self, ranks: tuple[int, ...]) -> bool:
        return len(ranks) > 1 and self._sandbox.issuperset(ranks)

    def group_created(self, group: GroupState) -> None:
        self.groups.append(group)
        trace_group(self.tracer, group)

    # -- one operation ----------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> tuple[int, int, int, Expected, int]:
        """Write the unit of a call, and find what it meets: (posted, number, unit, expected, moved)."""
        if self._cpu_waits is None:
            self._cpu_waits = CpuWaits()
            self.engine.start(self.tracer.first_ns)
            if self.held is not None:
                self.held.start(self.engine.origin_ns)
        prepare(call)
        posted = self.tracer.now()
        seq = take_number(call)
        unit = self.tracer.communication(call, posted, seq)
        one, moved = self.cursor.next(call, step=self.tracer.step)
        if one.size_may_differ:  # members see the recorded ranks' sizes or their own; the trace says one of the two
            self.tracer.amend(unit, rows.COUNT_IN, one.num_elements_in)
            self.tracer.amend(unit, rows.COUNT_OUT, one.num_elements_out)
        return posted, seq, unit, one, moved

    def issue(self, call: Call) -> Any:
        posted, seq, unit, one, moved = self.begin(call)
        while self.cursor.stand_ins:
            met, meant = (self.engine.handle(stream, seq, shift=n) for stream, seq, n in self.cursor.stand_ins.pop())
            self.engine.stand_in(met, meant)
            if self.held is not None:
                self.held.stand_in(self.engine.row(*met), meant)
        is_any = call.is_p2p and call.peer is None
        if is_any:
            call.peer = call.group.ranks.index(one.peer or 0)
            settle_any_source(self.tracer, unit, call.group, call.peer, call.tag or 0)
        if one.stream is None:
            return self._issue_real(call, unit, posted)
        device = device_of(call) if self.held is not None else None
        if self.held is not None and device is not None and one.alike is None and self.held.takes(call, device):
            return self._issue_held(self.held, call, one, moved, unit, posted)
        handle = self.engine.post(one.stream, one.seq, int(posted), shift=self.cursor.shift_of(one))
        if self.held is not None:
            self.held.host_post(handle, int(posted), one.first_item + moved, len(one.sources))
        order = order_of(call)
        kept = self._shelf.add(call, order.scratch)
        if one.sources:
            self.pool.announce(one.first_item + moved)
        carriage = self.session.carry(CarriedOperation(call, one, handle, self._recorded_own(one, moved)))
        if call.op is Op.SEND and carriage is None:
            forget_message(call)
        work = PrismWork(
            self._completer(call, one, moved, unit, posted, handle, seq, carriage, order, kept),
            self._poller(handle, carriage), order.results,
            is_async=call.is_async, late_wait=self._late_wait(unit),
            line=None if call.is_p2p else (call.group.group_id, seq), again=order.again,
        )  # fmt: skip
        work.source, work.kept = -1 if call.peer is None else call.peer, kept
        if not is_any:
            self._receives.add(call, handle, work)
        if call.op is Op.BARRIER and not call.is_async:
            work.wait()
        return work

    def _issue_held(
        self, held: HeldOperations, call: Call, one: Expected, moved: int, unit: int, posted: int
    ) -> PrismWork:
        """The device waits for the rest of the job, the host goes on."""
        assert one.stream is not None
        handle = self.engine.handle(one.stream, one.seq, shift=self.cursor.shift_of(one))
        self.num_without_values += is_without_values(call, one)
        operation = held.issue(call, one, one.first_item + moved, handle, posted=posted)
        self.tracer.amend(unit, rows.END, operation.end)

        def complete(timeout: timedelta | None) -> None:
            start = self.tracer.now() if call.is_async else posted
            held.wait(operation, call)
            if not is_in_background():
                self.tracer.wait(unit, start, self.tracer.now(), blocked=False)

        work = PrismWork(
            complete, lambda: held.is_done(operation), results_of(call, operation.scratch), is_async=call.is_async,
            late_wait=self._late_wait(unit), again=lambda: held.see(operation),
        )  # fmt: skip
        work.source = -1 if call.peer is None else call.peer
        work.kept = self._shelf.add(call, operation.scratch, ended=lambda: held.ended(operation))
        if work.kept:
            operation.scratch = []
            call.forget_tensors()
        forget_message(call)
        if call.op is Op.BARRIER and not call.is_async:
            work.wait()
        return work

    def _issue_real(self, call: Call, unit: int, posted: int) -> Any:
        """All that take part are sandbox ranks: a real transport, or nothing to do for a group of one."""
        if len(call.group.ranks) > 1:
            real_group = self._sandbox.issuperset(call.group.ranks)
            work = call.native() if real_group else self._message_between_sandbox_ranks(call)
            if work is None:
                if not self._blocks.add(call.group.name, unit):
                    self.tracer.wait(unit, posted, self.tracer.now(), blocked=True)
                return None
            timed = TimedWork.of(work, self.tracer, unit, call, posted)
            timed.source = -1 if call.peer is None else call.peer
            self._blocks.add(call.group.name, unit, work=timed)
            return timed

        is_filled = device_of(call) is not None and fill_alone(call)

        def complete(timeout: timedelta | None) -> None:
            if not is_filled:
                joined = memoryview(Bytes(call.contribution).joined())
                sizes = call.send_bytes or ()
                deliver(call, lambda _, o, view: copy_view(view, joined[o : o + len(view)]), lambda _: sizes)
            if not is_in_background():
                now = self.tracer.now()
                self.tracer.wait(unit, posted if not call.is_async else now, now, blocked=False)

        alone = PrismWork(complete, lambda: True, call.outputs, late_wait=self._late_wait(unit))
        alone.kept = self._shelf.add(call)
        self._shelf.brought(alone.kept)
        return alone

    def _message_between_sandbox_ranks(self, call: Call) -> Any:
        """A message in a group that has virtual members too, so that its own backend is replaced."""
        assert self._mesh is not None and call.peer is not None
        group = call.group
        position = self.facts.sandbox.index(group.ranks[call.peer])
        tag = zlib.crc32(f"{group.group_id} {call.tag or 0}".encode()) >> 1  # 31 bits; groups and tags must not mix
        if call.op is Op.SEND:
            return self._mesh.send(call.contribution, position, tag)
        return self._mesh.recv(call.outputs, position, tag)

    def _late_wait(self, unit: int) -> Callable[[], None]:
        def late_wait() -> None:
            now = self.tracer.now()
            self.tracer.wait(unit, now, now, blocked=False)

        return late_wait

    def _poller(self, handle: tuple[int, int], carriage: Carriage | None) -> Any:
        return lambda: (carriage is None or carriage.is_done()) and self.engine.is_complete(handle, now_ns())

    @cached_property
    def _beside(self) -> prismtrace.TraceReader:
        """A reader for threads beside the program's own."""
        return prismtrace.TraceReader(self.facts.graph)

    def _recorded_own(self, one: Expected, moved: int) -> Callable[[], memoryview | None]:
        """Looks up what this rank contributed to an announced operation in the recording."""
        if OWN not in one.sources:
            return lambda: None
        index = one.first_item + moved + one.sources.index(OWN)
        return lambda: self.pool.peek(index, self._beside)

    def _completer(
        self, call: Call, one: Expected, moved: int, unit: int, posted: int, handle: tuple[int, int], seq: int,
        carriage: Carriage | None, order: HostOrder, kept: Sequence[Kept],
    ) -> Any:  # fmt: skip
        def complete(timeout: timedelta | None) -> None:
            self._receives.forget(handle)
            start = self.tracer.now() if call.is_async else posted
            is_under_way = carriage is not None and not carriage.is_done()
            if carriage is not None:
                carriage.wait()
            with order:
                if carriage is None or not one.sources or not carriage.deliver():
                    self._give_values(call, one, moved)
                else:
                    self.pool.release(one.first_item + moved, len(one.sources))
            due = self.engine.completion(handle)
            blocked = is_under_way or due > now_ns()
            late = self.session.hold_until(due)
            self._shelf.brought(kept)
            if blocked or not call.is_async:
                self.late_ns.append(late)
            if not is_in_background():
                self.tracer.wait(unit, start, self.tracer.now(), blocked=blocked or not call.is_async)
                place_before(call, seq, wait=False)  # its transfer may still be under way
                self._receives.place(call, lambda receive: self.engine.is_complete(receive, due), wait=False)
            elif is_seen():
                self.tracer.complete(unit, self.tracer.now())

        return complete

    # -- values -----------------------------------------------------------------------------------------------------

    def _give_values(self, call: Call, one: Expected, moved: int) -> None:
        if not one.sources:
            if call.op is Op.SCATTER and call.group.group_rank == call.root:
                deliver_locally(call, call.contribution)
            elif is_without_values(call, one):
                self.num_without_values += 1
                give_own(call)
            return
        first = one.first_item + moved
        views = self.pool.take(first, len(one.sources))
        by_source = dict(zip(one.sources, views, strict=True))
        if COMBINED in by_source:
            self._give_reduction(call, by_source)
        else:
            self._give_members(call, one, by_source)
        self.pool.release(first, len(one.sources))

    def _give_members(self, call: Call, one: Expected, by_source: dict[int, memoryview]) -> None:
        own = Bytes(call.contribution) if call.has_contribution else None
        mine = memoryview(own.joined()) if own is not None else memoryview(b"")
        me = call.group.group_rank

        def read_into(member: int, offset: int, view: memoryview) -> None:
            source = by_source.get(one.giver(member), mine) if call.op is Op.RECV or member != me else mine
            if call.op is Op.ALL_TO_ALL and member != me:
                recorded = source[offset : offset + one.send_bytes[one.giver(member)][me]]
                if len(recorded) != len(view):
                    fill_resized(view, recorded)
                    return
            piece = source[offset : offset + len(view)]
            if len(piece) < len(view) and one.size_may_differ:  # the rest is padding to the longest contribution
                view, rest = view[: len(piece)], view[len(piece) :]
                rest[:] = bytes(len(rest))
            copy_view(view, piece)

        if one.alike is not None and deliver_repeated(call, one.alike, read_into):
            return
        deliver(
            call, read_into,
            lambda member: call.send_bytes or () if member == me else one.send_bytes[one.giver(member)],
        )  # fmt: skip

    def _give_reduction(self, call: Call, by_source: dict[int, memoryview]) -> None:
        """The recorded result, where this rank contributes what it did then; else that, compensated for the difference.

        The result less the recorded contribution is the combined contribution of all virtual members; adding what this
        rank contributes now costs one tensor in place of n - 1 (the leftmost virtual rank's compensation).
        """
        position = 0
        result, recorded = by_source[COMBINED], by_source.get(OWN)
        # before anything is filled: outputs may be the contribution itself
        live = None if recorded is None or self._is_same(call, recorded) else Bytes(call.contribution)
        joined = None if live is None else memoryview(live.joined())
        for delivery in call.deliveries:
            size = delivery.tensor.nbytes
            part = result[position : position + size]
            if joined is None or recorded is None:
                fill(delivery.tensor, lambda _, view, p=part: copy_view(view, p))  # type: ignore[misc]
            else:
                span = slice(delivery.offset_bytes, delivery.offset_bytes + size)
                compensate(call, delivery.tensor, part, then=recorded[span], now=joined[span])
            position += size

    def _is_same(self, call: Call, recorded: memoryview) -> bool:
        position = 0
        for tensor in call.contribution:
            flat = plain(tensor)
            size = flat.nbytes
            if size and memory_differs(memory_of(flat), recorded[position : position + size]):
                self.num_deviating += 1
                return False
            position += size
        return True

    def finish(self, status: str) -> None:
        if self.held is not None:
            self.held.finish(is_complete=status == "complete")
        self.session.close()

    def summary(self) -> dict[str, object]:
        counts = self.pool.counts
        late = sorted(self.late_ns)
        waited = None if self._cpu_waits is None else self._cpu_waits.percent()
        return {
            **({} if waited is None else {"cpu_wait_percent": f"{waited:.1f}"}),
            "prefetch_hits": counts.hits, "prefetch_misses": counts.misses, "prefetch_hit_bytes": counts.hit_bytes,
            "prefetch_miss_bytes": counts.miss_bytes, "release_late_median_ns": late[len(late) // 2] if late else 0,
            "release_late_max_ns": late[-1] if late else 0, "num_boundary_operations": len(late),
            "steps_beyond_recorded": max(self.tracer.step - self.cursor.script.last_step - 1, 0),
            "operations_not_reached": self.cursor.num_left, **self.cursor.resized(),
            "reductions_compensated": self.num_deviating, "operations_without_values": self.num_without_values,
            **self.session.summary(), **(self.held.summary(self.num_deviating) if self.held is not None else {}),
        }  # fmt: skip


def _sandbox_mesh(conversation: Conversation, sandbox: tuple[int, ...], rank: int) -> Any:
    """A gloo backend over the sandbox ranks alone."""
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

    from prism_sdk.runtime.store import LauncherStore

    store = PrefixStore("prism-mesh", LauncherStore(conversation, lambda regions: None))
    return ProcessGroupGloo(store, sandbox.index(rank), len(sandbox), timedelta(minutes=10))
