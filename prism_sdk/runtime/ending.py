"""How a rank that is told to end (SIGTERM) writes out what it traced, wherever it happens to be.

Responsible for signals and for who acts on them; what is written out is the agent's business.  Three things make it
more than a signal handler.  Python runs handlers between any two steps of the main thread, and they may raise (that of
torch's data loader does when a worker dies): writing must not be broken off by them.  A rank that waits inside gloo or
NCCL runs no handler: another thread acts in its place, and both may come to it at the same time.  And what the program
forks is not the rank.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

KILLED = 128 + signal.SIGTERM  # the exit code, as a shell reports it
_HANDLER_S = 0.5  # how long the program's thread has to run our handler before another thread acts
_PROGRAM_S = 3.0  # and how long a handler of the program's own has: less than a launcher gives a rank


@contextlib.contextmanager
def undisturbed(*, then_handle: bool = True) -> Iterator[None]:
    """No Python signal handler runs inside; signals that came meanwhile are handled at the end, or dropped."""
    if threading.get_ident() != threading.main_thread().ident:  # no other thread runs handlers
        yield
        return
    came: list[int] = []
    present = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers: dict[int, Any] = {number: handler for number, handler in present.items() if callable(handler)}
    is_over = False

    def keep(number: int, frame: Any) -> None:
        if is_over:  # a handler that raised below has left this one in its place
            handlers[number](number, frame)
        else:
            came.append(number)

    try:
        for number in handlers:
            signal.signal(number, keep)
        yield
    finally:
        is_over = True
        with contextlib.ExitStack() as rest:  # which goes on where a handler raises
            if then_handle:
                for kept in reversed(dict.fromkeys(came)):
                    rest.callback(signal.raise_signal, kept)
            for number, handler in handlers.items():
                rest.callback(signal.signal, number, handler)


class Once:
    """Does one thing once, whoever comes first and undisturbed; others wait until it is done, also when it fails.

    It is the last thing of a process: signals that come meanwhile are dropped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_begun = False

    def run(self, action: Callable[[], None]) -> None:
        with undisturbed(then_handle=False), self._lock:
            if not self._is_begun:
                self._is_begun = True
                action()


def end_on_sigterm(write_out: Callable[[], None], leave: Callable[[], Any], *, waits_in_native_code: bool) -> None:
    """On SIGTERM call `write_out`, from any thread and perhaps more than once, then `leave`, in the program's thread.

    `leave` ends the process. A program that installs its own handler keeps it.
    """

    def handler(*_: Any) -> None:
        for _attempt in range(2):  # another handler may raise before the writing out has begun
            with contextlib.suppress(Exception):
                write_out()
                break
        leave()

    signal.signal(signal.SIGTERM, handler)
    _spare_children(handler)
    if waits_in_native_code:
        _listen_beside(handler, write_out)


def _listen_beside(handler: Callable[..., None], write_out: Callable[[], None]) -> None:
    """A thread that acts when the program's own thread does not."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    of_program = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if of_program != -1:
        signal.set_wakeup_fd(of_program)
        return

    def listen() -> None:
        while signal.SIGTERM not in os.read(read_end, 64):
            pass
        time.sleep(_HANDLER_S if signal.getsignal(signal.SIGTERM) is handler else _PROGRAM_S)
        with contextlib.suppress(Exception):
            write_out()
        os._exit(KILLED)

    _thread.start_new_thread(listen, ())  # not a threading.Thread: the program counts its own threads only


def _spare_children(handler: Callable[..., None]) -> None:
    """What the program forks (data loader workers) dies of SIGTERM as without us, also right after the fork."""
    masks: list[set[int | signal.Signals]] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def in_child() -> None:
        with contextlib.suppress(ValueError):  # forked by another thread than the program's first
            if signal.getsignal(signal.SIGTERM) is handler:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
