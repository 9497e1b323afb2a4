"""The hooks of FSDP2 (`fully_shard`), also hybrid sharded. What happens to parameters is FSDP's own business."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, OfObjects
from prismtrace_fsdp.counting import Microbatches

__all__ = ["GROUP", "STATE", "Sharded"]

_PACKAGE = "torch.distributed.fsdp._fully_shard"
GROUP = {
    name: AdapterHook(f"{_PACKAGE}._fsdp_param_group", f"FSDPParamGroup.{name}")
    for name in ("unshard", "wait_for_unshard", "pre_backward", "post_backward")
}
STATE = {
    name: AdapterHook(f"{_PACKAGE}._fsdp_state", f"FSDPState.{name}")
    for name in ("_pre_forward", "_post_forward", "_root_post_backward_final_callback")
}
_ROOT = "(root)"


class Sharded:
    """What the hooks do. A layer's stretch in the forward pass lies between two calls, in the backward pass too."""

    def __init__(self, namer: UnitNamer, microbatches: Microbatches) -> None:
        self._namer = namer
        self._microbatches = microbatches
        self._forward: dict[int, int] = {}  # state -> token of its layer's stretch
        self._backward: tuple[int, int] | None = None  # parameter group, and token of its layer's stretch
        self._known: OfObjects[bool] = OfObjects()

    def around(self) -> Sequence[Around]:
        """The table of hooks. torch keeps its compiler out of all of them."""
        calls: dict[AdapterHook, dict[str, Any]] = {
            GROUP["unshard"]: {"before": self.gather},
            GROUP["wait_for_unshard"]: {"before": self.gathered},
            GROUP["pre_backward"]: {"after": self.layer_backward_begins},
            GROUP["post_backward"]: {"before": self.reduce, "after": self.layer_backward_ends},
            STATE["_pre_forward"]: {"before": self.root_begins, "after": self.layer_begins},
            STATE["_post_forward"]: {"before": self.layer_ends},
            STATE["_root_post_backward_final_callback"]: {"before": self.backward_ends},
        }
        return [Around(hook, **call, is_compiled=False) for hook, call in calls.items()]

    def gather(self, group: Any, *_: Any, **__: Any) -> int | None:
        if group._all_gather_result is not None:  # prefetched: the call does nothing
            return None
        return self._namer.enter(part="param_gather", layer=group._module_fqn or _ROOT)

    def gathered(self, group: Any, *_: Any, **__: Any) -> int | None:
        if group._all_gather_result is None:
            return None
        return self._namer.enter(part="param_gather", layer=group._module_fqn or _ROOT)

    def reduce(self, group: Any, *_: Any, **__: Any) -> int:
        return self._namer.enter("backward", part="grad_sync", layer=group._module_fqn or _ROOT)

    def root_begins(self, state: Any, *_: Any, **__: Any) -> None:
        """Before the parameters of the outermost module are gathered."""
        if state._is_root is False:
            return
        if (self._forward or self._backward is not None) and sys.modules["torch"]._C._current_graph_task_id() == -1:
            self._end_failed(state)
        if state._state_ctx.iter_forward_root in (None, state):  # the latter where its last pass has failed
            self._microbatches.forward(id(state))

    def _end_failed(self, root: Any) -> None:
        """A pass of this model begins in which no other is under way: what is open was left by an exception."""
        own = {id(state) for state in root._state_ctx.all_states}
        failed = [self._forward.pop(state) for state in own & self._forward.keys()]
        if self._backward is not None:
            failed.append(self._backward[1])
            self._backward = None
        if failed:
            self._namer.lower("FSDP2: a pass was not ended, as by an exception: what came behind it may have its names")
        for token in sorted(failed, reverse=True):
            self._namer.leave(token)

    def layer_begins(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        group = _group_of(state)
        if group is None or id(state) in self._forward:  # `fully_shard([norm, head])`: each module calls, the last ends
            return
        if group not in self._known:
            self._known[group] = True
            self._learn(group)
        token = self._forward[id(state)] = self._namer.enter(layer=group._module_fqn or _ROOT)
        self._namer.ends_later(token)

    def layer_ends(self, state: Any, *_: Any, **__: Any) -> None:
        token = self._forward.pop(id(state), None)
        if token is not None:
            self._namer.leave(token)

    def layer_backward_begins(self, _: Any, group: Any, *__: Any, **___: Any) -> None:
        if self._backward is not None:
            if self._backward[0] == id(group):
                return
            self._namer.leave(self._backward[1])
        token = self._namer.enter(layer=group._module_fqn or _ROOT)
        self._backward = id(group), token
        self._namer.ends_later(token)

    def layer_backward_ends(self, _: Any, group: Any, *__: Any, **___: Any) -> None:
        if self._backward is not None and self._backward[0] == id(group):
            self._namer.leave(self._backward[1])
            self._backward = None

    def backward_ends(self, *_: Any) -> int:
        """What is left to do once autograd is through, also for layers whose hook did not fire."""
        if self._backward is not None:
            self._namer.leave(self._backward[1])
            self._backward = None
        for token in reversed(self._forward.values()):  # of modules sharded together of which one was not called
            self._namer.leave(token)
        self._forward.clear()
        return self._namer.enter("backward", part="grad_sync")

    def _learn(self, group: Any) -> None:
        purposes = {}
        shard = _name_of(group, "_all_gather_process_group")
        if shard:
            purposes[shard] = "dp_shard"
        if group._is_hsdp and (replicate := _name_of(group, "_all_reduce_process_group")):
            purposes[replicate] = "dp_replicate"
        self._namer.purposes(purposes)
        mesh = getattr(group.mesh_info, "mesh", None)
        if mesh is not None and mesh.mesh_dim_names is None:  # else its dimensions have told
            self._namer.coordinates({"dp_shard": int(group._all_gather_process_group.rank())})


def _group_of(state: Any) -> Any:
    groups = getattr(state, "_fsdp_param_groups", None)  # several with a mesh for each parameter (torch 2.12)
    return groups[0] if groups else getattr(state, "_fsdp_param_group", None)


def _name_of(group: Any, attribute: str) -> str | None:
    process_group = getattr(group, attribute, None)
    return None if process_group is None else str(process_group.group_name)
