"""Work handles that the modes return to torch.

Responsible for the life of a handle between C++ and Python; completing the operation is the business of the mode.

C++ keeps only the C++ half of a Python `Work`: once the Python half is collected, `wait()` from C++ blocks for ever. So
a handle stays referenced here until it was waited for, and some thousand more after that (functional collectives and
futures may ask again).  What it holds of the operation goes when it was waited for, its results when the program drops
the handle, as with torch's own handles: else memory would not be that of the real job.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work

from prism_sdk.runtime.eager import uncompiled
from prism_sdk.runtime.futures import DrivenFuture, background, is_in_background

if TYPE_CHECKING:
    from prism_sdk.runtime.oncuda.shelf import Kept

_live: dict[int, PrismWork] = {}
#: Collectives that nobody has waited for yet, by group and number.
_unwaited: dict[int, dict[int, PrismWork]] = {}
_finished: deque[PrismWork] = deque(maxlen=4096)


def outstanding_works() -> list[PrismWork]:
    """Handles that nobody has waited for yet, oldest first."""
    return list(_live.values())


def keep_until_waited_for(work: PrismWork) -> None:
    """Let a handle live for the sake of C++ until somebody waits for it."""
    _live[id(work)] = work


def unwaited_works(group_id: int) -> Mapping[int, PrismWork]:
    """A group's collectives that nobody has waited for yet, by number."""
    return _unwaited.get(group_id, {})


def place_results(group_id: int, *, wait: bool, before: int | None = None) -> None:
    """Put the results of a group's collectives in place that nobody has waited for: a backend's thread would have.

    With `before`, of those with lower numbers only. With `wait` each is waited for; else those that are not complete
    yet are left.  It counts as no wait: what the program waits for later is traced there.
    """
    works = _unwaited.get(group_id)
    if not works:
        return
    for seq in [seq for seq in works if before is None or seq < before]:
        if seq in works:
            works[seq].place(wait=wait)


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor lies: its first address and the one behind it; if it is not contiguous, those of its storage."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    whole = tensor.untyped_storage()
    return whole.data_ptr(), whole.data_ptr() + whole.nbytes()


class PrismWork(Work):
    """A work handle whose completion is a Python call: `complete(timeout)` blocks until the results are in place."""

    # what most handles never change is not set in each of them: making one is on the way of every call
    _late_wait: Callable[[], None] | None = None
    _again: Callable[[], None] | None = None
    _is_late = False  # completed by a poll, and not waited for since
    _is_orphan = False  # held by us alone, for the sake of C++
    _future: DrivenFuture | None = None
    _error: BaseException | None = None
    _line: tuple[int, int] | None = None
    _spans: list[tuple[int, int]] | None = None
    source = -1  # group rank that a receive from any source was matched with
    kept: Sequence[Kept] = ()  # what NCCL's backend would hold until somebody waits for this handle

    def __init__(
        self, complete: Callable[[timedelta | None], None], poll: Callable[[], bool],
        outputs: Sequence[torch.Tensor], *, is_async: bool = True, late_wait: Callable[[], None] | None = None,
        line: tuple[int, int] | None = None, again: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`late_wait` notes a wait for what polling has completed; without it polling completes nothing (observe).

        `again` is called by each wait after the completion: on a GPU another stream may be the one that waits.

        `line`: group and number of a collective whose results are put in place also if nobody waits (`place_results`).
        """
        Work.__init__(self)
        self._complete: Callable[[timedelta | None], None] | None = complete
        self._poll: Callable[[], bool] | None = poll
        self._outputs: Sequence[torch.Tensor] = outputs
        self._is_async = is_async
        if late_wait is not None:
            self._late_wait = late_wait
        if again is not None:
            self._again = again
        keep_until_waited_for(self)
        if line is not None:
            self._line = line
            _unwaited.setdefault(line[0], {})[line[1]] = self

    @uncompiled
    def wait(self, timeout: timedelta | None = None) -> bool:
        self._wait(timeout)
        for one in self.kept:
            one.drop()
        self.kept = ()
        return True

    @uncompiled
    def _wait(self, timeout: timedelta | None = None) -> None:
        """Complete the operation for somebody who does not wait for this handle, but for its future."""
        complete = self._complete
        if complete is not None:
            try:
                self._run(complete, timeout)
            except BaseException as error:
                self._error = error
                self._release()
                if self._future is not None and not self._future.is_complete:
                    self._future.set_exception(error)
                raise
            self._release()
        elif self._error is not None:
            raise self._error
        else:
            if self._again is not None:
                self._again()
            if self._is_late and self._late_wait is not None and not is_in_background():
                self._is_late = False
                self._late_wait()
        if self._future is not None and not self._future.is_complete:
            self._future.set_result(self.result())

    def _run(self, complete: Callable[[timedelta | None], None], timeout: timedelta | None) -> None:
        """Block until the results are in place."""
        complete(timeout)

    def _release(self) -> None:
        self._complete = self._poll = None
        if not self._is_async and self._future is None:
            self._outputs = ()  # nobody can ask for them
        _live.pop(id(self), None)
        if self._line is not None:
            _unwaited[self._line[0]].pop(self._line[1], None)

    def give_up(self) -> None:
        """Forget the operation: nobody will wait for this handle."""
        self._again = None
        self._release()

    def place(self, *, wait: bool) -> None:
        """Put the results in place if the operation is complete, or once it is; the program does not learn of it."""
        if self._poll is not None and (wait or self._poll()):
            self._is_late = True
            with background(is_seen=False), contextlib.suppress(RuntimeError):  # kept for those who ask
                self._wait()

    def __del__(self) -> None:
        """Python has dropped the handle. C++ may not have: the bare Python half is brought back to life for it."""
        if not self._is_orphan:
            self._is_orphan = True
            self._outputs, self._future = (), None
            _finished.append(self)

    def is_completed(self) -> bool:
        """Whether the operation is done. Then its results are in place too, as a program that polls expects."""
        if self._poll is None:
            return True
        if not self._poll():
            return False
        if self._late_wait is not None:
            self._is_late = True
            with background(), contextlib.suppress(Exception):  # kept for those who wait or ask for it
                self._wait()
        return True

    def is_success(self) -> bool:
        return self._complete is None and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return list(self._outputs)

    def writes_into(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether its results are where one of these lies (`span_of`)."""
        if self._spans is None:
            self._spans = [*map(span_of, self._outputs)]
        return any(start < end and begin < stop for start, stop in self._spans for begin, end in spans)

    def source_rank(self) -> int:
        return self.source

    def _source_rank(self) -> int:
        return self.source

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that completes with this work.

        DDP's reducer waits for futures in C++, where Python cannot see it.  In a backward pass the wait is made
        visible: a callback of the autograd engine, queued before the reducer queues its own, waits for the work first.
        Where that is not possible and C++ asks, the work is waited for now.  A program drives the work by asking.
        """
        asked_by_program = _is_program(sys._getframe().f_back)
        if self._future is None:
            work = weakref.ref(self)

            def drive() -> None:
                if (this := work()) is not None:
                    this._wait()

            self._future = DrivenFuture(drive, lambda: (this := work()) is None or this.is_completed())
            if self._complete is None:
                self._future.set_result(self.result())
            elif not wait_before_backward_ends(self._wait) and not asked_by_program:
                self._wait()
        return self._future


def done_work() -> PrismWork:
    """A handle of what is over."""
    return PrismWork(lambda timeout: None, lambda: True, ())


def _is_program(caller: FrameType | None) -> bool:
    """Whether Python code asks for a future, and keeps it: a call from C++ appears under whoever called into C++.

    What a communication hook returns goes to DDP's C++ as well; with uneven inputs DDP runs hooks outside of backward.
    A backward thread of a GPU has no Python frames below.
    """
    if caller is None or "get_future" not in caller.f_code.co_names:
        return False
    frame: FrameType | None = caller
    for _ in range(8):
        if frame is None:
            break
        if str(frame.f_globals.get("__name__", "")).startswith("torch.nn.parallel"):
            return False
        frame = frame.f_back
    return True


def wait_before_backward_ends(wait: Callable[[], object]) -> bool:
    """Queue a wait for the end of the running backward pass; False when no node of one is running now.

    Not inside the engine's final callbacks: what is queued there runs after the callback, which may wait itself (DDP
    with a static graph reduces and waits in one callback).
    """
    if torch._C._current_autograd_node() is None:
        return False

    def callback() -> None:
        wait()

    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return True
