"""Work handles that the modes return to torch.

Responsible for the life of a handle between C++ and Python; completing the operation is the business of the mode.

C++ keeps only the C++ half of a Python `Work`: once the Python half is collected, `wait()` from C++ blocks for ever. So
a handle stays referenced here until it was waited for, and some thousand more after that (functional collectives and
futures may ask again).  What it holds of the operation goes when it was waited for, its results when the program drops
the handle, as with torch's own handles: else memory would not be that of the real job.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from prism_sdk.runtime.futures import DrivenFuture

_live: dict[int, PrismWork] = {}
_finished: deque[PrismWork] = deque(maxlen=4096)


def outstanding_works() -> list[PrismWork]:
    """Handles that nobody has waited for yet, oldest first."""
    return list(_live.values())


class PrismWork(Work):
    """A work handle whose completion is a Python call: `complete(timeout)` blocks until the results are in place."""

    def __init__(
        self, complete: Callable[[timedelta | None], None], poll: Callable[[], bool],
        outputs: Sequence[torch.Tensor], *, is_async: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self._complete: Callable[[timedelta | None], None] | None = complete
        self._poll: Callable[[], bool] | None = poll
        self._outputs = list(outputs)
        self._is_async = is_async
        self._is_orphan = False  # held by us alone, for the sake of C++
        self._future: DrivenFuture | None = None
        self._error: BaseException | None = None
        self.source = -1  # group rank that a receive from any source was matched with
        _live[id(self)] = self

    def wait(self, timeout: timedelta | None = None) -> bool:
        complete = self._complete
        if complete is not None:
            try:
                complete(timeout)
            except BaseException as error:
                self._error = error
                self._release()
                if self._future is not None and not self._future.is_complete:
                    self._future.set_exception(error)
                raise
            self._release()
        elif self._error is not None:
            raise self._error
        if self._future is not None and not self._future.is_complete:
            self._future.set_result(self.result())
        return True

    def _release(self) -> None:
        self._complete = self._poll = None
        if not self._is_async and self._future is None:
            self._outputs = []  # nobody can ask for them
        _live.pop(id(self), None)

    def __del__(self) -> None:
        """Python has dropped the handle. C++ may not have: the bare Python half is brought back to life for it."""
        if not self._is_orphan:
            self._is_orphan = True
            self._outputs, self._future = [], None
            _finished.append(self)

    def is_completed(self) -> bool:
        return self._poll is None or self._poll()

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

    def source_rank(self) -> int:
        return self.source

    def _source_rank(self) -> int:
        return self.source

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that completes with this work.

        C++ waits for futures where Python cannot see it (DDP's reducer), in a backward pass only.  There the wait is
        made visible: a callback of the autograd engine, queued before the reducer queues its own, waits for the work
        first; in the engine's final callbacks the work is waited for now.  Elsewhere Python asks, and drives the work.
        """
        if self._future is None:
            work = weakref.ref(self)

            def drive() -> None:
                if (this := work()) is not None:
                    this.wait()

            self._future = DrivenFuture(drive, lambda: (this := work()) is None or this.is_completed())
            if self._complete is None:
                self._future.set_result(self.result())
            elif torch._C._current_graph_task_id() != -1 and not wait_before_backward_ends(self):
                self.wait()
        return self._future


def wait_before_backward_ends(work: PrismWork) -> bool:
    """Queue the wait for the end of the running backward pass; False when no node of one is running now.

    Not inside the engine's final callbacks: what is queued there runs after the callback, which may wait itself (DDP
    with a static graph reduces and waits in one callback).
    """
    if torch._C._current_autograd_node() is None:
        return False

    def wait() -> None:
        work.wait()

    torch.autograd.Variable._execution_engine.queue_callback(wait)
    return True
