"""Megatron's data parallelism, optimizers and process groups. Which microbatch is at work is the schedules' matter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around

__all__ = ["HOOKS", "States"]

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
_OPTIMIZER = "megatron.core.optimizer.optimizer"

HOOKS = {
    "start_grad_sync": AdapterHook(_BUCKETS, "_ParamAndGradBucketGroup.start_grad_sync"),
    "finish_grad_sync": AdapterHook(_BUCKETS, "_ParamAndGradBucketGroup.finish_grad_sync"),
    "start_param_sync": AdapterHook(_BUCKETS, "_ParamAndGradBucketGroup.start_param_sync"),
    "finish_param_sync": AdapterHook(_BUCKETS, "_ParamAndGradBucketGroup.finish_param_sync"),
    "finalize": AdapterHook("megatron.core.distributed.finalize_model_grads", "finalize_model_grads"),
    "fp32": AdapterHook(_OPTIMIZER, "FP32Optimizer.step"),
    "mixed": AdapterHook(_OPTIMIZER, "MixedPrecisionOptimizer.step"),
    "chained": AdapterHook(_OPTIMIZER, "ChainedOptimizer.step"),
    "groups": AdapterHook("megatron.core.parallel_state", "initialize_model_parallel"),
}
_PURPOSES = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "MODEL_PARALLEL_GROUP": "tp_pp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp_ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "etp_ep_pp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp_part",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer",
    "EMBEDDING_GROUP": "embedding",
    "POSITION_EMBEDDING_GROUP": "position_embedding",
}
_COORDINATES = {
    "tp": "get_tensor_model_parallel_rank", "pp": "get_pipeline_model_parallel_rank", "dp": "get_data_parallel_rank",
    "cp": "get_context_parallel_rank", "ep": "get_expert_model_parallel_rank",
}  # fmt: skip


class States:
    """What the hooks do."""

    def __init__(self, namer: UnitNamer) -> None:
        self._namer = namer

    def around(self) -> Sequence[Around]:
        """The table of hooks."""
        return [
            Around(HOOKS["start_grad_sync"], before=self.grad_sync),
            Around(HOOKS["finish_grad_sync"], before=self.grad_sync),
            Around(HOOKS["start_param_sync"], before=self.param_gather),
            Around(HOOKS["finish_param_sync"], before=self.param_wait),
            Around(HOOKS["finalize"], before=self.grad_sync),
            *(Around(HOOKS[name], before=self.optimizer) for name in ("fp32", "mixed", "chained")),
            Around(HOOKS["groups"], after=self.groups),
        ]

    def grad_sync(self, *_: Any, **__: Any) -> int:
        return self._namer.enter("backward", part="grad_sync")

    def param_gather(self, *_: Any, **__: Any) -> int:
        return self._namer.enter(part="param_gather")

    def param_wait(self, group: Any, *_: Any, **__: Any) -> int | None:
        """Asked for by every module before its forward pass; most of the time nothing is under way."""
        if group.param_gather_dispatched and group.param_gather_handle is None:
            return None
        return self._namer.enter(part="param_gather")

    def optimizer(self, *_: Any, **__: Any) -> int:
        return self._namer.enter("optimizer", part="optimizer")

    def groups(self, *_: Any, **__: Any) -> None:
        """Called when Megatron has made its groups: they carry descriptions, and it knows its coordinates."""
        self._namer.purposes(_PURPOSES)
        state = sys.modules["megatron.core.parallel_state"]
        self._namer.coordinates(
            {axis: int(getattr(state, name)()) for axis, name in _COORDINATES.items() if hasattr(state, name)}
        )
