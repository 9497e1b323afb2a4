"""The hooks of FSDP1 (`FullyShardedDataParallel`). What happens to flat parameters is FSDP's own business."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, OfObjects
from prismtrace_fsdp.counting import Microbatches

__all__ = ["FORWARD", "RUNTIME", "Wrapped"]

FORWARD = AdapterHook("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel.forward")
RUNTIME = {
    name: AdapterHook("torch.distributed.fsdp._runtime_utils", name)
    for name in ("_unshard", "_post_backward_hook", "_post_backward_final_callback")
}
_ROOT = "(root)"
_OWN = "_fsdp_wrapped_module."


class Wrapped:
    """What the hooks do."""

    def __init__(self, namer: UnitNamer, microbatches: Microbatches) -> None:
        self._namer = namer
        self._microbatches = microbatches
        self._names: OfObjects[str] = OfObjects()  # handle of flat parameters -> module
        self._known: OfObjects[bool] = OfObjects()  # outermost modules

    def around(self) -> Sequence[Around]:
        """The table of hooks."""
        return [
            Around(FORWARD, before=self.forward),
            Around(RUNTIME["_unshard"], before=self.gather),
            Around(RUNTIME["_post_backward_hook"], before=self.reduce),
            Around(RUNTIME["_post_backward_final_callback"], before=self.backward_ends),
        ]

    def forward(self, module: Any, *_: Any, **__: Any) -> int:
        """Called at the forward pass of every wrapped module, the outermost first."""
        if module._is_root is not False:  # None before the first pass: then it is the outermost that comes first
            if module not in self._known and getattr(module, "_handle", None) not in self._names:
                self._learn(module)
            if module in self._known:
                self._microbatches.forward(id(module))
        return self._namer.enter(layer=self._names.get(module._handle) or _ROOT)

    def gather(self, _: Any, handle: Any, *__: Any, **___: Any) -> int:
        return self._namer.enter(part="param_gather", layer=self._names.get(handle))

    def reduce(self, _: Any, handle: Any, *__: Any, **___: Any) -> int:
        return self._namer.enter("backward", part="grad_sync", layer=self._names.get(handle))

    def backward_ends(self, *_: Any, **__: Any) -> int:
        return self._namer.enter("backward", part="grad_sync")

    def _learn(self, root: Any) -> None:
        self._known[root] = True
        for name, module in root.named_modules():
            handle = getattr(module, "_handle", None)
            if handle is not None:
                self._names[handle] = name.replace(_OWN, "").replace(_OWN[:-1], "").strip(".") or _ROOT
        group = root.process_group
        self._namer.purposes({str(group.group_name): "dp_shard"})
        self._namer.coordinates({"dp_shard": int(group.rank())})
        replicate = getattr(root, "_inter_node_pg", None)
        if replicate is not None:
            self._namer.purposes({str(replicate.group_name): "dp_replicate"})
            self._namer.coordinates({"dp_replicate": int(replicate.rank())})
