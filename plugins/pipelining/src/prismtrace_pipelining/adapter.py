"""The adapter for torch.distributed.pipelining: every schedule, single and multi stage, also with split backwards.

Responsible for what a schedule calls its stages, microbatches and messages; it does not know the schedules themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, PatchingAdapter, ScheduleParts

__all__ = ["PipeliningAdapter"]

_STAGE = "torch.distributed.pipelining.stage"
_SCHEDULES = "torch.distributed.pipelining.schedules"


def _stage(attribute: str, *, required: bool = True) -> AdapterHook:
    return AdapterHook(_STAGE, f"_PipelineStageBase.{attribute}", required=required)


_FORWARD = _stage("forward_one_chunk")
_BACKWARD = _stage("backward_one_chunk")
_WEIGHTS = _stage("backward_weight_one_chunk")
_REDUCE = AdapterHook(_STAGE, "_PipelineStageBase.perform_reduce_grad", required=False, min_version="2.10")
_MESSAGES = {  # hook -> phase, and what is sent
    _stage("get_fwd_recv_ops"): ("forward", "recv activation"),
    _stage("get_fwd_send_ops"): ("forward", "send activation"),
    _stage("get_bwd_recv_ops"): ("backward", "recv gradient"),
    _stage("get_bwd_send_ops"): ("backward", "send gradient"),
}
_BATCH = AdapterHook(_SCHEDULES, "_batch_p2p")
_LOSS = AdapterHook(_SCHEDULES, "_PipelineSchedule._maybe_compute_loss", required=False)
_SHAPES = tuple(
    AdapterHook(_STAGE, f"{stage}._prepare_{what}_infra", required=False)
    for stage in ("PipelineStage", "_PipelineStage")
    for what in ("forward", "backward")
)
_STEPS = (
    AdapterHook(_SCHEDULES, "PipelineScheduleSingle._initialize_stage"),
    AdapterHook(_SCHEDULES, "PipelineScheduleMulti._initialize_stages"),
)
_ORDER = "_prism_names"  # attribute of a P2POp between its making and its posting


class PipeliningAdapter(PatchingAdapter):
    """Names forward, backward, input and weight gradients, messages and gradient reduction of pipeline stages."""

    name = "pipelining"
    description = "stages and microbatches of torch.distributed.pipelining"
    distribution = "torch"

    def hooks(self) -> Sequence[AdapterHook]:
        """Every hook of the adapter."""
        return [_FORWARD, _BACKWARD, _WEIGHTS, _REDUCE, *_MESSAGES, _BATCH, _LOSS, *_SHAPES, *_STEPS]

    def around(self, namer: UnitNamer) -> Sequence[Around]:
        """What to do at the hooks."""
        calls = _Calls(namer)
        return [
            Around(_FORWARD, before=calls.forward),
            Around(_BACKWARD, before=calls.backward),
            Around(_WEIGHTS, before=calls.weights),
            Around(_REDUCE, before=calls.reduce),
            Around(_BATCH, before=calls.batch),
            Around(_LOSS, before=calls.loss),
            *(Around(hook, before=calls.shapes) for hook in _SHAPES),
            *(Around(hook, before=calls.step) for hook in _STEPS),
            *(Around(hook, after=calls.messages(*what)) for hook, what in _MESSAGES.items()),
        ]


class _Calls:
    """What each hook does."""

    def __init__(self, namer: UnitNamer) -> None:
        self._namer = namer
        self._parts = ScheduleParts()
        self._chunks: dict[int, int] = {}  # stage index -> model chunk, with several stages a rank

    def step(self, schedule: Any, *_: Any, **__: Any) -> None:
        """Called at the begin of every step, before anything is sent."""
        several = getattr(schedule, "_stages", None)
        stages = several or [schedule._stage]
        self._chunks = {stage.stage_index: at for at, stage in enumerate(stages)} if several else {}
        self._parts.begin(num_forwards=schedule._n_microbatches * len(stages))
        stage = stages[0]
        self._namer.coordinates({"pp": int(stage.group_rank)})
        if stage.group is not None:
            self._namer.purposes({str(stage.group.group_name): "pp"})

    def shapes(self, stage: Any, *_: Any, **__: Any) -> int:
        """The first step finds out what stages send each other: passes of no microbatch, also for who counts those."""
        index = stage.stage_index
        return self._namer.enter("other", stage=index, model_chunk=self._chunks.get(index), label="shapes")

    def forward(self, stage: Any, fwd_chunk_id: int, *_: Any, **__: Any) -> int:
        index = stage.stage_index
        return self._namer.enter(
            "forward", microbatch=fwd_chunk_id, stage=index, model_chunk=self._chunks.get(index),
            part="forward", schedule=self._parts.forward(),
        )  # fmt: skip

    def backward(
        self, stage: Any, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *_: Any, **__: Any
    ) -> int | None:
        if not stage.has_backward:  # an evaluation: the call does nothing
            return None
        index = stage.stage_index
        return self._namer.enter(
            "backward", microbatch=bwd_chunk_id, stage=index, model_chunk=self._chunks.get(index),
            part="backward" if full_backward else "input_grad", schedule=self._parts.backward(),
        )  # fmt: skip

    def weights(self, stage: Any, bwd_chunk_id: int, *_: Any, **__: Any) -> int | None:
        if not stage.has_backward:
            return None
        index = stage.stage_index
        return self._namer.enter(
            "backward", microbatch=bwd_chunk_id, stage=index, model_chunk=self._chunks.get(index),
            part="weight_grad", schedule=self._parts.backward(),
        )  # fmt: skip

    def reduce(self, stage: Any, *_: Any, **__: Any) -> int:
        index = stage.stage_index
        return self._namer.enter("backward", stage=index, model_chunk=self._chunks.get(index), part="grad_sync")

    def loss(self, schedule: Any, stage: Any, output: Any, targets: Any, mb_index: int, *_: Any) -> int | None:
        if not stage.is_last:
            return None
        index = stage.stage_index
        return self._namer.enter(
            "forward", microbatch=mb_index, stage=index, model_chunk=self._chunks.get(index), label="loss"
        )

    def messages(self, phase: str, label: str) -> Any:
        """Remember on each operation what it is for: a schedule may post those of several microbatches together."""

        def after(operations: Any, stage: Any, chunk_id: int) -> None:
            names: dict[str, int | str] = {
                "phase": phase, "microbatch": chunk_id, "stage": stage.stage_index, "label": label,
            }  # fmt: skip
            chunk = self._chunks.get(stage.stage_index)
            if chunk is not None:
                names["model_chunk"] = chunk
            for operation in operations:
                setattr(operation, _ORDER, names)

        return after

    def batch(self, p2p_ops: Sequence[Any], *_: Any, **__: Any) -> int | None:
        if not p2p_ops:
            return None
        token = self._namer.enter()
        self._namer.next_units([getattr(operation, _ORDER, {}) for operation in p2p_ops])
        return token
