"""Writes small files whole or not at all; traces are the library's to write."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from prism_sdk.errors import OutputError

__all__ = ["write_whole"]


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
