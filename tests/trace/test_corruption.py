"""Two bytes changed anywhere in a file: a named error or the same values, in bounded time and memory.

benchmarks/fuzz_trace.py does the same for as long as one likes.
"""

from __future__ import annotations

import collections
import mmap
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from trace_edits import STREAM_FIELDS, take_apart
from trace_faults import (
    Hang,
    Memory,
    Outcome,
    corrupted,
    everything,
    limited,
    read_damaged,
    structure_bytes,
    write_big,
    write_roles,
)

import prismtrace
from prismtrace._generated.schema import Encoding, StreamPart

FOLDER = Path(prismtrace.__file__).resolve().parents[1] / "spec/conformance/valid"
VECTORS = [
    path.with_suffix(".prism") for path in sorted(FOLDER.glob("*.json"))
]  # the one of 8,192 ranks takes its time
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


@pytest.mark.parametrize("write", [write_big, write_roles])
def test_two_bytes_of_a_bigger_file(write: Callable[[Path], Path], tmp_path: Path) -> None:
    outcomes = campaign(write(tmp_path / "big.prism"), count=NUM_CORRUPTIONS // 6, seed=2)
    assert outcomes["TraceChecksumError"] > 10 * outcomes["harmless"]


def test_the_file_of_roles_uses_what_roles_have(tmp_path: Path) -> None:
    parts, encodings = set(), set()
    for record in take_apart(write_roles(tmp_path / "roles.prism").read_bytes()):
        for place in record.streams:
            parts.add(record.meta[place + STREAM_FIELDS["part"][0]])
            encodings.add(record.meta[place + STREAM_FIELDS["encoding"][0]])
    assert {StreamPart.SHIFT, StreamPart.MAP} <= parts
    assert Encoding.ROLE_DIFFERENCE in encodings


def test_the_limits_would_notice() -> None:
    with pytest.raises(Hang), limited(0.05):
        while True:
            pass
    memory = Memory()
    block = mmap.mmap(-1, 64 << 20)  # not from what the allocator has kept of earlier tests
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    assert memory.growth() > len(block) // 2 or not Path("/proc/self/clear_refs").exists()
    assert Outcome.WRONG.is_fault and not Outcome.REFUSED.is_fault


def test_a_wrong_value_would_be_noticed(sample: Path) -> None:
    raw, wanted = sample.read_bytes(), everything(sample)
    wanted["metadata"]["job.status"] = "other"
    assert read_damaged(raw, wanted, Memory()).outcome is Outcome.WRONG
