"""The rendezvous store of a recording, on the launcher's side.

Responsible for the key-value pairs; a request that must wait is repeated by the coordinator when something changed.
"""

from __future__ import annotations

from typing import Any

_SHORT_TIMEOUT_S = 60.0  # timeouts up to this are the program's own and are honoured when all else stands still


class KeyValues:
    """Key-value pairs with the operations of torch's Store. Requests: ("store", operation, *arguments, timeout_s)."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def run(self, request: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Carry out one request; None when it must wait for a key."""
        _, operation, *arguments, _timeout = request
        result = getattr(self, f"_{operation}")(*arguments)
        return None if result is _MUST_WAIT else ("store", result, None)

    def expire(self, request: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The reply to a waiting request whose own short timeout has passed; None when it has none."""
        timeout: float = request[-1]
        if timeout <= 0 or timeout > _SHORT_TIMEOUT_S:
            return None
        return ("store", None, f"wait timeout after {timeout * 1000:.0f}ms, keys: {request[2]!r}")

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def _get(self, key: str) -> Any:
        return self._values.get(key, _MUST_WAIT)

    def _wait(self, keys: list[str]) -> Any:
        return True if all(key in self._values for key in keys) else _MUST_WAIT

    def _check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def _append(self, key: str, value: bytes) -> None:
        self._values[key] = self._values.get(key, b"") + value

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        current = self._values.get(key)
        if current is None:
            if expected:
                return expected
            self._values[key] = desired
            return desired
        if current == expected:
            self._values[key] = desired
            return desired
        return current

    def _delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _num_keys(self) -> int:
        return len(self._values)

    def _multi_get(self, keys: list[str]) -> Any:
        if not self._check(keys):
            return _MUST_WAIT
        return [self._values[key] for key in keys]

    def _multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self._values.update(zip(keys, values, strict=True))

    def _list_keys(self) -> list[str]:
        return list(self._values)


class _MustWait:
    """Marks a request that cannot be answered yet."""


_MUST_WAIT = _MustWait()
