"""Two bytes changed anywhere in a file: a named error or the same values, in bounded time and memory.

benchmarks/fuzz_trace.py does the same for as long as one likes.
"""

from __future__ import annotations

import collections
import random
from pathlib import Path

import pytest
from trace_faults import Hang, Memory, Outcome, corrupted, everything, limited, read_damaged, structure_bytes, write_big

import prismtrace

VECTORS = sorted((Path(prismtrace.__file__).resolve().parents[1] / "spec/conformance/valid").glob("*.prism"))
NUM_CORRUPTIONS = 3000


def campaign(path: Path, *, count: int, seed: int) -> collections.Counter[str]:
    raw, memory, rng = path.read_bytes(), Memory(), random.Random(seed)
    wanted, structure = everything(path), structure_bytes(raw)
    outcomes: collections.Counter[str] = collections.Counter()
    for number in range(count):
        result = read_damaged(corrupted(raw, structure, rng), wanted, memory)
        assert not result.outcome.is_fault, f"{path.name}, seed {seed}, corruption {number}: {result}"
        outcomes[result.detail or result.outcome.value] += 1
    return outcomes


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_two_bytes_of_a_vector(path: Path) -> None:
    outcomes = campaign(path, count=NUM_CORRUPTIONS * 2 // 3 // len(VECTORS), seed=1)
    assert outcomes["TraceChecksumError"] > outcomes["harmless"]


def test_two_bytes_of_a_bigger_file(tmp_path: Path) -> None:
    outcomes = campaign(write_big(tmp_path / "big.prism"), count=NUM_CORRUPTIONS // 3, seed=2)
    assert outcomes["TraceChecksumError"] > 10 * outcomes["harmless"]


def test_the_limits_would_notice() -> None:
    with pytest.raises(Hang), limited(0.05):
        while True:
            pass
    memory = Memory()
    block = b"\1" * (64 << 20)
    assert memory.growth() > len(block) // 2 or not Path("/proc/self/clear_refs").exists()
    assert Outcome.WRONG.is_fault and not Outcome.REFUSED.is_fault


def test_a_wrong_value_would_be_noticed(sample: Path) -> None:
    raw, wanted = sample.read_bytes(), everything(sample)
    wanted["metadata"]["job.status"] = "other"
    assert read_damaged(raw, wanted, Memory()).outcome is Outcome.WRONG
