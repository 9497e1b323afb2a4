"""A recording is the same whatever the number of slots and the timing: structure, values, losses, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prismtrace import TraceReader

pytestmark = pytest.mark.timeout(240)

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"
STRUCTURE = (
    "kind", "phase", "step", "group_id", "seq", "op", "reduce_op", "dtype", "num_elements_in", "num_elements_out",
    "peer", "tag", "is_async", "awaits",
)  # fmt: skip


def test_two_recordings_with_different_slots_are_equal(bench: Any) -> None:
    arguments = ("--steps", "3", "--width", "64", "--layers", "3", "--batch", "8", "--precise")
    outputs = [bench.folder / f"slots{slots}.prism" for slots in (1, 3)]
    ended = [
        bench.run_shared("record", EXAMPLE, "--nproc-per-node", "4", "--slots", str(slots), "-o", str(output),
                         arguments=arguments)
        for slots, output in zip((1, 3), outputs, strict=True)
    ]  # fmt: skip
    assert [end.code for end in ended] == [0, 0], ended
    assert ended[0].out == ended[1].out and ended[0].out.count("loss") == 3
    with TraceReader(outputs[0]) as one, TraceReader(outputs[1]) as three:
        assert one.ranks == three.ranks == (0, 1, 2, 3)
        assert one.groups == three.groups
        for rank in one.ranks:
            left, right = one.units(rank), three.units(rank)
            # whether the host computed for a measurable time between two calls is a matter of timing, the calls are not
            for name in STRUCTURE:
                np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=f"rank {rank}: {name}")
            digests = [[(t.payload_in_at(i), t.payload_out_at(i)) for i in range(len(t))] for t in (left, right)]
            assert digests[0] == digests[1]
            assert any(digest for digest, _ in digests[0])
            np.testing.assert_array_equal(one.steps(rank).loss, three.steps(rank).loss)
            np.testing.assert_array_equal(one.scalars(rank).value, three.scalars(rank).value)
