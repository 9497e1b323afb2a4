"""The Hugging Face Trainer on FSDP2, which it only shards with where it sees GPUs, against plain data parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import prismtrace
from prism_sdk.testing import Launches, losses, run_plain, unit_order

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_hf_trainer.py"
MICROBATCHES = 2


@pytest.mark.slow
def test_a_trainers_steps_are_named_and_its_losses_those_without_prism(tmp_path: Path) -> None:
    launches = Launches(tmp_path, plugin="prismtrace_fsdp")
    recorded = launches.record(EXAMPLE, ["--shard", "fsdp2"], num_ranks=2, options=["--device", "cpu"])
    modules = ["transformers.trainer", "transformers.models.qwen3_moe"]
    plain = losses(run_plain(EXAMPLE, ["--shard", "ddp"], num_ranks=2, device="cpu", modules=modules))
    assert len(plain) == 2 and losses(recorded.out) == pytest.approx(plain, rel=1e-6)
    with prismtrace.TraceReader(recorded.trace) as reader:
        for rank in (0, 1):
            assert reader.metadata[f"rank.{rank}.fidelity"] == "full"
            order = unit_order(reader, rank, step=1)
            assert {unit.microbatch for unit in order if unit.phase == "forward"} == set(range(MICROBATCHES))
            gathered = {unit.layer for unit in order if unit.op == "all_gather"}
            assert {"model.layers.0", "model.layers.1"} <= gathered
            routed = reader.units(rank).columns()["moe.tokens_per_expert"]
            assert sum(one is not None for one in routed) == 2 * 2 * MICROBATCHES  # layers, steps
