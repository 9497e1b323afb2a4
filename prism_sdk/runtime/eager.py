"""Keeps torch's compiler out of Prism's own frames.

Responsible for nothing else; what a program compiles stays compiled.

Where a graph breaks around a call, the compiler looks at each Python frame that the call enters, ours too: it would
compile them for one call's values, and refuses some of what they do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_frames: Any = torch._C._dynamo.eval_frame  # it is there without torch._dynamo, which takes long to import

compiler: Callable[[], Any] = _frames.get_eval_frame_callback
"""Gives what looks at the frames that this thread enters; None where nobody does."""


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, and all that it calls, as Python runs it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if compiler() is None:
            return function(*args, **kwargs)
        before = _frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _frames.set_eval_frame(before)

    leave_to_python(run)
    return run


def leave_to_python(function: Any) -> None:
    """Have the compiler skip the frames of a function, but not of those that it calls."""
    if hasattr(_frames, "skip_code"):
        _frames.skip_code(function.__code__)
    elif hasattr(_frames, "set_code_exec_strategy"):
        strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
        _frames.set_code_exec_strategy(function.__code__, strategy)
