"""Says when a boundary operation of a sandbox rank completes, from the boundary plan and the posts seen so far.

Responsible for the few additions an operation costs at run time; the plan is made by prism_sdk.graph.contract.

Every sandbox rank computes the same arrivals from the same posts, so no process in the middle is asked.  With several
sandbox ranks the posts stand on a board in shared memory.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable

from prism_sdk.errors import RunError
from prism_sdk.graph.plan import START, BoundaryPlan, Stream, Term

_POST = struct.Struct("<q")  # ns of the monotonic clock; 0: not there yet
_ORIGIN_BYTES = 64
_KEPT = 65536  # arrivals kept; an operation's terms refer to the recent past
_POST_TIMEOUT_NS = 600_000_000_000


class PostBoard:
    """Posts of several sandbox ranks, in a sparse anonymous file that all of them inherited."""

    def __init__(self, fd: int, num_members: int) -> None:
        self._fd = fd
        self._row_bytes = num_members * _POST.size

    def publish_origin(self, origin_ns: int) -> None:
        os.pwrite(self._fd, struct.pack("<q", origin_ns), 0)

    def origin(self) -> int:
        """The origin of the job's clock, set by the first sandbox rank."""
        return wait_for(lambda: struct.unpack("<q", os.pread(self._fd, 8, 0))[0], "the first sandbox rank to start")

    def origin_if_set(self) -> int:
        """The origin, 0 before it is set."""
        raw = os.pread(self._fd, 8, 0)
        return int(struct.unpack("<q", raw)[0]) if len(raw) == 8 else 0

    def publish(self, row: int, member: int, posted_ns: int) -> None:
        os.pwrite(self._fd, _POST.pack(posted_ns), self._position(row, member))

    def post(self, row: int, member: int) -> int:
        """When a member arrived at an operation; waits until it has."""
        return wait_for(lambda: self._read(row, member), f"sandbox member {member} at boundary operation {row}")

    def has(self, row: int, member: int) -> bool:
        """Whether a member has published its post at an operation."""
        return self._read(row, member) != 0

    def _position(self, row: int, member: int) -> int:
        return _ORIGIN_BYTES + row * self._row_bytes + member * _POST.size

    def _read(self, row: int, member: int) -> int:
        raw = os.pread(self._fd, _POST.size, self._position(row, member))
        return int(_POST.unpack(raw)[0]) if len(raw) == _POST.size else 0


def wait_for(read: Callable[[], int], what: str) -> int:
    """The first value of `read` that is not 0; RunError, which says `what` was waited for, after ten minutes."""
    started = time.monotonic_ns()
    pause = 0.0
    while not (value := read()):
        waited = time.monotonic_ns() - started
        if waited > _POST_TIMEOUT_NS:
            raise RunError(f"waited {_POST_TIMEOUT_NS // 10**9} s for {what}")
        pause = 0.0 if waited < 200_000 else min(pause + 0.00005, 0.001)
        time.sleep(pause)
    return value


class BoundaryEngine:
    """Arrivals and completions of boundary operations, for one sandbox rank."""

    def __init__(self, plan: BoundaryPlan, rank: int, board: PostBoard | None) -> None:
        self.plan = plan
        self.rank = rank
        self._board = board
        self._members = plan.sandbox_ranks
        self._me = self._members.index(rank)
        self._origin_ns = 0
        self._posts: dict[tuple[int, int], int] = {}
        self._arrivals: dict[tuple[int, int], int] = {}
        self.is_told_all = False  # of this rank's posts in their order: what is missing is no post at all
        self._to_come: dict[tuple[int, int], Callable[[], int]] = {}  # posts that a GPU makes: 0 until it has
        self._transfers: dict[int, int] = {}  # of operations of the plan, as far as they were asked for
        self._terms: dict[tuple[int, int], tuple[Term, ...]] = {}  # looked up ahead of the time that counts

    def start(self, origin: int) -> None:
        """Fix the origin of the job's clock: the graph's time 0, at which every rank begins."""
        if self._board is None:
            self._origin_ns = origin
            return
        if self._me == 0:
            self._board.publish_origin(origin)
        self._origin_ns = self._board.origin()

    @property
    def origin_ns(self) -> int:
        """The origin of the job's clock; 0 before it is fixed."""
        return self._origin_ns

    def start_at(self, origin: int) -> None:
        """Take the origin from who has fixed it; 0: it is not fixed yet."""
        self._origin_ns = self._origin_ns or origin

    def arrival(self, handle: tuple[int, int]) -> int | None:
        """When the last member arrived at an operation, for an onlooker without posts of its own; never waits."""
        if not self._origin_ns:
            self._origin_ns = self._board.origin_if_set() if self._board is not None else 0
        return self._arrival(handle, wait=False) if self._origin_ns else None

    def arrival_of_others(self, handle: tuple[int, int]) -> int | None:
        """When the virtual members have arrived at a collective with no other sandbox member; None: not known yet."""
        if not self._origin_ns or len(self.plan.members(handle[0])) > 1:
            return None
        terms = self._terms_of(handle)
        return None if self._unknown(terms) else self._at_terms(terms)

    def row(self, index: int, shift: int) -> int:
        """One number for a handle, which is its row on the board."""
        return index + shift * len(self.plan)

    def handle_of(self, row: int) -> tuple[int, int]:
        """The handle of a row."""
        shift, index = divmod(row, len(self.plan))
        return index, shift

    def post(self, stream: Stream, seq: int, posted_ns: int, *, shift: int = 0) -> tuple[int, int]:
        """This rank has arrived at the recorded operation `seq` of a stream, or `shift` > 0 rounds beyond, at its like.

        Returns the operation's handle (index in the plan, rounds of steps beyond the recorded ones).
        """
        handle = self.handle(stream, seq, shift=shift)
        self.post_at(handle, posted_ns)
        return handle

    def handle(self, stream: Stream, seq: int, *, shift: int = 0) -> tuple[int, int]:
        """The handle of an operation, as `post` returns it."""
        return self.plan.find(stream, seq=seq)[0], shift

    def post_at(self, handle: tuple[int, int], posted_ns: int) -> None:
        """As `post`, of an operation whose handle is known."""
        self._to_come.pop(handle, None)
        self._posts[handle] = posted_ns
        if self._board is not None:
            self._board.publish(self.row(*handle), self._me, posted_ns)

    def post_later(self, handle: tuple[int, int], read: Callable[[], int]) -> None:
        """The rank's GPU will arrive at an operation: `read` says when it did, and 0 until then.

        Who calls this does not put the post on the board; the process that releases the rank's streams does.
        """
        self._to_come[handle] = read

    def know(self, handle: tuple[int, int], *, due_ns: int) -> None:
        """The releaser has worked out when an operation completes."""
        self._to_come.pop(handle, None)
        self._arrivals[handle] = due_ns - self._transfer(handle)
        self._forget()

    def prepare(self, handle: tuple[int, int]) -> None:
        """Look up what the arrival of an operation will be worked out from."""
        if handle not in self._arrivals:
            self._terms[handle] = self.plan.terms(handle[0], shift=handle[1])
            self._transfer(handle)

    def stand_in(self, met: tuple[int, int], meant: tuple[int, int]) -> None:
        """An operation that was met turns out to be another one as well, of which it has the post."""
        read = self._to_come.get(met)
        if met in self._posts:
            self.post_at(meant, self._posts[met])
        elif read is not None:
            self.post_later(meant, read)

    def completion(self, handle: tuple[int, int]) -> int:
        """When the operation completes for this rank, in ns of the monotonic clock; waits for posts of other ranks."""
        arrival = self._arrival(handle)
        assert arrival is not None
        return arrival + self._transfer(handle)

    def is_complete(self, handle: tuple[int, int], now_ns: int) -> bool:
        """Whether the operation has completed by `now_ns`; False while posts are missing (this rank's own too)."""
        arrival = self._arrival(handle, wait=False)
        return arrival is not None and now_ns >= arrival + self._transfer(handle)

    def transfer(self, handle: tuple[int, int]) -> int:
        """How long after its last arrival the operation completes for this rank, in ns."""
        return self._transfer(handle)

    def _transfer(self, handle: tuple[int, int]) -> int:
        known = self._transfers.get(handle[0])
        if known is not None:
            return known
        for rank, transfer in self.plan.members(handle[0]):
            if rank == self.rank:
                self._transfers[handle[0]] = transfer
                return transfer
        raise RunError(f"rank {self.rank} is no member of boundary operation {handle[0]}", rank=self.rank)

    def _arrival(self, handle: tuple[int, int], *, wait: bool = True) -> int | None:
        known = self._arrivals.get(handle)
        if known is not None:
            return known
        stack = [handle]
        while stack:
            at = stack[-1]
            terms = self._terms_of(at)
            open_ = self._unknown(terms)
            if open_:
                stack += open_
                continue
            posted = self._last_post(at, wait=wait)
            if posted is None:
                return None
            self._arrivals[at] = max(posted, self._at_terms(terms))
            self._terms.pop(at, None)
            stack.pop()
        self._forget()
        return self._arrivals[handle]

    def _terms_of(self, handle: tuple[int, int]) -> tuple[Term, ...]:
        terms = self._terms.get(handle)  # none at all of what waits for nobody
        return self.plan.terms(handle[0], shift=handle[1]) if terms is None else terms

    def _unknown(self, terms: tuple[Term, ...]) -> list[tuple[int, int]]:
        """Sources whose arrival is not known yet."""
        sources = [(term.source, term.shift) for term in terms if term.source != START]
        return [source for source in sources if source not in self._arrivals]

    def _at_terms(self, terms: tuple[Term, ...]) -> int:
        """The latest of some terms, whose sources are known; 0 where there is none."""
        arrival = 0
        for source, shift, weight in terms:
            base = self._origin_ns if source == START else self._arrivals[source, shift]
            arrival = max(arrival, base + weight)
        return arrival

    def _forget(self) -> None:
        if len(self._arrivals) > 2 * _KEPT:
            for key in list(self._arrivals)[:_KEPT]:
                del self._arrivals[key]
                self._posts.pop(key, None)

    def _last_post(self, handle: tuple[int, int], *, wait: bool) -> int | None:
        read = self._to_come.get(handle)
        if read is not None:
            posted_ns = wait_for(read, f"the GPU of rank {self.rank} to arrive") if wait else read()
            if not posted_ns:
                return None
            del self._to_come[handle]
            self._posts[handle] = posted_ns
        if self._board is None:
            return self._posts.get(handle, 0 if wait or self.is_told_all else None)
        row = self.row(*handle)
        members = [self._members.index(rank) for rank, _ in self.plan.members(handle[0])]
        if not wait and not all(self._board.has(row, member) for member in members):
            return None
        return max((self._board.post(row, member) for member in members), default=0)
