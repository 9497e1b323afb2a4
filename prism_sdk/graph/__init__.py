"""Calculates with the execution graph of a job: matching, timelines, boundary plans, calibration, comparison.

It runs no program and needs no torch: numpy columns in, frozen results out.

A map for newcomers, in the order of dependence:

    errors, statistics   what can be wrong with a graph; means and intervals
    job, matching        JobGraph: columns of all ranks, communication joined into events
    timing               schedule(): when every unit starts and ends (the timing model is written there)
    turns, rounds        after how many steps the same kind of step comes again: by times, and by what steps do
    plan, contract       BoundaryPlan: when virtual ranks arrive, without running them
                         (contract() is not exported here: it would hide its module)
    shares               shared_anew(): what is a rank's in a group of another size
    folding              folded_graph(): of a large job the ranks that differ, for the plan of a sandbox
    calibrate            merge_slices(): weights from measured slices into a bare graph
    unlike               first_difference(): how such a slice differs from the graph
    prediction           predict_step_time(): what variation adds, and an interval
    compare, report      compare_traces(): real runs beside other runs
"""

from prism_sdk.graph.calibrate import (
    Calibration,
    Measurement,
    measure,
    merge_slices,
    relative_change,
    step_time_ns,
)
from prism_sdk.graph.compare import Comparison, compare_traces
from prism_sdk.graph.errors import (
    BareGraphError,
    GraphDeadlockError,
    GraphError,
    InconsistentUnitError,
    MissingTimingError,
    UnmatchedUnitError,
)
from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.plan import START, BoundaryPlan, Stream, Term, evaluate
from prism_sdk.graph.prediction import Prediction, predict_step_time
from prism_sdk.graph.statistics import Interval, bootstrap_interval
from prism_sdk.graph.timing import Schedule, Timing, schedule

__all__ = [
    "BareGraphError",
    "BoundaryPlan",
    "Calibration",
    "Comparison",
    "GraphDeadlockError",
    "GraphError",
    "InconsistentUnitError",
    "Interval",
    "JobGraph",
    "Measurement",
    "MissingTimingError",
    "Prediction",
    "START",
    "Schedule",
    "Stream",
    "Term",
    "Timing",
    "UnmatchedUnitError",
    "bootstrap_interval",
    "compare_traces",
    "evaluate",
    "measure",
    "merge_slices",
    "predict_step_time",
    "relative_change",
    "schedule",
    "step_time_ns",
]
