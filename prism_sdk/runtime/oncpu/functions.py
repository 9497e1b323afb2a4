"""Puts tensors on the CPU wherever a function of torch is told `cuda`. The namespace `torch.cuda` is not its business.

Functions of torch are seen through a function mode, which compiled and scripted code does not notice, other than
replacing them would be. torch takes a mode off while it handles a call of it: `Tensor.backward` is such a call, so the
backward engine puts one on again, for what custom functions and hooks do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd
import torch.autograd.graph
from torch.overrides import TorchFunctionMode

from prism_sdk.adapting.imports import AfterImport

_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_FLEX = "torch.nn.attention.flex_attention"
CPU = torch.device("cpu")


def is_cuda(device: Any) -> bool:
    """Whether a program means a GPU by this: an index, a text or a device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return type(device) is int


def on_cpu(device: Any) -> Any:
    """The CPU in place of a GPU; anything else as it is."""
    return CPU if is_cuda(device) else device


class OnCpu(TorchFunctionMode):
    """Rewrites the arguments of every function of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs or {})
        if kwargs:
            if is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **kwargs)
        return func(*args)


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    kwargs = {name: on_cpu(value) if name == "device" else value for name, value in kwargs.items()}
    return func(tensor, *map(on_cpu, rest), **kwargs)


def _itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.type()` says what it would on a GPU, because programs compare it; `x.type("torch.cuda...")` converts."""
    if len(args) == 1 and not kwargs:
        return str(func(*args)).replace("torch.", "torch.cuda.", 1)
    return func(*(arg.replace("torch.cuda.", "torch.") if isinstance(arg, str) else arg for arg in args), **kwargs)


_T = torch.Tensor
_SPECIAL: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _T.to: _to, _T.cuda: _itself, _T.pin_memory: _itself, _T.type: _type,
}  # fmt: skip


def install() -> None:
    """Put the mode on in this thread, and on again within backward passes; replace what is no function of torch."""
    OnCpu().__enter__()
    _keep_in_backward()
    _convert_modules()
    _convert_others()


def _keep_in_backward() -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            with OnCpu():
                return original(*args, **kwargs)

        return engine_run_backward

    for module in (torch.autograd.graph, torch.autograd):
        module._engine_run_backward = make(module._engine_run_backward)  # type: ignore[attr-defined]


def _convert_modules() -> None:
    module: Any = torch.nn.Module
    to = module.to

    def converted(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: on_cpu(value) if name == "device" else value for name, value in kwargs.items()}
        return to(self, *map(on_cpu, args), **kwargs)

    module.to = converted
    module.cuda = lambda self, device=None: self
    to_empty = module.to_empty
    module.to_empty = lambda self, *, device, recurse=True: to_empty(self, device=on_cpu(device), recurse=recurse)


def _convert_others() -> None:
    anything: Any = torch
    load, set_default_device = torch.load, torch.set_default_device

    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = CPU if map_location is None or is_cuda(map_location) else map_location
        return load(f, place, *args, **kwargs)

    class _AnyGenerator(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch._C.Generator)

    class Generator(metaclass=_AnyGenerator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return torch._C.Generator(on_cpu(device))

    # torch looks at the type of the stream before any mode is asked
    anything.Tensor.record_stream = lambda self, stream: None
    anything.load = load_on_cpu
    anything.set_default_device = lambda device: set_default_device(on_cpu(device))
    anything.Generator = Generator
    anything.compile = _compile
    _convert_amp()
    _convert_wrappers()
    later = AfterImport()
    later.call(_FLEX, _allow_flex_attention)
    later.call(_FSDP2, _divide_without_nccl)


def _compile(model: Any = None, **_: Any) -> Any:
    """The function itself: what a compiler for GPUs would make of it is not to be seen here."""
    return model if model is not None else lambda function: function


def _allow_flex_attention() -> None:
    """It refuses gradients on a CPU, because it compiles none there; not compiled, it has them."""
    module: Any = sys.modules[_FLEX]
    if hasattr(module, "_validate_device"):
        module._validate_device = lambda *_: None


def _divide_without_nccl() -> None:
    """FSDP2 lets NCCL multiply by a factor (`PREMUL_SUM`) where the program sets one; gloo cannot, and it has a way."""
    module: Any = sys.modules[_FSDP2]
    factors = getattr(module, "_get_gradient_divide_factors", None)
    if factors is None:
        return
    takes = inspect.signature(factors)

    def dividing(*args: Any, **kwargs: Any) -> Any:
        given = takes.bind(*args, **kwargs)
        if given.arguments.get("factor") is not None and "force_sum_reduction_for_comms" in takes.parameters:
            given.arguments["force_sum_reduction_for_comms"] = True
        return factors(*given.args, **given.kwargs)

    module._get_gradient_divide_factors = dividing


def _convert_amp() -> None:
    autocast: Any = torch.amp.autocast_mode.autocast
    scaler: Any = torch.amp.grad_scaler.GradScaler
    autocast_init, scaler_init = autocast.__init__, scaler.__init__

    def init_autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast_init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    def init_scaler(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler_init(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    autocast.__init__, scaler.__init__ = init_autocast, init_scaler


def _convert_wrappers() -> None:
    """DDP refuses device numbers for modules on a CPU; FSDP would move modules there, and sends no weights of CPUs."""
    from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils

    ddp: Any = torch.nn.parallel.DistributedDataParallel
    fsdp: Any = FullyShardedDataParallel
    ddp_init, fsdp_init = ddp.__init__, fsdp.__init__

    def init_ddp(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
    ) -> None:
        ddp_init(self, module, None, None, *args, **kw)

    def init_fsdp(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("device_id") is not None:
            kwargs["device_id"] = CPU
        fsdp_init(self, module, *args, **kwargs)

    ddp.__init__, fsdp.__init__ = init_ddp, init_fsdp
    checks: Any = _init_utils
    if hasattr(checks, "_check_module_states_for_sync_module_states"):  # gloo broadcasts them well
        checks._check_module_states_for_sync_module_states = lambda module_states: None
