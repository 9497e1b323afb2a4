"""Puts numbers and nouns, and lists of ranks, into words for messages; it knows no other grammar.

A module of its own, and not that of `prismtrace`: commands print their help without loading the library.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted", "ranks_text"]


def counted(number: int, noun: str, plural: str | None = None, *, separator: str = "") -> str:
    """``1 rank``, ``2 ranks``; ``separator`` goes between thousands.

    Args:
        number: how many.
        noun: the word for one of them.
        plural: the word for several, where it is not ``noun`` and an s.
        separator: ``","`` or nothing.
    """
    word = noun if number == 1 else (plural or f"{noun}s")
    return f"{number:{separator}} {word}"


def ranks_text(ranks: Sequence[int], *, limit: int = 40) -> str:
    """``0-3,8``: runs of consecutive ranks in the order given, cut off after ``limit`` characters."""
    parts: list[tuple[int, int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], rank)
        else:
            parts.append((rank, rank))
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
