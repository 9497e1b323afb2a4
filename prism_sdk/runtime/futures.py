"""Futures of work handles that complete when somebody asks for them.

Responsible for what a program may do with such a future in Python; C++ that waits for one is met in work.py, which
decides when that can happen.  A plain torch future is completed by a thread of its backend; here nobody but the
program's own thread can do the work behind it, so asking drives it: `wait`, `done`, and what is chained or collected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

#: Futures with callbacks that nobody has asked for yet: `run_due` completes those whose operation is complete.
_with_callbacks: dict[int, DrivenFuture] = {}


class DrivenFuture(torch.futures.Future):  # type: ignore[type-arg]  # subscripted it is another class
    """A future that `drive()` completes, blocking, and `is_due()` without blocking where that is possible."""

    def __init__(self, drive: Callable[[], object], is_due: Callable[[], bool]) -> None:
        super().__init__()
        self._drive: Callable[[], object] | None = drive
        self._is_due = is_due

    @property
    def is_complete(self) -> bool:
        """Whether it has a value or an error; drives nothing."""
        return bool(super().done())

    def wait(self) -> Any:
        """Complete it and return its value, or raise its error."""
        self._settle()
        return super().wait()

    def done(self) -> bool:
        """Whether it is complete; a work handle that is asked completes itself if that needs no waiting."""
        return self.is_complete or (self._is_due() and self.is_complete)

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """A future for what `callback(self)` returns, driven by this one."""
        following = DrivenFuture(self._settle, self._is_due)
        self.add_done_callback(lambda done: following.take(callback, done))
        return following

    def take(self, callback: Callable[[Any], Any], done: Any) -> None:
        """Complete with what a callback makes of another future; its error becomes a RuntimeError, as with torch's."""
        try:
            result = callback(done)
        except BaseException as error:
            is_plain = isinstance(error, RuntimeError)
            self.set_exception(error if is_plain else RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            self.set_result(result)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """`callback(self)` when it is complete, which somebody's wait or a later operation of the rank brings about."""
        if not self.is_complete:
            _with_callbacks[id(self)] = self

        def call(done: Any) -> None:
            _with_callbacks.pop(id(self), None)
            callback(done)

        super().add_done_callback(call)

    def _settle(self) -> None:
        drive, self._drive = self._drive, None
        if drive is None:
            return
        try:
            drive()  # also where a backend has completed it: the wait for it is part of the trace
        except BaseException:
            # the drive of a work handle has put its error here; waiting raises it
            if not self.is_complete:
                raise


_in_background = False
_is_seen = True


@contextlib.contextmanager
def background(*, is_seen: bool = True) -> Iterator[None]:
    """Inside it nothing counts as a wait of the program's; `is_seen`: the program learns now that it is complete."""
    global _in_background, _is_seen
    before = _in_background, _is_seen
    _in_background, _is_seen = True, is_seen
    try:
        yield
    finally:
        _in_background, _is_seen = before


def run_due() -> None:
    """Complete the futures with callbacks whose operations are complete: a backend's thread would have done so."""
    for future in list(_with_callbacks.values()):
        future.done()


def is_in_background() -> bool:
    """Whether what completes now would be completed by a backend's thread: the program waits for nothing."""
    return _in_background


def is_seen() -> bool:
    """Whether the time at which something completes in the background means anything."""
    return _is_seen


def collect_all(futures: Sequence[Any]) -> Any:
    """Like torch.futures.collect_all, which waits in C++ and drives nothing."""
    driven = [future for future in futures if isinstance(future, DrivenFuture)]
    if not driven:
        return _torch_collect_all(list(futures))

    def drive() -> None:
        for future in driven:
            future._settle()

    collected = DrivenFuture(drive, lambda: all(future._is_due() for future in driven))
    _torch_collect_all(list(futures)).add_done_callback(lambda done: collected.take(lambda all_: all_.value(), done))
    return collected


def wait_all(futures: Sequence[Any]) -> list[Any]:
    """Like torch.futures.wait_all."""
    return [future.wait() for future in collect_all(futures).wait()]


_torch_collect_all = torch.futures.collect_all


def install_futures() -> None:
    """Let torch's functions over several futures know driven ones."""
    futures: Any = torch.futures
    futures.collect_all, futures.wait_all = collect_all, wait_all
