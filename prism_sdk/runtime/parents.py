"""Ties processes to each other: what becomes of one when the one that started it ends.

Responsible for what the kernel is asked; who ends whom, and when, is decided elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_id: int | None = None, *, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal (0: none) when its parent ends, however that ends.

    The kernel says nothing of a parent that has ended before it is asked, while this process was starting. Whoever does
    not find that out by a closed socket gives `parent_id`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if parent_id is not None and os.getppid() != parent_id:
        os.kill(os.getpid(), signal_number)


def adopt_orphans() -> None:
    """Become the parent of our descendants whose own parent ends, so that none of them is lost sight of."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
