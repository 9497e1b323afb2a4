"""Puts numbers and nouns together for messages; it knows no other grammar."""

from __future__ import annotations

__all__ = ["counted"]


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
