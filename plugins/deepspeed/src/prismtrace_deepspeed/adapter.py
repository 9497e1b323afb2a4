"""The adapter for DeepSpeed: its engine with either style of backward pass, ZeRO 0 to 3, and its pipeline engine.

Responsible for what DeepSpeed calls things; which parameters travel when is ZeRO's own business.
"""

from __future__ import annotations

from collections.abc import Sequence

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, PatchingAdapter
from prismtrace_deepspeed import engine, pipeline

__all__ = ["DeepSpeedAdapter"]


class DeepSpeedAdapter(PatchingAdapter):
    """Names microbatches, stages, instructions of the pipeline, parameter gathers and gradient synchronisation."""

    name = "deepspeed"
    description = "microbatches, stages, ZeRO parameters and gradients of DeepSpeed"
    distribution = "deepspeed"

    def hooks(self) -> Sequence[AdapterHook]:
        """Every hook of the adapter."""
        return [*engine.HOOKS.values(), *pipeline.HOOKS.values(), pipeline.SCHEDULE]

    def around(self, namer: UnitNamer) -> Sequence[Around]:
        """What to do at the hooks."""
        return [*engine.Engine(namer).around(), *pipeline.Pipeline(namer).around()]
