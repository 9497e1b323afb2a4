"""Host memory through which values of a GPU go when they are recorded.

Responsible for one piece of pinned memory a thread, used again and again: memory that is new each time is cleared by
the system first, and copies from a GPU into memory that is not pinned go by way of the driver's own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

_BYTES = 8 << 20
_local = threading.local()


def room() -> torch.Tensor:
    """The thread's own piece, as bytes."""
    piece: torch.Tensor | None = getattr(_local, "piece", None)
    if piece is None:
        is_pinned = torch.cuda.is_available()
        with torch.inference_mode(mode=False):  # of use in and out of the program's own
            piece = _local.piece = torch.empty(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    return piece


def staged(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a flat tensor piece by piece; each piece is gone when the next one is asked for."""
    for part in flat_bytes(flat).split(_BYTES):
        piece = room()[: part.numel()]
        piece.copy_(part)
        yield piece


def unstaged(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces to be filled in turn, each with its offset; one goes to the tensor when the next is asked for."""
    offset = 0
    for part in flat_bytes(flat).split(_BYTES):
        piece = room()[: part.numel()]
        yield offset, piece
        with torch.inference_mode():  # as tensors.py does
            part.copy_(piece)
        offset += part.numel()


def can_stage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, with its values one after the other."""
    return (
        tensor.device.type == "cuda" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        and tensor.numel() > 0
    )  # fmt: skip


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a view."""
    # a tensor of one element is contiguous whatever its stride, which `view(dtype)` would mind
    return tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
