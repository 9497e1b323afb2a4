"""Loads pickles that hold plain data only: dict, list, tuple, str, bytes, int, float, bool, None. It runs nothing.

A pickle is a program. Before it is loaded, every instruction is looked at: one that could name a class, call
something or build an object is refused with its offset, and so is one that would make the loader allocate without
bound. The loader itself refuses classes once more.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from typing import Any, Final, NoReturn

from prismtrace import TraceFormatError, TraceTruncatedError

_FIXED: Final = {
    "K": 1, "M": 2, "J": 4, "G": 8, "h": 1, "j": 4, "q": 1, "\x80": 1, "\x95": 8,
    ")": 0, "]": 0, "}": 0, "(": 0, "N": 0, "\x88": 0, "\x89": 0, "\x85": 0, "\x86": 0, "\x87": 0,
    "t": 0, "l": 0, "d": 0, "a": 0, "e": 0, "s": 0, "u": 0, "0": 0, "1": 0, "\x94": 0,
}  # fmt: skip
_LENGTH: Final = {"\x8c": 1, "X": 4, "\x8d": 8, "C": 1, "B": 4, "\x8e": 8, "\x8a": 1, "\x8b": 4, "U": 1, "T": 4}
_LINES: Final = "ILFVSpg"
_MAX_NUMBER_BYTES: Final = 64
_REST: Final = "persistent ids, classes, calls and extensions are refused"

_ARGUMENT_BYTES: Final = [_FIXED.get(chr(code), -1) for code in range(256)]


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every class and every persistent id."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("has a persistent id")


def check(data: bytes, *, path: str) -> None:
    """Look at every instruction of a pickle up to its end.

    Raises:
        TraceFormatError: an instruction is not one of plain data.
        TraceTruncatedError: the pickle ends too early.
    """
    position, size, count = 0, len(data), 0
    fixed = _ARGUMENT_BYTES
    while position < size:
        code = data[position]
        start, position, count = position, position + 1, count + 1
        length = fixed[code]
        if length >= 0:
            position += length
        elif code == 0x2E:  # STOP
            return
        else:
            position = _long_argument(data, chr(code), position, start, count, path)
    raise TraceTruncatedError("the pickle ends too early", path=path, offset=size)


def _long_argument(data: bytes, code: str, position: int, start: int, count: int, path: str) -> int:
    if code in _LENGTH:
        width = _LENGTH[code]
        length = int.from_bytes(data[position : position + width], "little")
        if code in "\x8a\x8b" and length > _MAX_NUMBER_BYTES:
            raise TraceFormatError(f"a number of {length} bytes", path=path, offset=start)
        if position + width + length > len(data):
            raise TraceTruncatedError(f"a text of {length} bytes that is not there", path=path, offset=start)
        return position + width + length
    if code == "r":
        if int.from_bytes(data[position : position + 4], "little") > count:
            raise TraceFormatError("a note under a number that is out of line", path=path, offset=start)
        return position + 4
    if code in _LINES:
        end = data.find(b"\n", position)
        if end < 0:
            raise TraceTruncatedError("the pickle ends inside a line", path=path, offset=start)
        line = data[position:end]
        if code == "p" and not (line.isdigit() and len(line) < 10 and int(line) <= count):
            raise TraceFormatError("a note under a number that is out of line", path=path, offset=start)
        if code in "IL" and len(line) > _MAX_NUMBER_BYTES:
            raise TraceFormatError(f"a number of {len(line)} digits", path=path, offset=start)
        return end + 1
    name = next((known.name for known in pickletools.opcodes if known.code == code), f"byte {ord(code):#04x}")
    wanted = _named(data, code, position)
    message = f"the pickle has the instruction {name}{wanted}: only plain data are read, nothing was run; {_REST}"
    raise TraceFormatError(message, path=path, offset=start)


def _named(data: bytes, code: str, position: int) -> str:
    """What a GLOBAL or INST instruction asks for, for the message."""
    if code not in "ci":
        return ""
    lines = data[position : position + 200].split(b"\n", 2)[:2]
    return " of " + ".".join(ascii(line.decode("latin-1"))[1:-1] for line in lines)


def loads(data: bytes, *, path: str) -> Any:
    """The value of a pickle of plain data.

    Raises:
        TraceFormatError: it is damaged, or holds more than plain data.
    """
    check(data, path=path)
    foreign = (pickle.UnpicklingError, EOFError, struct.error, ValueError, TypeError, IndexError, KeyError)
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except (*foreign, AttributeError, OverflowError, MemoryError, UnicodeError) as error:
        raise TraceFormatError(f"the pickle is damaged ({type(error).__name__}: {error})", path=path) from error
