"""Puts numbers and nouns together for messages; it knows no other grammar."""

from __future__ import annotations

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


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`0,4-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
