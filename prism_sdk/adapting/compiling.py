"""What wrappers must know of torch's compiler: whether it looks at their frames, and whether it follows their calls.

It imports no torch: where none is loaded, nothing compiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Compiler"]


def _nobody() -> None:
    return None


def _never() -> bool:
    return False


class Compiler:
    """torch's compiler, as a wrapper meets it in two ways.

    It *follows* a call in what it compiles: the wrapper is part of the graph then, and must be nothing but the call.
    Or it *looks* at each frame that is entered, where a graph breaks around the call: ours are not for compiling.
    """

    def __init__(self) -> None:
        torch: Any = sys.modules.get("torch")
        self._frames: Any = None
        self.looking: Callable[[], Any] = _nobody
        """Gives what looks at the frames that this thread enters; None where nobody does."""
        self.look: Callable[[Any], Any] = id
        """Sets what looks at them."""
        self.follows: Callable[[], bool] = _never
        """Whether it follows this call; the compiler itself knows the answer without asking."""
        if torch is not None:
            self._frames = torch._C._dynamo.eval_frame
            self.looking, self.look = self._frames.get_eval_frame_callback, self._frames.set_eval_frame
            self.follows = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", _never)

    def pass_by(self, function: Any) -> None:
        """Have the compiler skip the frames of a function, but not of those that it calls."""
        if hasattr(self._frames, "skip_code"):
            self._frames.skip_code(function.__code__)
        elif hasattr(self._frames, "set_code_exec_strategy"):
            strategy = self._frames._FrameExecStrategy(
                self._frames._FrameAction.SKIP, self._frames._FrameAction.DEFAULT
            )
            self._frames.set_code_exec_strategy(function.__code__, strategy)
