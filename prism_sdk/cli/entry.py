"""What the console script calls: Ctrl-C ends ``prism`` with one line and 130, also while it imports and while it ends.

It imports nothing of Prism before it listens, and parses, prints and decides nothing else.
"""

from __future__ import annotations

import signal
import sys

TYPE_CHECKING = False  # importing typing takes as long as all else here, and nobody listens before `main`

if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> NoReturn:
    """Run ``prism`` with the process's arguments, and exit."""
    seen: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # in the background of a script it is ignored
        signal.signal(signal.SIGINT, note)
    try:
        from prism_sdk.cli.main import run

        code = run(sys.argv[1:], interrupted=lambda: bool(seen))
    except BaseException:
        if not seen:
            raise
        # it came before `run` listened, or after it was done; an import that is broken off may say something else
        sys.stderr.write("prism: interrupted\n")
        code = _INTERRUPTED
    finally:
        # all is done: the interpreter takes itself apart, and would end by the signal
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
