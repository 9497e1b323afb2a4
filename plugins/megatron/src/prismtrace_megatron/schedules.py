"""Megatron's schedules: passes of microbatches and the messages between stages. It plans nothing.

A backward pass is not told its microbatch. It is given the tensor that the forward pass returned, which tells.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, ScheduleParts

__all__ = ["HOOKS", "Schedules"]

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_MESSAGES = "megatron.core.pipeline_parallel.p2p_communication"

HOOKS = {
    "forward_step": AdapterHook(_SCHEDULES, "forward_step"),
    "backward_step": AdapterHook(_SCHEDULES, "backward_step"),
    "none": AdapterHook(_SCHEDULES, "forward_backward_no_pipelining"),
    "1f1b": AdapterHook(_SCHEDULES, "forward_backward_pipelining_without_interleaving"),
    "interleaved": AdapterHook(_SCHEDULES, "forward_backward_pipelining_with_interleaving"),
    "communicate": AdapterHook(_MESSAGES, "P2PCommunicator._communicate", required=False),
    "batched": AdapterHook(_MESSAGES, "_batched_p2p_ops"),
    "single": AdapterHook(_MESSAGES, "_p2p_ops"),
    "combined": AdapterHook(
        "megatron.core.pipeline_parallel.combined_1f1b", "combined_forward_backward_step", required=False
    ),
}
# what a message is: argument of Megatron's functions -> phase, label, direction
_LANES = {
    "tensor_send_prev": ("backward", "send gradient"),
    "tensor_recv_prev": ("forward", "recv activation"),
    "tensor_send_next": ("forward", "send activation"),
    "tensor_recv_next": ("backward", "recv gradient"),
}
# in which order they are posted: all together, by even and by odd ranks
_TOGETHER = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
_EVEN = ("tensor_send_next", "tensor_recv_prev", "tensor_send_prev", "tensor_recv_next")
_ODD = ("tensor_recv_prev", "tensor_send_next", "tensor_recv_next", "tensor_send_prev")


class Schedules:
    """What the hooks do."""

    def __init__(self, namer: UnitNamer) -> None:
        self._namer = namer
        self._parts = ScheduleParts()
        self._stage: int | None = None
        self._num_stages = 1
        self._is_interleaved = False
        self._microbatch_of: dict[int, tuple[int, int | None]] = {}  # output tensor -> microbatch and chunk
        self._sent: Counter[str] = Counter()  # messages of the step so far, by lane
        self._planned: tuple[int, ...] | None = None  # the interleaved step for which the plan holds
        self._plan: dict[str, list[tuple[int, int]]] = {}  # lane -> microbatches and chunks of its messages

    def around(self) -> Sequence[Around]:
        """The table of hooks."""
        return [
            Around(HOOKS["forward_step"], before=self.forward, after=self.forward_done),
            Around(HOOKS["backward_step"], before=self.backward),
            Around(HOOKS["none"], before=self.step_of_one_stage),
            Around(HOOKS["1f1b"], before=self.step_of_stages),
            Around(HOOKS["interleaved"], before=self.step_of_chunks),
            Around(HOOKS["communicate"], before=lambda *_, **__: self._namer.enter(label="messages")),
            Around(HOOKS["batched"], before=self.messages_together),
            Around(HOOKS["single"], before=self.messages_in_turn),
            Around(HOOKS["combined"], before=self.combined),
        ]

    def step_of_one_stage(self, *, num_microbatches: int, **_: Any) -> int:
        self._begin(num_microbatches, num_chunks=1, has_stages=False, is_interleaved=False)
        return self._namer.enter()

    def step_of_stages(self, *, num_microbatches: int, **_: Any) -> int:
        self._begin(num_microbatches, num_chunks=1, has_stages=True, is_interleaved=False)
        return self._namer.enter()

    def step_of_chunks(self, *, num_microbatches: int, model: Sequence[Any], **_: Any) -> int:
        self._begin(num_microbatches, num_chunks=len(model), has_stages=True, is_interleaved=True)
        self._plan_messages(int(num_microbatches), model)
        return self._namer.enter()

    def _plan_messages(self, num_microbatches: int, model: Sequence[Any]) -> None:
        """In each lane messages go in the order of passes, without those that begin or end the pipeline."""
        schedules = sys.modules[_SCHEDULES]
        config = schedules.get_model_config(model[0])
        key = (num_microbatches, len(model), int(config.microbatch_group_size_per_vp_stage))
        if self._planned == key:
            return
        self._planned, last = key, len(model) - 1
        passes = [(int(number), int(chunk)) for number, chunk in schedules.get_schedule_table(*key)]
        backwards = [(number, last - chunk) for number, chunk in passes]
        is_first, is_last = self._stage == 0, self._stage == self._num_stages - 1
        self._plan = {
            "tensor_recv_prev": [one for one in passes if not (is_first and one[1] == 0)],
            "tensor_send_next": [one for one in passes if not (is_last and one[1] == last)],
            "tensor_recv_next": [one for one in backwards if not (is_last and one[1] == last)],
            "tensor_send_prev": [one for one in backwards if not (is_first and one[1] == 0)],
        }

    def _begin(self, num_microbatches: int, *, num_chunks: int, has_stages: bool, is_interleaved: bool) -> None:
        self._parts.begin(num_forwards=int(num_microbatches) * num_chunks)
        self._microbatch_of.clear()
        self._sent.clear()
        self._is_interleaved = is_interleaved
        self._stage = None
        if has_stages:
            state = sys.modules["megatron.core.parallel_state"]  # there, since its schedule runs
            self._stage = state.get_pipeline_model_parallel_rank()
            self._num_stages = state.get_pipeline_model_parallel_world_size()

    def _stage_of(self, chunk: int | None) -> int | None:
        """Index among the stages of the job: chunk after chunk, each over all ranks of the pipeline."""
        if self._stage is None or chunk is None:
            return self._stage
        return chunk * self._num_stages + self._stage

    def forward(
        self, *_: Any, current_microbatch: int | None = None, vp_stage: int | None = None, **__: Any
    ) -> int:  # fmt: skip
        chunk = vp_stage if self._is_interleaved else None
        return self._namer.enter(
            "forward", microbatch=None if current_microbatch is None else int(current_microbatch),
            stage=self._stage_of(chunk), model_chunk=chunk, part="forward", schedule=self._parts.forward(),
        )  # fmt: skip

    def forward_done(
        self, result: Any, *_: Any, current_microbatch: int | None = None, vp_stage: int | None = None, **__: Any
    ) -> None:
        output = _tensor_of(result[0] if isinstance(result, tuple) else result)
        if output is not None and current_microbatch is not None:
            self._microbatch_of[id(output)] = int(current_microbatch), vp_stage if self._is_interleaved else None

    def backward(self, input_tensor: Any, output_tensor: Any, *_: Any, **__: Any) -> int:
        microbatch, chunk = self._microbatch_of.pop(id(_tensor_of(output_tensor)), (None, None))
        return self._namer.enter(
            "backward", microbatch=microbatch, stage=self._stage_of(chunk), model_chunk=chunk, part="backward",
            schedule=self._parts.backward(),
        )  # fmt: skip

    def messages_together(self, **given: Any) -> int:
        return self._messages(_TOGETHER, given)

    def messages_in_turn(self, *, group: Any, **given: Any) -> int:
        return self._messages(_ODD if group.rank() % 2 else _EVEN, given)

    def _messages(self, order: Sequence[str], given: dict[str, Any]) -> int:
        names: list[dict[str, int | str]] = []
        for lane in order:
            if given.get(lane) is None:
                continue
            phase, label = _LANES[lane]
            one: dict[str, int | str] = {"phase": phase, "label": label}
            at = self._sent[lane]
            self._sent[lane] += 1
            if self._is_interleaved:
                microbatch, chunk = self._plan[lane][at]
                stage = chunk * self._num_stages + (self._stage or 0)
                one |= {"microbatch": microbatch, "stage": stage, "model_chunk": chunk}
            elif self._stage is not None:  # each lane goes in order of microbatches
                one |= {"microbatch": at, "stage": self._stage}
            names.append(one)
        token = self._namer.enter()
        self._namer.next_units(names)
        return token

    def combined(self, *_: Any, **__: Any) -> None:
        self._namer.lower("microbatches are not named with overlap_moe_expert_parallel_comm")


def _tensor_of(output: Any) -> Any:
    """The tensor that stands for what a stage puts out: the first of a list."""
    while isinstance(output, list | tuple):
        if not output:
            return None
        output = output[0]
    return output
