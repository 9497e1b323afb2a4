"""Lets a rank use the device number it would have in the job where the machine has fewer devices than the job's node.

Responsible for turning logical device numbers into real ones wherever a program names one.  It allocates nothing, and
is installed only where the job's node has more devices than this machine.

A program is told of as many devices as its node has.  Whatever it names, device n is the real device n modulo their
number; what torch answers (`tensor.device`, `current_device`) is the real one, so that libraries which compare the two
find them equal (../../../spec/decisions/0400-ranks-on-one-gpu.md).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.graph
from torch.overrides import TorchFunctionMode

_num_real = 0  # devices that this machine has; 0: nothing is installed


def num_real_devices() -> int:
    """CUDA devices that this process could use; asks no driver where torch was built without CUDA."""
    return _num_real or torch.cuda.device_count()


def real(device: Any) -> Any:
    """The real device for one that a program names by an index, a text or a device; anything else as it is."""
    if type(device) is int:
        return device % _num_real if device >= 0 else device
    if isinstance(device, str):
        kind, colon, index = device.partition(":")
        return f"cuda:{int(index) % _num_real}" if kind == "cuda" and colon and index.isdigit() else device
    if isinstance(device, torch.device) and device.type == "cuda" and (device.index or 0) >= _num_real:
        return torch.device("cuda", (device.index or 0) % _num_real)
    return device


class OnRealDevices(TorchFunctionMode):
    """Rewrites the devices among the arguments of every function of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.device:
            return real(func(*args, **(kwargs or {})))
        if func in _BY_POSITION and len(args) > 1:
            args = (args[0], real(args[1]), *args[2:])
        if not kwargs:
            return func(*args)
        device = kwargs.get("device")
        return func(*args, **(kwargs if device is None else {**kwargs, "device": real(device)}))


_BY_POSITION = frozenset({torch.Tensor.to, torch.Tensor.cuda})  # their first argument may be a device


def install(*, num_logical: int, num_real: int) -> None:
    """Map the devices of this process's program, for as long as the process lives.

    Args:
        num_logical: how many the program is told of, those of a node of the job.
        num_real: how many there are.
    """
    global _num_real
    _num_real = num_real
    OnRealDevices().__enter__()
    _keep_in_backward()
    _convert_indices()
    cuda: Any = torch.cuda
    cuda.device_count = lambda: num_logical


def _keep_in_backward() -> None:
    """torch takes a mode off while it handles a call of it, and `Tensor.backward` is such a call."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            with OnRealDevices():
                return original(*args, **kwargs)

        return engine_run_backward

    for module in (torch.autograd.graph, torch.autograd):
        module._engine_run_backward = make(module._engine_run_backward)  # type: ignore[attr-defined]


def _convert_indices() -> None:
    """Wrap the functions by which torch's own Python code turns what a program names into an index."""

    for name, module in list(sys.modules.items()):
        function = vars(module).get("_get_device_index") if name.startswith("torch") else None  # no `__getattr__`
        if function is None or name.startswith("torch._dynamo") or hasattr(function, "prism_original"):
            continue
        if getattr(function, "__module__", "") in _OWNERS:
            module._get_device_index = _mapped(function)  # type: ignore[attr-defined]


_OWNERS = frozenset({"torch._utils", "torch.cuda._utils", "torch.accelerator", "torch.accelerator._utils"})


def _mapped(function: Callable[..., int]) -> Callable[..., int]:
    """One function object for each name that it is bound to, as torch._dynamo wants."""

    @functools.wraps(function)
    def get_device_index(*args: Any, **kwargs: Any) -> int:
        index = function(*args, **kwargs)
        return index % _num_real if index >= _num_real else index

    get_device_index.prism_original = function  # type: ignore[attr-defined]
    return get_device_index
