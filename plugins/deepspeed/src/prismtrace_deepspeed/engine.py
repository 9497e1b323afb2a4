"""DeepSpeed's engine and ZeRO optimizers, outside of pipelines: microbatches are its micro steps.

With `engine.backward(loss)` the backward pass is a stretch; with `loss.backward()` no function spans it, and the
backward phase that torch itself tells gets the microbatch which the forward pass left behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, OfObjects

__all__ = ["HOOKS", "Engine"]

_ENGINE = "deepspeed.runtime.engine"
_MOST_LAYERS = 4  # that a name lists; ZeRO may gather many small ones at once
_PARAMETERS = "deepspeed.runtime.zero.partitioned_param_coordinator"

HOOKS = {
    "forward": AdapterHook(_ENGINE, "DeepSpeedEngine.forward"),
    "backward": AdapterHook(_ENGINE, "DeepSpeedEngine.backward"),
    "step": AdapterHook(_ENGINE, "DeepSpeedEngine._take_model_step"),
    "allreduce": AdapterHook(_ENGINE, "DeepSpeedEngine.allreduce_gradients"),
    "reduce12": AdapterHook("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer.reduce_ipg_grads"),
    "reduce3": AdapterHook(
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
    ),
    "gather": AdapterHook(
        _PARAMETERS, "PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params"
    ),
}


class Engine:
    """What the hooks do."""

    def __init__(self, namer: UnitNamer) -> None:
        self._namer = namer
        self._names: OfObjects[str] = OfObjects()  # parameter -> the module that has it
        self._known: OfObjects[bool] = OfObjects()
        self._said_at = -1  # backward passes before the microbatch that units are said to belong to

    def around(self) -> Sequence[Around]:
        """The table of hooks."""
        return [
            Around(HOOKS["forward"], before=self.forward),
            Around(HOOKS["backward"], before=self.backward),
            Around(HOOKS["step"], before=self.step),
            *(Around(HOOKS[name], before=self.reduce) for name in ("allreduce", "reduce12", "reduce3")),
            Around(HOOKS["gather"], before=self.gather),
        ]

    def forward(self, engine: Any, *_: Any, **__: Any) -> int | None:
        if engine not in self._known:
            self._learn(engine)
        torch = sys.modules["torch"]
        if self._namer.is_scheduled or torch._C._current_graph_task_id() != -1:  # the latter: recomputed
            return None
        backwards = self._namer.num_backward_passes
        if not torch.is_grad_enabled():
            if backwards != self._said_at:  # behind the backward pass of a microbatch: of none
                self._said_at = backwards
                self._namer.assume()
            return None
        self._said_at = backwards
        microbatch = engine.micro_steps % engine.gradient_accumulation_steps()
        self._namer.assume(microbatch=microbatch)
        return self._namer.enter("forward", microbatch=microbatch, part="forward")

    def backward(self, engine: Any, *_: Any, **__: Any) -> int | None:
        if self._namer.is_scheduled:
            return None
        microbatch = engine.micro_steps % engine.gradient_accumulation_steps()
        return self._namer.enter("backward", microbatch=microbatch, part="backward")

    def step(self, *_: Any, **__: Any) -> int:
        self._namer.assume()  # all microbatches are over
        return self._namer.enter("optimizer", part="optimizer")

    def reduce(self, *_: Any, **__: Any) -> int:
        return self._namer.enter("backward", part="grad_sync")

    def gather(self, _: Any, params: Iterable[Any], *__: Any, **___: Any) -> int | None:
        """Called with what is really gathered: for the module at work, and for those that come next."""
        names = dict.fromkeys(self._names.get(param) or "(unknown)" for param in params)
        if not names:
            return None
        layers = sorted(names)
        more = ",..." if len(layers) > _MOST_LAYERS else ""
        return self._namer.enter(part="param_gather", layer=",".join(layers[:_MOST_LAYERS]) + more)

    def _learn(self, engine: Any) -> None:
        self._known[engine] = True
        groups: list[Any] = [getattr(engine, "data_parallel_group", None)]
        for name, parameter in engine.module.named_parameters():
            self._names[parameter] = name.rpartition(".")[0] or "(root)"
            groups.append(getattr(parameter, "ds_process_group", None))  # over which ZeRO-3 shards it
        names = {str(group.group_name): "dp" for group in groups if hasattr(group, "group_name")}
        self._namer.purposes(names)
        if hasattr(groups[0], "rank"):
            self._namer.coordinates({"dp": int(groups[0].rank())})
