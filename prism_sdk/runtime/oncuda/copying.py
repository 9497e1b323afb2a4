"""Copies recorded values from the host's ring into the pool on the device (implements devicepool.Copier)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from prism_sdk.runtime.oncuda.driver import Driver


class DeviceCopier:
    """Copies into the pool on a stream of low priority."""

    def __init__(self, driver: Driver, base: int, device: torch.device) -> None:
        self._driver, self._base, self._device = driver, base, device
        self._stream = torch.cuda.ExternalStream(driver.create_stream(is_urgent=False), device=device)

    def copy(self, offset: int, source: memoryview) -> Any:
        address = ctypes.addressof(ctypes.c_char.from_buffer(source))
        self._driver.copy_in(self._stream.cuda_stream, self._base + offset, address, len(source))
        return self._stream.record_event()

    def is_done(self, token: Any) -> bool:
        return bool(token.query())

    def let_wait(self, token: Any, stream: Any) -> None:
        stream.wait_event(token)
