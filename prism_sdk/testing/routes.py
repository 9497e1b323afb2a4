"""One job on its whole way, observed, recorded, calibrated and emulated, for tests of adapters that share it.

It judges no times: a calibration is one pass, enough to see that ranks follow the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prism_sdk.testing.launches import Launched, Launches, losses
from prism_sdk.testing.orders import unit_order
from prismtrace import TraceReader

__all__ = ["Route", "run_route"]


@dataclass(frozen=True)
class Route:
    """What each verb wrote; `sandbox` are the ranks that were emulated, all others were virtual."""

    observed: Launched
    recorded: Launched
    calibrated: Launched
    emulated: Launched
    sandbox: tuple[int, ...]

    def check_names(self) -> None:
        """Every rank has the same named units, in the same order, observed and recorded, and no name is missing."""
        with TraceReader(self.observed.trace) as observed, TraceReader(self.recorded.trace) as recorded:
            assert tuple(observed.ranks) == tuple(recorded.ranks)
            for rank in recorded.ranks:
                before, after = (_texts(one, rank) for one in (observed, recorded))
                assert before == after != [], f"rank {rank} has other names observed"
                for one in (observed, recorded):
                    assert one.metadata[f"rank.{rank}.fidelity"] == "full", one.metadata[
                        f"rank.{rank}.fidelity_reasons"
                    ]

    def check_emulation(self) -> None:
        """The emulated ranks print the recorded losses and have the units of the graph."""
        assert losses(self.emulated.out) == losses(self.recorded.out) != []
        with TraceReader(self.calibrated.trace) as graph, TraceReader(self.emulated.trace) as emulated:
            assert tuple(emulated.ranks) == self.sandbox
            for rank in self.sandbox:
                assert _texts(emulated, rank) == _texts(graph, rank), f"rank {rank} has other names emulated"
                assert emulated.metadata[f"rank.{rank}.fidelity"] == "full"


def run_route(
    launches: Launches, script: Path | str, arguments: Sequence[str] = (), *, sandbox: Sequence[int],
    num_ranks: int = 4, options: Sequence[str] = (),
) -> Route:  # fmt: skip
    """Observe, record on two slots, calibrate in slices of two ranks and emulate.

    Args:
        launches: where and how.
        script: a path, or a module given as text. The losses that it prints must come from ranks of the sandbox.
        arguments: those of the script.
        sandbox: ranks to emulate together, best one of each role, such as the first rank of each stage.
        num_ranks: of the job.
        options: of `prism observe` and `prism record`, such as ``--device cpu``.
    """
    size = ["--nproc-per-node", str(num_ranks)]
    observed = launches.must("observe", script, arguments, options=[*size, *options])
    recorded = launches.record(script, arguments, num_ranks=num_ranks, options=options)
    calibrated = launches.calibrate(recorded.trace, script, arguments, transfers=observed.trace)
    ranks = ",".join(map(str, sandbox))
    emulated = launches.emulate(calibrated.trace, script, arguments, sandbox=ranks)
    return Route(observed, recorded, calibrated, emulated, tuple(sandbox))


def _texts(reader: TraceReader, rank: int) -> list[str]:
    return [str(one) for one in unit_order(reader, rank)]
