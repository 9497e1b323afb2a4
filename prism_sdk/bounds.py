"""Bounds that several parts of Prism hold to; it checks nothing."""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_BYTES", "MAX_QUANTITY", "MAX_RANKS", "MAX_TIME_NS"]

MAX_RANKS: Final = 1 << 20
"""Ranks of the largest job: beyond, a typing error is likelier than a job, and tables of ranks fill the memory."""

MAX_BYTES: Final = 1 << 60
"""Bytes of the largest transfer: sums of many of them stay within 64 bits where times of them do."""

MAX_QUANTITY: Final = 1e12
"""The largest figure of a cluster profile, in its unit (GB/s, us, percent): nothing that is measured is near it."""

MAX_TIME_NS: Final = 1 << 62
"""The latest time, 146 years: differences of two times, and their sums with a duration, stay within 64 bits."""
