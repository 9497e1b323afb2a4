"""Accounts for the device memory of resident ranks, and says when one more cannot fit.

Responsible for the launcher's side: it knows what ranks have reported, and opens no GPU itself.

A parked rank stays on the device with everything it holds: what its allocator has reserved, and the context.  The
context of a rank is what the device's use grew by beyond what allocators say, per rank that came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prism_sdk.errors import RunError

_CONTEXT_BYTES = 1 << 30  # more than a context takes


class DeviceMemoryError(RunError):
    """The ranks that share a device need more memory than it has."""

    def __init__(
        self, rank: int, *, device: int, total_bytes: int, free_bytes: int, reason: str, hint: str | None = None
    ) -> None:
        super().__init__(
            f"rank {rank} does not fit on GPU {device}: {gib(free_bytes)} of {gib(total_bytes)} are free; {reason}",
            rank=rank,
            hint=hint or "parked ranks stay in device memory: record on more GPUs, fewer ranks, or a smaller model",
        )
        self.device, self.total_bytes, self.free_bytes = device, total_bytes, free_bytes


@dataclass(frozen=True)
class Footprint:
    """One report: the real device, how many there are, its free and total bytes, and what the rank has reserved there.

    `reserved_bytes` is what the rank's allocator has, whether on the device or moved away.
    """

    device: int
    num_devices: int
    free_bytes: int
    total_bytes: int
    reserved_bytes: int


class Ledger:
    """What is known of the devices that ranks share."""

    def __init__(self, away: Callable[[int], int] = lambda device: 0) -> None:
        """`away(device)`: bytes of ranks of the device that were moved elsewhere."""
        self._away = away
        self._latest: dict[int, Footprint] = {}  # device -> the report that came last
        self._held: dict[int, Footprint] = {}  # rank -> its last report
        self._beyond: dict[int, tuple[int, int]] = {}  # device -> (ranks, bytes that no allocator has), first report

    def note(self, rank: int, footprint: Footprint) -> None:
        """A rank has reported."""
        self._latest[footprint.device] = footprint
        self._held[rank] = footprint
        if footprint.device not in self._beyond:
            self._beyond[footprint.device] = (1, self.beyond_bytes(footprint.device))

    def ended(self, rank: int) -> None:
        """A rank's process is gone, and with it what it held."""
        last = self._held.pop(rank, None)
        if last is None:
            return
        now = self._latest[last.device]
        free = min(now.free_bytes + last.reserved_bytes + self.context_bytes(last.device), now.total_bytes)
        self._latest[last.device] = Footprint(now.device, now.num_devices, free, now.total_bytes, now.reserved_bytes)

    def ranks_on(self, device: int) -> list[int]:
        """The ranks that hold memory of a device."""
        return [rank for rank, footprint in self._held.items() if footprint.device == device]

    def beyond_bytes(self, device: int) -> int:
        """What of a device is taken and was reserved by no rank: by contexts, libraries and other programs."""
        now = self._latest.get(device)
        if now is None:
            return 0
        reserved = sum(self._held[rank].reserved_bytes for rank in self.ranks_on(device)) - self._away(device)
        return max(now.total_bytes - now.free_bytes - reserved, 0)

    def context_bytes(self, device: int) -> int:
        """What a rank holds beside its allocator's memory: contexts, kernels, libraries' own buffers; on average."""
        num_first, first = self._beyond[device]
        num = len(self.ranks_on(device))
        if num > num_first:
            return max(self.beyond_bytes(device) - first, 0) // (num - num_first)
        return min(first // max(num, 1), _CONTEXT_BYTES)  # programs of others may be on the device too

    def kept_bytes(self, rank: int, movable_bytes: int) -> int:
        """What a rank has on its device beside what can be moved, its context included; 0 before it has reported."""
        last = self._held.get(rank)
        return 0 if last is None else self.context_bytes(last.device) + max(last.reserved_bytes - movable_bytes, 0)

    def known(self, device: int) -> tuple[int, int]:
        """Free and total bytes of a device as they were last reported; zeros before."""
        now = self._latest.get(device)
        return (0, 0) if now is None else (now.free_bytes, now.total_bytes)

    def needs_to_start(self, rank: int, kept_bytes: Callable[[int], int]) -> tuple[int, int] | None:
        """(device, bytes) for a rank that has not started: its context, and what all others have that cannot be moved.

        None: nothing is known of its device, or it has started.
        """
        for any_footprint in self._latest.values():
            device = rank % any_footprint.num_devices
            holders = self.ranks_on(device)
            if rank in self._held or not holders:
                return None
            context = self.context_bytes(device)
            return device, max(context, _CONTEXT_BYTES) + min(kept_bytes(holder) for holder in holders) - context
        return None

    def refusal(self, rank: int) -> DeviceMemoryError | None:
        """Why `rank`, which has not started, cannot: not even as much as the smallest of the others holds is free."""
        for any_footprint in self._latest.values():
            device = rank % any_footprint.num_devices
            if device in self._latest and rank not in self._held:
                return self._refusal(rank, self._latest[device])
        return None

    def _refusal(self, rank: int, now: Footprint) -> DeviceMemoryError | None:
        holders = self.ranks_on(now.device)
        if not holders:
            return None
        context = self.context_bytes(now.device)
        least = min(self._held[holder].reserved_bytes for holder in holders)
        if now.free_bytes >= context + least:
            return None
        total = sum(self._held[holder].reserved_bytes for holder in holders)
        return DeviceMemoryError(
            rank, device=now.device, total_bytes=now.total_bytes, free_bytes=now.free_bytes,
            reason=f"{len(holders)} ranks stay on it with {gib(total)}, contexts, libraries and other programs take "
            f"{gib(self.beyond_bytes(now.device))}, and one more needs {gib(context + least)} or more",
        )  # fmt: skip


def gib(num_bytes: int) -> str:
    """A number of bytes in GiB, for messages."""
    return f"{num_bytes / (1 << 30):.2f} GiB"
