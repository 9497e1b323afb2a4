"""How large a library's own collective over a reduced communicator must be to carry what the full one carries.

Responsible for sizes; who holds what in it is prism_sdk.runtime.reduced's. The other way to prune, a schedule played
message by message, is in ``programs`` and ``closing``.

The k sandbox members of a group and one assistant for all virtual members run the library's ring among m = k + 1 ranks.
A ring of n ranks has each send 2B(n-1)/n of an all-reduce of B, and (n-1)b of an all-gather or reduce-scatter of parts
of b (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). The reduced
call gets a buffer of B' with 2B'(m-1)/m = 2B(n-1)/n, or parts of b' with (m-1)b' = (n-1)b. Both are no smaller than
what the call must hold, since n >= m, so the program's own values travel in front and what is behind them only weighs.
Other operations carry the same in a small group.
"""

from __future__ import annotations

from fractions import Fraction

from prismtrace import Op

__all__ = ["reduced_size", "ring_sends", "scaled_count"]


def reduced_size(size: int, num_sandbox: int) -> int:
    """Ranks of the reduced communicator of a group of `size`: the sandbox members, and the assistant if it is needed.

    Raises:
        ValueError: a group has no sandbox member, or fewer members than that.
    """
    if not 0 < num_sandbox <= size:
        raise ValueError(f"{num_sandbox} sandbox members in a group of {size}")
    return min(num_sandbox + 1, size)


def ring_sends(op: Op, size: int, count: int | Fraction) -> Fraction:
    """Elements that each rank of a ring of `size` sends: `count` is the buffer's (all-reduce) or one rank's part."""
    if op is Op.ALL_REDUCE:
        return 2 * Fraction(count) * (size - 1) / size
    if op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
        return Fraction(count) * (size - 1)
    raise ValueError(f"{op.name.lower()} is no ring of equal parts")


def scaled_count(op: Op, *, size: int, num_sandbox: int, count: int | Fraction) -> int:
    """Elements of the reduced call (rounded up) that has each sandbox rank send what it does in the full one.

    Args:
        op: ALL_REDUCE, ALL_GATHER or REDUCE_SCATTER.
        size: members of the whole group.
        num_sandbox: how many of them are sandbox ranks.
        count: elements of the full call, as for `ring_sends`; of unequal parts their average.

    Raises:
        ValueError: another operation, or a group without sandbox ranks.
    """
    reduced = reduced_size(size, num_sandbox)
    if reduced == size:
        return -(-Fraction(count) // 1)
    return -(-ring_sends(op, size, count) / ring_sends(op, reduced, 1) // 1)
