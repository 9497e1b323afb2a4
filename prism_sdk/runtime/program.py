"""Runs the user's program inside a rank as the interpreter would have run it.

Responsible for `__main__`, `sys.argv`, `sys.path` and the order of things at the end; it knows nothing of tracing.

runpy would do for the start, but it takes `__main__` away again when the program's last line has run, and exit
handlers, threads and pickle still need it then.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType


def run_program(target: str, arguments: tuple[str, ...], *, is_module: bool) -> None:
    """Run a script (or a folder or archive with a `__main__`) as `python target`, a module as `python -m target`."""
    sys.argv = [target, *arguments]
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what `python -m` calls
        return
    if Path(target).is_dir() or target.endswith((".pyc", ".pyz", ".zip")):
        runpy.run_path(target, run_name="__main__")
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(Path(target).resolve().parent))
    path = os.path.abspath(target)
    main.__dict__.update(__file__=path, __cached__=None)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, main.__dict__)


def exit_code_of(exit_: SystemExit) -> int:
    """The exit status that the interpreter makes of it; a text goes to stderr."""
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code & 0xFF
    sys.stderr.write(f"{exit_.code}\n")
    return 1


def run_excepthook(error: BaseException) -> None:
    """Call the program's own `sys.excepthook`; the plain one and torch's only print what the launcher says anyway."""
    hook = sys.excepthook
    if hook is not sys.__excepthook__ and not getattr(hook, "__module__", "").startswith("torch."):
        with contextlib.suppress(BaseException):
            sys.excepthook(type(error), error, error.__traceback__)


def program_traceback(error: BaseException) -> str:
    """The traceback from the program's own first frame on."""
    own = str(Path(__file__).parent)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        name = trace.tb_frame.f_code.co_filename
        if not (name.startswith(own) or name == "<frozen runpy>"):
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def run_exit_handlers() -> None:
    """What the interpreter does at its end, in its order: threads, then atexit (data loaders clean up there)."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
