"""DeepSpeed's pipeline engine: one stretch for each instruction of its schedule. It plans nothing.

Instructions name buffers, which are used again and again; but each kind of instruction goes through the microbatches in
order, so that counting tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, OfObjects, ScheduleParts

__all__ = ["HOOKS", "SCHEDULE", "Pipeline"]

_ENGINE = "deepspeed.runtime.pipe.engine"
# instruction -> phase and part
_INSTRUCTIONS = {
    "LoadMicroBatch": ("forward", None),
    "ForwardPass": ("forward", "forward"),
    "BackwardPass": ("backward", "backward"),
    "SendActivation": ("forward", None),
    "RecvActivation": ("forward", None),
    "SendGrad": ("backward", None),
    "RecvGrad": ("backward", None),
    "ReduceGrads": ("backward", "grad_sync"),
    "ReduceTiedGrads": ("backward", "grad_sync"),
    "OptimizerStep": ("optimizer", "optimizer"),
}
_WHOLE_STEP = frozenset({"ReduceGrads", "ReduceTiedGrads", "OptimizerStep"})

HOOKS = {name: AdapterHook(_ENGINE, f"PipelineEngine._INSTRUCTION_MAP[{name}]") for name in _INSTRUCTIONS}
SCHEDULE = AdapterHook(_ENGINE, "PipelineEngine._exec_schedule")


class Pipeline:
    """What the hooks do."""

    def __init__(self, namer: UnitNamer) -> None:
        self._namer = namer
        self._parts = ScheduleParts()
        self._count: Counter[str] = Counter()
        self._known: OfObjects[bool] = OfObjects()

    def around(self) -> Sequence[Around]:
        """The table of hooks."""
        return [
            Around(SCHEDULE, before=self.begin),
            *(Around(hook, before=self._instruction(name)) for name, hook in HOOKS.items()),
        ]

    def begin(self, engine: Any, pipe_schedule: Any, *_: Any, **__: Any) -> int:
        """Called with the schedule of a whole step."""
        self._parts.begin(num_forwards=pipe_schedule.micro_batches)
        self._count.clear()
        if engine not in self._known:
            self._known[engine] = True
            self._learn(engine.grid)
        return self._namer.enter()

    def _instruction(self, name: str) -> Callable[..., int]:
        phase, part = _INSTRUCTIONS[name]
        schedule = {"ForwardPass": self._parts.forward, "BackwardPass": self._parts.backward}.get(name)

        def before(engine: Any, *_: Any, **__: Any) -> int:
            microbatch = None
            if name not in _WHOLE_STEP:
                microbatch = self._count[name]
                self._count[name] += 1
            return self._namer.enter(
                phase, microbatch=microbatch, stage=engine.stage_id, part=part, label=name,
                schedule=None if schedule is None else schedule(),
            )  # fmt: skip

        return before

    def _learn(self, grid: Any) -> None:
        self._namer.coordinates(
            {
                "pp": grid.get_pipe_parallel_rank(), "dp": grid.get_data_parallel_rank(),
                "tp": max(grid.get_slice_parallel_rank(), 0),
            }
        )  # fmt: skip
        groups = {
            "tp_pp": grid.get_model_parallel_group(), "dp": grid.get_data_parallel_group(),
            "tp": grid.get_slice_parallel_group(), "pp": grid.get_pipe_parallel_group(),
        }  # fmt: skip
        names = {str(group.group_name): purpose for purpose, group in groups.items() if hasattr(group, "group_name")}
        self._namer.purposes(names)
