"""Says how many elements of an operation are a rank's where its group has another number of members.

It knows no trace and changes no times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from prismtrace import DType, Op

__all__ = ["shared_anew"]

Int64Array = npt.NDArray[np.int64]
_FLOATING = np.array([one for one in DType if one.name.startswith(("FLOAT", "BFLOAT", "COMPLEX"))])


def shared_anew(
    op: npt.NDArray[Any], dtype: npt.NDArray[Any], given: Int64Array, got: Int64Array, *, before: int, after: int
) -> tuple[Int64Array, Int64Array]:
    """What ranks contribute and receive in groups of ``after`` in place of ``before`` members.

    What a rank contributes to an all-gather of floating-point numbers and receives from a reduce-scatter shrinks, as
    shards do; of other all-gathers, of gathers and scatters it is the whole that grows. Absent counts stay absent.
    """
    given, got, has_got = given.copy(), got.copy(), got >= 0
    gathers, scatters = (op == Op.ALL_GATHER) & (given >= 0), (op == Op.REDUCE_SCATTER) & (given >= 0)
    is_shard = np.isin(dtype, _FLOATING)
    shards = gathers & is_shard
    given[shards] = -(-np.where(has_got, got, given * before)[shards] // after)
    got[gathers & has_got] = given[gathers & has_got] * after
    part = -(-given[scatters] // after)
    given[scatters] = part * after
    got[scatters] = np.where(has_got[scatters], part, got[scatters])
    for counts, roots in ((got, op == Op.GATHER), (given, op == Op.SCATTER)):
        roots = roots & (counts >= 0)
        counts[roots] = counts[roots] // before * after
    return given, got
