"""Writes small files whole or not at all, and says where none can be; traces are the library's to write."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from prism_sdk.errors import OutputError

__all__ = ["file_in_path", "write_whole"]


def file_in_path(output: Path) -> Path | None:
    """The part of the folder of ``output`` that is no folder, so that none can be made there; None without one."""
    return next((part for part in output.parents if os.path.lexists(part) and not part.is_dir()), None)


def write_whole(data: bytes, output: Path) -> None:
    """Write a file that appears when it is complete, in place of one that may be there.

    Raises:
        OutputError: it cannot be written, or would replace a device, a pipe or a socket.
    """
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        if output.exists() and not output.is_file():
            raise OutputError(str(output), reason="it is neither a file nor missing: a device, a pipe or a socket")
        temporary.write_bytes(data)
        os.replace(temporary, output)
    except OSError as error:
        raise OutputError(str(output), reason=error.strerror or type(error).__name__) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
