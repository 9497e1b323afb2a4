"""Takes the transfers of a job from a run of it that was observed elsewhere.

Only communications are compared: how a run computes and waits between them may differ from how it was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.calibrate import Key, communications_of, measure, structures_of
from prism_sdk.graph.errors import GraphError
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.statistics import mean_known
from prismtrace import ABSENT

__all__ = ["observed_transfers"]

Int64Array = npt.NDArray[np.int64]


def observed_transfers(
    graph: JobGraph, observed: JobGraph, *, warmup_steps: int = 1, stands_for: Mapping[int, int] | None = None
) -> Int64Array:
    """(rows,) the mean transfer of each communication in ns; ABSENT where the observed run shows none.

    A step is found by its communications in their order, with their sizes, or without where no step has the same ones.

    Args:
        graph: the recorded job.
        observed: the run.
        warmup_steps: how many of its first steps count only where no other is alike.
        stands_for: by rank the one that was recorded in its place.

    Raises:
        GraphError: no step of the observed run has the communications of one of the recording's.
    """
    samples: dict[Key, list[tuple[bool, Int64Array]]] = {}
    transfer = measure(observed).transfer_ns
    first = int(observed.columns["step"].min()) if len(observed) else 0
    for segment, keys in structures_of(observed, of_communications=True).items():
        rows = communications_of(observed, segment)
        for key in keys:
            samples.setdefault(key, []).append((segment.step < first + warmup_steps, transfer[rows]))

    found = np.full(len(graph), ABSENT, dtype=np.int64)
    is_shown = False
    for segment, keys in structures_of(graph, stands_for=stands_for, of_communications=True).items():
        rows = communications_of(graph, segment)
        measured = next((samples[key] for key in keys if key in samples), None)
        if measured is not None and len(rows):
            is_shown = True
            usable = [values for is_warm, values in measured if not is_warm] or [values for _, values in measured]
            found[rows] = mean_known(np.stack(usable))
    if not is_shown and (graph.event_of_row >= 0).any():
        raise GraphError(f"{observed.source}: no step of it has the communications of a step of {graph.source}",
                         hint="observe the same script with the same arguments and as many ranks")  # fmt: skip
    return found
