"""Takes the transfers of a job from a run of it that was observed elsewhere.

Only communications are compared: how a run computes and waits between them may differ from how it was recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.calibrate import COUNTS, STRUCTURE, Segment, measure, segments_of
from prism_sdk.graph.errors import GraphError
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.statistics import mean_known
from prismtrace import ABSENT

__all__ = ["observed_transfers"]

Int64Array = npt.NDArray[np.int64]
Key = tuple[int, bytes]


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
    for segment, rows, keys in _communications(observed):
        for key in keys:
            samples.setdefault(key, []).append((segment.step < first + warmup_steps, transfer[rows]))

    found = np.full(len(graph), ABSENT, dtype=np.int64)
    by_place: dict[tuple[int, int], tuple[Key, Key]] = {}
    begins = dict(zip(graph.ranks, graph.offsets.tolist(), strict=False))
    segments = _communications(graph)
    for segment, _, keys in segments:
        by_place[segment.rank, segment.begin - begins[segment.rank]] = keys
    is_shown = False
    for segment, rows, keys in segments:
        other = (stands_for or {}).get(segment.rank, segment.rank)
        keys = by_place.get((other, segment.begin - begins[segment.rank]), keys)
        measured = next((samples[key] for key in keys if key in samples), None)
        if measured is not None and len(rows):
            is_shown = True
            usable = [values for is_warm, values in measured if not is_warm] or [values for _, values in measured]
            found[rows] = mean_known(np.stack(usable))
    if not is_shown and any(len(rows) for _, rows, _ in segments):
        raise GraphError(f"{observed.source}: no step of it has the communications of a step of {graph.source}",
                         hint="observe the same script with the same arguments and as many ranks")  # fmt: skip
    return found


def _communications(graph: JobGraph) -> list[tuple[Segment, Int64Array, tuple[Key, Key]]]:
    """For each step of each rank its rows of communication, and their keys with sizes and without."""
    plain = np.stack([graph.columns[name].astype(np.int64) for name in STRUCTURE], axis=1)
    counts = np.stack([graph.columns[name] for name in COUNTS], axis=1)
    found = []
    for segment in segments_of(graph):
        rows = segment.begin + np.flatnonzero(graph.event_of_row[segment.begin : segment.end] >= 0)
        digest = hashlib.blake2b(plain[rows].tobytes(), digest_size=16)
        without = digest.digest()
        digest.update(counts[rows].tobytes())
        found.append((segment, rows, ((segment.rank, digest.digest()), (segment.rank, without))))
    return found
