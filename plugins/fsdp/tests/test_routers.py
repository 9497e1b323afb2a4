"""The adapter of routers on a small Qwen3-MoE of transformers, sharded by FSDP2; and its contract."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from prismtrace_fsdp.routers import RoutersAdapter

import prismtrace
from prism_sdk.abc import FrameworkAdapter
from prism_sdk.analysis import expert_loads
from prism_sdk.testing import FrameworkAdapterContract, Launched, Launches

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_qwen3moe_fsdp2.py"
LAYERS, EXPERTS, BATCH, CONTEXT, STEPS, NUM_RANKS = 2, 4, 1, 16, 2, 2


class TestContract(FrameworkAdapterContract):
    def make_adapter(self) -> FrameworkAdapter:
        return RoutersAdapter()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    launches = Launches(tmp_path_factory.mktemp("routers"), plugin="prismtrace_fsdp")
    sizes = {"width": 32, "layers": LAYERS, "experts": EXPERTS, "batch": BATCH, "context": CONTEXT, "steps": STEPS}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    return launches.record(EXAMPLE, words, num_ranks=NUM_RANKS)


def test_every_token_is_counted_at_its_two_experts(recorded: Launched) -> None:
    with prismtrace.TraceReader(recorded.trace) as reader:
        for rank in range(NUM_RANKS):
            columns = reader.units(rank).columns()
            labels, counts, layers = (columns[name] for name in ("label", "moe.tokens_per_expert", "prism.layer"))
            rows = [row for row, one in enumerate(counts) if one is not None]
            in_order = [f"model.layers.{layer}" for layer in range(LAYERS)]
            assert [layers[row] for row in rows] == in_order * STEPS  # backward passes route nothing
            assert {labels[row - 1] for row in rows} == {"routing"}
            assert all(len(counts[row]) == EXPERTS and sum(counts[row]) == 2 * BATCH * CONTEXT for row in rows)
            assert len({tuple(counts[row]) for row in rows}) > 1
            assert reader.metadata[f"rank.{rank}.fidelity"] == "full"


def test_the_analysis_has_the_loads_of_each_layer(recorded: Launched) -> None:
    loads = {load.layer: load for load in expert_loads(recorded.trace)}
    assert sorted(loads, key=str) == [f"model.layers.{layer}" for layer in range(LAYERS)]
    for load in loads.values():
        assert sum(load.tokens) == 2 * BATCH * CONTEXT * STEPS * NUM_RANKS
