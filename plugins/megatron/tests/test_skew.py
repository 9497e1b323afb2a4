"""What a skewed routing does to times: experts that are busy compute longer, and who waits for them waits longer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core", exc_type=ImportError)

import prismtrace
from prism_sdk.analysis import expert_loads
from prism_sdk.testing import Launches
from prismtrace import Op, UnitKind

JOB = Path(__file__).parent / "megatron_job.py"
# four experts on two ranks, wide enough for their products to be most of the step
WIDE = ["--ep", "2", "--moe", "--width", "128", "--expert-width", "2048", "--sequence", "256", "--microbatches", "2",
        "--steps", "4"]  # fmt: skip
WARM = 1  # steps that do not count
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Times:
    """Medians of one rank's forward passes, in ms."""

    experts: float
    """Between what is dispatched and what is combined."""
    combine: float
    """From the end of that until all that is combined has come."""


def times(trace: Path, rank: int) -> Times:
    experts, combine, before = [], [], None
    with prismtrace.TraceReader(trace) as reader:
        units = reader.units(rank)
        part = list(units.columns()["prism.part"])
        took = ((units.end_ns - units.start_ns) / 1e6).tolist()
        for row in range(len(units)):
            if units.step[row] < WARM or units.kind[row] == UnitKind.WAIT:
                continue
            if part[row] == "combine" and units.op[row] == Op.ALL_TO_ALL:
                combine.append(took[row])
            elif part[row] == "combine" and before is not None and part[before] == "forward":
                experts.append(took[before])
            before = row
    assert len(experts) == len(combine) > 0
    return Times(median(experts), median(combine))


def test_the_rank_with_most_tokens_computes_longest_and_the_other_waits(tmp_path: Path) -> None:
    """Bounds are wide: a laptop's speed changes by a third from one process to the next."""
    launches = Launches(tmp_path, plugin="prismtrace_megatron")
    recorded = launches.record(JOB, WIDE, num_ranks=2, options=["--device", "cpu", "--moe-skew", "1.5"])
    (load,) = expert_loads(recorded.trace)  # of the one layer
    # the logits of a router that has not learned yet differ little
    assert sum(load.tokens[:2]) > 20 * sum(load.tokens[2:])
    calibrated = launches.calibrate(recorded.trace, JOB, WIDE)
    busy, idle = (times(calibrated.trace, rank) for rank in (0, 1))
    assert busy.experts > 4 * idle.experts
    first, second = (
        times(launches.emulate(calibrated.trace, JOB, WIDE, sandbox=str(rank)).trace, rank) for rank in (0, 1)
    )
    assert first.experts > 4 * second.experts
    assert first.experts == pytest.approx(busy.experts, rel=0.6)
    # the one gets back what it sent at once, the other when the first has computed
    assert first.combine < busy.experts / 2 < second.combine < 2 * busy.experts
