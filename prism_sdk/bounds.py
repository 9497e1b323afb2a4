"""Bounds that several parts of Prism hold to; it checks nothing."""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_RANKS"]

MAX_RANKS: Final = 1 << 20
"""Ranks of the largest job: beyond, a typing error is likelier than a job, and tables of ranks fill the memory."""
