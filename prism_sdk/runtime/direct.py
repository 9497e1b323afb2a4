"""Takes the frequent methods of `ProcessGroup` in Python, before torch dispatches them as `c10d::` operators.

Responsible for telling which calls can do without the dispatcher, and for handing these to the seam; all others go on
to torch, and come by the kernels of intercept.py.

A Python kernel costs a call some 20 us by itself: arguments and result are boxed, and the dispatcher enters Python.
What `torch.distributed` calls is Python already.  A call needs the dispatcher where something besides the backend may
look at it: tensors that are not plain, modes, transforms, the profiler, gradients, compilers.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup

from prism_sdk.runtime.eager import compiler, leave_to_python

if TYPE_CHECKING:
    from prism_sdk.runtime.intercept import Interceptor

Method = Callable[..., Any]

_C: Any = torch._C
_getpid = os.getpid
_dispatch_keys: Callable[[torch.Tensor], Any] = _C._dispatch_keys
_num_modes: Callable[[], int] = _C._len_torch_dispatch_stack
_is_profiled: Callable[[], bool] = _C._autograd._profiler_enabled
_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_registers_works: Callable[[], bool] = getattr(c10d, "_allow_inflight_collective_as_graph_input", lambda: False)


class _Reduction:
    """Stands for the boxed `ReduceOp` of an operator's argument."""

    def __init__(self, code: int) -> None:
        self.op = lambda: code


_REDUCTIONS = tuple(_Reduction(code) for code in range(16))


def _plain_keys() -> dict[int, torch.device]:
    """The dispatch keys of tensors that are nothing but memory on a device."""
    found: dict[int, torch.device] = {}
    for name in ("CPU", "CUDA"):
        kinds = (name, f"Autocast{name}", f"Autograd{name}", "ADInplaceOrView")
        keys = [_C.DispatchKeySet(getattr(_C.DispatchKey, kind)) for kind in kinds]
        inference = keys[0] | keys[1]
        plain = inference | keys[2] | keys[3]
        found |= dict.fromkeys((plain.raw_repr(), inference.raw_repr()), torch.device(name.lower()))
    return found


_PLAIN = _plain_keys()


def _device_of(tensor: Any) -> torch.device | None:
    """Where a tensor is, if a backend may be given it as it is."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return None
    if tensor.requires_grad and _is_grad_enabled():
        return None
    return _PLAIN.get(_dispatch_keys(tensor).raw_repr())


def _place_of(tensors: Any) -> torch.device | None:
    """The device of a list of tensors, as `_device_of`."""
    if type(tensors) is not list or not tensors:
        return None
    device = _device_of(tensors[0])
    for tensor in tensors[1:]:
        if _device_of(tensor) is not device:
            return None
    return device


def _code(options: Any) -> _Reduction:
    return _REDUCTIONS[int(options.reduceOp.op)]


# each gives (device, arguments of the operator, arguments of the backend's method), or None for a call to be dispatched
Arranged = tuple[torch.device, tuple[Any, ...], tuple[Any, ...]] | None


def _all_reduce(tensors: Any, options: Any = None) -> Arranged:
    if type(options) is not c10d.AllreduceOptions or (device := _place_of(tensors)) is None:
        return None
    return device, (tensors, None, _code(options), None, options.asyncOp), (tensors, options)


def _all_reduce_coalesced(tensors: Any, options: Any = None) -> Arranged:
    if type(options) is not c10d.AllreduceCoalescedOptions or (device := _place_of(tensors)) is None:
        return None
    return device, (tensors, None, _code(options), options.asyncOp), (tensors, options)


def _all_gather_list(outputs: Any, inputs: Any, options: Any = None) -> Arranged:
    if type(options) is not c10d.AllgatherOptions or (device := _place_of(inputs)) is None:
        return None
    if type(outputs) is not list or len(outputs) != 1 or _place_of(outputs[0]) is not device:
        return None
    return device, (outputs, inputs, None, options.asyncOp), (outputs, inputs, options)


def _broadcast(tensors: Any, options: Any = None) -> Arranged:
    if type(options) is not c10d.BroadcastOptions or (device := _place_of(tensors)) is None:
        return None
    arguments = (tensors, None, options.rootRank, options.rootTensor, options.asyncOp)
    return device, arguments, (tensors, options)


def _all_gather(output: Any, tensor: Any, options: Any = None) -> Arranged:
    if type(options) is not c10d.AllgatherOptions or (device := _device_of(output)) is None:
        return None
    if _device_of(tensor) is not device:
        return None
    return device, (output, tensor, None, options.asyncOp), (output, tensor, options)


def _reduce_scatter(output: Any, tensor: Any, options: Any = None) -> Arranged:
    if type(options) is not c10d.ReduceScatterOptions or (device := _device_of(output)) is None:
        return None
    if _device_of(tensor) is not device:
        return None
    return device, (output, tensor, None, _code(options), options.asyncOp), (output, tensor, options)


def _all_to_all(output: Any, tensor: Any, splits_out: Any, splits_in: Any, options: Any = None) -> Arranged:
    if type(options) is not c10d.AllToAllOptions or (device := _device_of(output)) is None:
        return None
    if _device_of(tensor) is not device or type(splits_out) is not list or type(splits_in) is not list:
        return None
    arguments = (output, tensor, None, splits_out, splits_in, options.asyncOp)
    return device, arguments, (output, tensor, splits_out, splits_in, options)


def _message(tensors: Any, peer: Any, tag: Any) -> Arranged:
    if type(peer) is not int or type(tag) is not int or (device := _place_of(tensors)) is None:
        return None
    return device, (tensors, None, peer, tag), (tensors, peer, tag)


# method of ProcessGroup, under each of its names -> operator, method of Backend, arrangement
_METHODS: dict[str, tuple[str, str, Callable[..., Arranged]]] = {
    "allreduce": ("allreduce_", "allreduce", _all_reduce),
    "allreduce_coalesced": ("allreduce_coalesced_", "allreduce_coalesced", _all_reduce_coalesced),
    "broadcast": ("broadcast_", "broadcast", _broadcast),
    "allgather": ("allgather_", "allgather", _all_gather_list),
    "_allgather_base": ("_allgather_base_", "_allgather_base", _all_gather),
    "all_gather_single": ("_allgather_base_", "_allgather_base", _all_gather),
    "_reduce_scatter_base": ("_reduce_scatter_base_", "_reduce_scatter_base", _reduce_scatter),
    "reduce_scatter_single": ("_reduce_scatter_base_", "_reduce_scatter_base", _reduce_scatter),
    "alltoall_base": ("alltoall_base_", "alltoall_base", _all_to_all),
    "all_to_all_single": ("alltoall_base_", "alltoall_base", _all_to_all),
    "send": ("send", "send", _message),
    "recv": ("recv_", "recv", _message),
}

_originals: dict[str, Any] = {}  # as they are found in the class


def replace_methods(current: Callable[[], Interceptor | None]) -> None:
    """Replace the methods in this process; `current()` is whom calls are handed to, if anybody."""
    for name, (operator, method, arrange) in _METHODS.items():
        if name not in _originals and name in ProcessGroup.__dict__:
            _originals[name] = ProcessGroup.__dict__[name]
            setattr(ProcessGroup, name, _make(getattr(ProcessGroup, name), operator, method, arrange, current))


def restore_methods() -> None:
    """Give torch its own methods back."""
    while _originals:
        name, original = _originals.popitem()
        setattr(ProcessGroup, name, original)


def _make(
    original: Method, operator: str, method: str, arrange: Callable[..., Arranged],
    current: Callable[[], Interceptor | None],
) -> Method:  # fmt: skip
    num_given = arrange.__code__.co_argcount

    def call(group: ProcessGroup, *given: Any, **named: Any) -> Any:
        interceptor = current()
        if (
            interceptor is None or named or len(given) != num_given
            or (state := interceptor.plain_groups.get(group)) is None
            or compiler() is not None or _num_modes() or _is_profiled() or _transform() is not None
            or _registers_works() or interceptor.pid != _getpid()
            or (arranged := arrange(*given)) is None
        ):  # fmt: skip
            return original(group, *given, **named)
        device, arguments, for_backend = arranged
        seam = interceptor.seam
        if not seam.takes_directly(device):
            return original(group, *given)

        def native() -> Any:
            return getattr(group._get_backend(device), method)(*for_backend)

        try:
            parsed = seam.parse(operator, state, native, arguments)
        except (RuntimeError, IndexError):  # wrong arguments: on the way through torch they are met as such
            return original(group, *given)
        return seam.issue(parsed)

    functools.update_wrapper(call, original)
    leave_to_python(call)
    return call
