"""Reads the JSON of one Chrome trace in blocks of events, whole or cut off. Does not look into events.

A block is cut where one object ends and another begins (``},{``) and handed to the JSON parser as an array. When that
parses, the cut was right: every string and bracket in it is closed. When it does not, the events of that stretch are
parsed one by one, and what is no JSON is left out and counted.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import IO, Any, Final

READ_BYTES: Final = 1 << 20
_MAX_DIGITS: Final = 4000
_NO_JSON: Final = (ValueError, StopIteration, RecursionError, InvalidOperation)
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_GAP: Final = re.compile(r"[ \t\n\r,]*")
_CUT: Final = re.compile(r"\}[ \t\n\r]*,[ \t\n\r]*\{")
_FAILURES_TO_GIVE_UP: Final = 8
_MAX_EVENT: Final = 1 << 26


def _integer(text: str) -> int | Decimal:
    return int(text) if len(text) < _MAX_DIGITS else Decimal(text)


def _pairs_counter(counts: list[int]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        counts[0] += len(pairs) - len(result)
        return result

    return hook


# Numbers with a fraction or an exponent stay decimals: no digit is lost. `strict=False` lets control characters pass.
_FAST: Final = json.JSONDecoder(parse_float=Decimal, parse_constant=Decimal, strict=False)
_EXACT: Final = json.JSONDecoder(parse_float=Decimal, parse_constant=Decimal, parse_int=_integer, strict=False)
_scan_once: Final[Callable[[str, int], tuple[Any, int]]] = _EXACT.scan_once  # type: ignore[attr-defined]


def decode(text: str) -> Any:
    """The value of a JSON text with decimals for fractions; raises ValueError."""
    try:
        return _EXACT.decode(text)
    except (RecursionError, InvalidOperation) as error:
        raise ValueError("nested too deeply, or a number of absurd size") from error


@dataclass
class ScanReport:
    """What was wrong in one document. Positions count characters of the decompressed text."""

    num_events: int = 0
    num_damaged: int = 0
    first_damage: int | None = None
    num_lost_characters: int = 0
    truncated: bool = False
    read_error: str = ""
    num_duplicate_keys: int = 0
    num_trailing: int = 0
    has_events: bool = False


@dataclass
class TraceScanner:
    """One document. Iterate `blocks` to the end, then `prefix`, `suffix` and `report` are complete.

    `prefix` is the text up to and with the ``[`` of the events, `suffix` that from its ``]`` on (empty when the events
    are cut off), with the white space between keys made equal.
    """

    file: IO[bytes]
    report: ScanReport = field(default_factory=ScanReport)
    prefix: str = ""
    suffix: str = ""

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self._at = 0
        self._passed = 0
        self._end = False
        self._failures = 0
        self._doubtful = False  # after a jump: what comes next may lie inside the damaged event

    # --- the buffer ------------------------------------------------------------------------------------------------

    def _more(self) -> bool:
        """Reads on and drops what was consumed; False at the end of the file."""
        if self._end:
            return False
        left = len(self._text) - self._at
        try:
            data = self.file.read(max(READ_BYTES, left))
        except (EOFError, OSError, ValueError) as error:
            raise_if_not_data(error)
            self.report.read_error, data = str(error) or type(error).__name__, b""
        self._end = not data
        self._passed += self._at
        self._text = self._text[self._at :] + self._decoder.decode(data, final=self._end)
        self._at = 0
        return True

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """The next character after what `pattern` skips; empty at the end."""
        while True:
            found = pattern.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self) -> tuple[Any, str]:
        """Parses one value at the current place and gives it with its text; raises ValueError when there is none."""
        while True:
            try:
                value, end = _scan_once(self._text, self._at)
            except _NO_JSON as error:
                if self._more():
                    continue
                raise ValueError(str(error)) from error
            if end == len(self._text) and not isinstance(value, dict | list | str):
                if self._more():
                    continue  # a number may go on
                raise ValueError("a value may be cut off")
            begin, self._at = self._at, end
            return value, self._text[begin:end]

    # --- the document -----------------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[list[Any]]:
        """The events, some thousand at a time."""
        first = self._skip(_SPACE)
        if first == "\ufeff":
            self._at += 1
            first = self._skip(_SPACE)
        if first == "[":
            self._at += 1
            self.prefix = "["
            yield from self._events()
            if not self.report.truncated:
                self.suffix = "]"
                self._rest()
            return
        if first != "{":
            raise ValueError("the text is neither an object nor an array")
        self._at += 1
        yield from self._pairs()

    def _pairs(self) -> Iterator[list[Any]]:
        """What stands in the outer object. Cut off, `prefix` and `suffix` hold what was whole and are closed."""
        report, parts = self.report, ["{"]
        while True:
            character = self._skip(_GAP)
            if character == "}":
                self._at += 1
                break
            try:
                if not character:
                    raise ValueError("the end is missing")
                key, _ = self._value()
                if self._skip(_SPACE) != ":":
                    raise ValueError("a colon is missing")
                self._at += 1
                lead = ", " if len(parts) > 1 or parts[0] == "]" else ""
                if key == "traceEvents" and not report.has_events and self._skip(_SPACE) == "[":
                    self._at += 1
                    parts.append(f'{lead}"traceEvents": [')
                    self.prefix, parts = "".join(parts), ["]"]
                    yield from self._events()
                    if report.truncated:
                        return
                    continue
                self._skip(_SPACE)
                _, text = self._value()
                if self._skip(_SPACE) not in ("", ",", "}"):
                    raise ValueError("a comma is missing")
                parts.append(f"{lead}{json.dumps(key)}: {text}")
            except ValueError:
                report.truncated = True
                self._lose()
                break
        parts.append("}")
        if report.has_events:
            self.suffix = "".join(parts)
        else:
            self.prefix = "".join(parts)
        self._rest()

    def _rest(self) -> None:
        if self._skip(_SPACE):
            self.report.num_trailing += len(self._text) - self._at
            self._at = len(self._text)
            while self._more():
                self.report.num_trailing += len(self._text)
                self._at = len(self._text)

    def _lose(self) -> None:
        self.report.first_damage = self.report.first_damage or self._passed + self._at
        while True:
            self.report.num_lost_characters += len(self._text) - self._at
            self._at = len(self._text)
            if not self._more():
                return

    def _events(self) -> Iterator[list[Any]]:
        self.report.has_events = True
        while True:
            character = self._skip(_GAP)
            if character == "]":
                self._at += 1
                return
            if not character:
                self.report.truncated = True
                return
            events = self._block() if self._failures < _FAILURES_TO_GIVE_UP else None
            if events is None:
                events = self._singles()
            if events:
                self.report.num_events += len(events)
                yield events
            if self.report.truncated:
                return

    def _block(self) -> list[Any] | None:
        """All events up to the last cut in the buffer; None when they cannot be parsed together."""
        while len(self._text) - self._at < READ_BYTES // 2 and self._more():
            pass
        text, start = self._text, self._at
        low = max(start, len(text) - (1 << 16))
        cut = -1
        for found in _CUT.finditer(text, low):
            cut = found.start()
        if cut < 0:
            return None
        part = text[start : cut + 1]
        try:
            events: list[Any] = _FAST.decode(f"[{part}]")
        except _NO_JSON:
            self._failures += 1
            return None
        self._at = cut + 1
        self._count_duplicates(part, events)
        return events

    def _count_duplicates(self, part: str, events: list[Any]) -> None:
        """Object keys that come twice: the last one counts, as in every JSON reader. Looked for when counts differ."""
        try:
            keys = sum(map(len, events)) + sum([len(event["args"]) for event in events if "args" in event])
        except (TypeError, KeyError, IndexError):
            keys = -1  # unusual events: look
        if part.count('":') != keys or '" :' in part:
            counts = [0]
            json.loads(f"[{part}]", object_pairs_hook=_pairs_counter(counts), strict=False)
            self.report.num_duplicate_keys += counts[0]

    def _singles(self) -> list[Any]:
        """Some events, one by one; at least one character is consumed."""
        events: list[Any] = []
        while len(events) < 4096:
            character = self._skip(_GAP)
            if not character or character == "]":
                return events
            begin = self._at
            try:
                value, end = _scan_once(self._text, begin)
            except _NO_JSON:
                if len(self._text) - begin < _MAX_EVENT and self._more():
                    continue
                if self._resync(begin):
                    continue
                return events
            if end == len(self._text) and not isinstance(value, dict | list | str):
                if not self._more():  # a number that may be cut off
                    self.report.truncated = True
                    self._lose()
                    return events
                continue
            if self._doubtful and not (type(value) is dict and "ph" in value):
                if not self._resync(begin):
                    return events
                continue
            self._doubtful = False
            self._count_duplicates(self._text[begin:end], [value])
            self._at = end
            events.append(value)
        return events

    def _resync(self, begin: int) -> bool:
        """Skips what is no event up to the next object; False when the rest of the file is lost."""
        report = self.report
        if report.first_damage is None:
            report.first_damage = self._passed + begin
        self._at = begin
        found = _CUT.search(self._text, begin)
        while found is None and len(self._text) - begin < _MAX_EVENT and self._more():
            begin, found = 0, _CUT.search(self._text)
        if found is None:
            report.truncated = True
            self._lose()
            return False
        report.num_damaged += not self._doubtful
        report.num_lost_characters += found.end() - 1 - begin
        self._at = found.end() - 1
        self._doubtful = True
        return True


def raise_if_not_data(error: Exception) -> None:
    """Lets errors of the machine through; damaged data is not one."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
