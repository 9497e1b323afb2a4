"""The adapter for Megatron-Core: its three schedules, data parallelism, experts, optimizers and process groups.

Responsible for what Megatron calls things; tensor and sequence parallel collectives keep the purpose of their group.
"""

from __future__ import annotations

from collections.abc import Sequence

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, PatchingAdapter
from prismtrace_megatron import experts, schedules, states

__all__ = ["MegatronAdapter"]


class MegatronAdapter(PatchingAdapter):
    """Names microbatches, stages, chunks, layers, gradient synchronisation and the tokens of experts."""

    name = "megatron"
    description = "microbatches, stages, layers and experts of Megatron-Core"
    distribution = "megatron-core"

    def hooks(self) -> Sequence[AdapterHook]:
        """Every hook of the adapter."""
        return [*schedules.HOOKS.values(), *states.HOOKS.values(), *experts.HOOKS.values()]

    def around(self, namer: UnitNamer) -> Sequence[Around]:
        """What to do at the hooks."""
        return [
            *schedules.Schedules(namer).around(), *states.States(namer).around(), *experts.Experts(namer).around(),
        ]  # fmt: skip
