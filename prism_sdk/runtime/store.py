"""The rendezvous store of a rank under the coordinator, and the handlers that hand it out.

Responsible for torch's Store interface; the pairs live in the launcher (keyvalue.py).  Waiting for a key gives up the
slot, which a TCPStore's wait in C++ would not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import _rendezvous_handlers

if TYPE_CHECKING:
    from prism_sdk.runtime.record import Conversation

_DEFAULT_TIMEOUT = timedelta(minutes=5)
_kept: list[Any] = []  # C++ keeps only the C++ half of a Python store


class LauncherStore(Store):
    """A key-value store held by the launcher."""

    def __init__(self, conversation: Conversation, release: Callable[[list[tuple[int, int]]], None]) -> None:
        super().__init__()
        self._conversation = conversation
        self._release = release
        self._timeout = _DEFAULT_TIMEOUT
        _kept.append(self)

    def _ask(self, operation: str, *arguments: Any, timeout: timedelta | None = None) -> Any:
        seconds = (timeout or self._timeout).total_seconds()
        _, result, error, released = self._conversation.ask(("store", operation, *arguments, seconds))
        self._release(released)
        if error is not None:
            raise dist.DistStoreError(error)
        return result

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        value: bytes = self._ask("get", key)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def append(self, key: str, value: Any) -> None:
        self._ask("append", key, _bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        value: bytes = self._ask("compare_set", key, _bytes(expected), _bytes(desired))
        return value

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def num_keys(self) -> int:
        return int(self._ask("num_keys"))

    deleteKey, getNumKeys = delete_key, num_keys  # the names under which C++ looks for them

    def list_keys(self) -> list[str]:
        return list(self._ask("list_keys"))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._ask("multi_get", list(keys)))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._ask("multi_set", list(keys), [_bytes(value) for value in values])

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), timeout=timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def install_rendezvous(conversation: Conversation, release: Callable[[list[tuple[int, int]]], None]) -> None:
    """Replace the handlers of env:// and tcp:// by ones that hand out the launcher's store."""

    def handler(url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        parsed = urlparse(url)
        query = {key: values[-1] for key, values in parse_qs(parsed.query).items()}
        rank = int(query.get("rank", os.environ.get("RANK", "-1")))
        world_size = int(query.get("world_size", os.environ.get("WORLD_SIZE", "-1")))
        store = LauncherStore(conversation, release)
        prefix = PrefixStore(f"{parsed.scheme}:{parsed.netloc}", store)
        _kept.append(prefix)
        yield prefix, rank, world_size
        raise RuntimeError("a second rendezvous under one URL is not supported")

    for scheme in ("env", "tcp"):
        _rendezvous_handlers[scheme] = handler
