"""Makes process groups on gloo where a program asks for nccl. What the groups do is torch's and the modes' business."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from prism_sdk.runtime.oncpu.functions import is_cuda


def _backend(asked: Any) -> Any:
    """gloo for what only GPUs have; a backend that knows CPUs stays."""
    text = str(asked).lower() if asked is not None else "nccl"
    return "gloo" if "nccl" in text or "cuda" in text else asked


def install() -> None:
    """Replace what makes groups and meshes, and what takes arguments that only make sense with nccl."""
    _convert_makers()
    _convert_collectives()
    mesh_init = device_mesh.DeviceMesh.__init__

    def init_mesh(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        mesh_init(self, "cpu" if is_cuda(device_type) else device_type, *args, **kwargs)

    device_mesh.DeviceMesh.__init__ = init_mesh  # type: ignore[method-assign]
    make_mesh = device_mesh.init_device_mesh

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return make_mesh("cpu" if is_cuda(device_type) else device_type, *args, **kwargs)

    both: Any = (device_mesh, dist)
    for module in both:
        module.init_device_mesh = init_device_mesh


def _convert_makers() -> None:
    init, new_group = distributed_c10d.init_process_group, distributed_c10d.new_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        init(_backend(backend), *args, **kwargs)

    def group(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **kwargs: Any) -> Any:
        for name in ("pg_options", "device_id"):
            kwargs.pop(name, None)
        return new_group(ranks, timeout, _backend(backend) if backend is not None else None, **kwargs)

    for module in _both():
        module.init_process_group, module.new_group = init_process_group, group
        module.is_nccl_available = lambda: True
        if not hasattr(module, "ProcessGroupNCCL"):
            module.ProcessGroupNCCL = SimpleNamespace(Options=_options, NCCLConfig=_options)


def _options(*_: Any, **__: Any) -> Any:
    """Options of nccl, which nobody reads here."""
    return SimpleNamespace(config=SimpleNamespace(), is_high_priority_stream=False)


def _convert_collectives() -> None:
    barrier, all_to_all_single = distributed_c10d.barrier, distributed_c10d.all_to_all_single
    isend = distributed_c10d.isend

    def barrier_without_devices(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    def all_to_all(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, *args: Any, **more: Any
    ) -> Any:
        return all_to_all_single(output, input, _list(output_split_sizes), _list(input_split_sizes), *args, **more)

    def isend_what_may_go(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # on a GPU a message's memory stays until the stream has passed, so Megatron lets go of it (`tensor.data = ...`)
        # while it is under way; gloo would send what is there then. An alias, which its handle holds, keeps the memory
        return isend(tensor.detach(), *args, **kwargs)

    for module in _both():
        module.barrier, module.all_to_all_single = barrier_without_devices, all_to_all
        module.isend = isend_what_may_go


def _list(sizes: Any) -> Any:
    """Sizes that a program keeps as a tensor on what it takes for a CPU."""
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _both() -> tuple[Any, ...]:
    return dist, distributed_c10d
