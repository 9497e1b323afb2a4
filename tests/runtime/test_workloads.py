"""The example scripts under ``record``: losses as under plain gloo, and the same bits whatever the number of slots."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prismtrace import TraceReader

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 2e-4  # gloo sums in another order
CASES = [
    ("train_ddp.py", 2, ("--width", "64", "--layers", "2", "--batch", "16")),
    ("train_ddp.py", 4, ("--width", "64", "--layers", "2", "--batch", "16")),
    ("train_fsdp2_gpt.py", 4, ("--width", "64", "--layers", "2", "--batch", "2", "--context", "32")),
    ("train_pipeline_1f1b.py", 4, ("--width", "64", "--layers", "1", "--context", "16", "--microbatches", "4")),
    ("train_qwen3moe_fsdp2.py", 2, ("--width", "64", "--layers", "2", "--batch", "1", "--context", "32")),
]

pytestmark = [pytest.mark.slow]


def losses(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step \d+ loss (\S+)$", text, re.MULTILINE)]


@pytest.mark.parametrize(("script", "num_ranks", "model"), CASES, ids=[f"{c[0][6:-3]}-{c[1]}" for c in CASES])
def test_recorded_losses(bench, tmp_path, script, num_ranks, model):  # type: ignore[no-untyped-def]
    if "qwen" in script:
        pytest.importorskip("transformers")
    words = (str(EXAMPLES / script), *model, "--steps", "3", "--precise")
    ranks = ("--nproc-per-node", str(num_ranks), "-q")
    reference = bench.run_shared("observe", words[0], *ranks, arguments=words[1:])  # runs on gloo itself
    assert reference.code == 0, reference.err
    wanted = losses(reference.out)
    assert len(wanted) == 3, reference.out

    found = {}
    for num_slots in (1, 2):
        output = tmp_path / f"{num_slots}.prism"
        options = (*ranks, "--slots", str(num_slots), "-o", str(output))
        ended = bench.run_shared("record", words[0], *options, arguments=words[1:])
        assert ended.code == 0, ended.err
        found[num_slots] = losses(ended.out)
        with TraceReader(output) as trace:
            assert len(trace.steps(0)) == 3
    assert found[1] == found[2]
    assert found[1] == pytest.approx(wanted, abs=TOLERANCE, rel=TOLERANCE)
