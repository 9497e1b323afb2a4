"""The adapter for data parallelism in torch: DDP, FSDP1, FSDP2, hybrid sharding, and device meshes.

Responsible for layers, gathered parameters, reduced gradients and, where nobody else owns a schedule, for counting
microbatches. It knows no pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, OfObjects, PatchingAdapter
from prismtrace_fsdp.counting import Microbatches
from prismtrace_fsdp.sharded import GROUP, STATE, Sharded
from prismtrace_fsdp.wrapped import FORWARD, RUNTIME, Wrapped

__all__ = ["DataParallelAdapter"]

_DDP = AdapterHook("torch.nn.parallel.distributed", "DistributedDataParallel.forward")
_MESH = AdapterHook("torch.distributed.device_mesh", "DeviceMesh.__init__")


class DataParallelAdapter(PatchingAdapter):
    """Names layers, parameter gathers and gradient reductions, and counts microbatches."""

    name = "fsdp"
    description = "layers and microbatches of DDP, FSDP1, FSDP2 and HSDP; dimensions of device meshes"
    distribution = "torch"

    def hooks(self) -> Sequence[AdapterHook]:
        """Every hook of the adapter."""
        return [_DDP, _MESH, *STATE.values(), *GROUP.values(), FORWARD, *RUNTIME.values()]

    def around(self, namer: UnitNamer) -> Sequence[Around]:
        """What to do at the hooks."""
        microbatches = Microbatches(namer)
        replicated = _Replicated(namer, microbatches)
        return [
            Around(_DDP, before=replicated.forward),
            Around(_MESH, after=replicated.mesh),
            *Sharded(namer, microbatches).around(),
            *Wrapped(namer, microbatches).around(),
        ]


class _Replicated:
    """What the hooks of DDP and of device meshes do."""

    def __init__(self, namer: UnitNamer, microbatches: Microbatches) -> None:
        self._namer = namer
        self._microbatches = microbatches
        self._known: OfObjects[bool] = OfObjects()

    def forward(self, module: Any, *_: Any, **__: Any) -> None:
        """Called at each forward pass of a DDP module. Its reducer is C++ and has no function to wrap."""
        if module not in self._known:
            self._known[module] = True
            group = module.process_group
            name = str(group.group_name)
            self._namer.part_of_group(name, part="grad_sync", phase="backward")
            self._namer.purposes({name: "dp"})
            self._namer.coordinates({"dp": int(group.rank())})
        self._microbatches.forward(id(module))

    def mesh(self, _: None, mesh: Any, *__: Any, **___: Any) -> None:
        """Called when a device mesh has been made: its dimensions say where this rank is."""
        names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
        if names and coordinate is not None:
            self._namer.coordinates({str(name): int(at) for name, at in zip(names, coordinate, strict=True)})
