"""Says where the time and memory of a traced job went, and why two traces differ. It runs and predicts nothing.

numpy only; every result is a frozen dataclass, and the docstring of its module gives the definition of each figure and
its source. ``docs/analysis.md`` shows how to use it.

    job          load_job(): columns of all ranks, steps, arrivals and completions; what all others start from
    folded       the same of jobs whose ranks are alike: one rank of each class
    spans        exact arithmetic on stretches of time
    breakdown    the parts of a step: they add up to it
    bandwidth    algbw and busbw by group, operation and size
    pipeline     the bubble of each stage beside its formula
    times        when all units were, measured or calculated
    critical     the critical path across ranks
    slack        how much later all else could have been
    stragglers   who makes others wait, and the cause
    balance      how evenly all-to-alls and routers load experts
    layers       what each layer or FSDP unit costs
    memory       high waters, and what is held at the peak
    variation    within a run, and from run to run
    frames       results as tables in notebooks and as data frames
    difference   explain(): two traces, part by part
    overview     analyze(): all of it;  text  as tables
"""

from prism_sdk.analysis.balance import ExpertLoad, GroupBalance, expert_loads, moe_balance
from prism_sdk.analysis.bandwidth import Bandwidth, bandwidths, bus_factor
from prism_sdk.analysis.breakdown import PARTS, Breakdown, breakdown_of
from prism_sdk.analysis.critical import CriticalPath, PathSegment, critical_path
from prism_sdk.analysis.difference import Contribution, Explanation, explain
from prism_sdk.analysis.job import Job, StepWindows, load_job
from prism_sdk.analysis.layers import LayerCost, layer_costs
from prism_sdk.analysis.memory import RankMemory, memory_of
from prism_sdk.analysis.overview import Analysis, analyze
from prism_sdk.analysis.pipeline import Pipeline, StageBubble, pipeline_of
from prism_sdk.analysis.slack import slack_ns
from prism_sdk.analysis.stragglers import RankDelay, Stragglers, stragglers_of
from prism_sdk.analysis.times import Times
from prism_sdk.analysis.variation import RunVariation, Variation, variation_of

__all__ = [
    "Analysis",
    "Bandwidth",
    "Breakdown",
    "Contribution",
    "CriticalPath",
    "ExpertLoad",
    "Explanation",
    "GroupBalance",
    "Job",
    "LayerCost",
    "PARTS",
    "PathSegment",
    "Pipeline",
    "RankDelay",
    "RankMemory",
    "RunVariation",
    "StageBubble",
    "StepWindows",
    "Stragglers",
    "Times",
    "Variation",
    "analyze",
    "bandwidths",
    "breakdown_of",
    "bus_factor",
    "critical_path",
    "expert_loads",
    "explain",
    "layer_costs",
    "load_job",
    "memory_of",
    "moe_balance",
    "pipeline_of",
    "slack_ns",
    "stragglers_of",
    "variation_of",
]
