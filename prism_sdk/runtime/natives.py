"""Runs a `c10d::` operator on the script's own backend.

Responsible for rebuilding the options that the operator's arguments came from.

It calls the backend's methods, which release the interpreter lock, and not the kernel that was replaced: called from
Python that one keeps the lock, and a worker thread of the backend that needs it (to drop a tensor) blocks for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime.reductions import code_of

_REDUCE_OPS = (
    dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX,
    dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR,
)  # fmt: skip

_CPU = torch.device("cpu")

Native = Callable[[Any, tuple[Any, ...]], Any]


def _options(kind: Any, args: tuple[Any, ...], async_index: int, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    if len(args) > async_index and hasattr(options, "asyncOp"):
        options.asyncOp = args[async_index]
    timeout_ms = args[async_index + 1] if len(args) > async_index + 1 else -1
    if timeout_ms != -1:
        options.timeout = timedelta(milliseconds=timeout_ms)
    return options


def _reduce_op(backend: Any, boxed: Any) -> Any:
    code = code_of(boxed)
    if code >= len(_REDUCE_OPS):
        if backend.name() == "gloo":
            raise RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo")
        raise UnsupportedError("ReduceOp.PREMUL_SUM: its factor does not reach the operator", hint="scale, then sum")
    return _REDUCE_OPS[code]


def _all_reduce(backend: Any, a: tuple[Any, ...]) -> Any:
    return backend.allreduce(a[0], _options(c10d.AllreduceOptions, a, 4, reduceOp=_reduce_op(backend, a[2])))


def _all_reduce_coalesced(backend: Any, a: tuple[Any, ...]) -> Any:
    options = _options(c10d.AllreduceCoalescedOptions, a, 3, reduceOp=_reduce_op(backend, a[2]))
    return backend.allreduce_coalesced(a[0], options)


def _broadcast(backend: Any, a: tuple[Any, ...]) -> Any:
    return backend.broadcast(a[0], _options(c10d.BroadcastOptions, a, 4, rootRank=a[2], rootTensor=a[3]))


def _reduce(backend: Any, a: tuple[Any, ...]) -> Any:
    options = _options(c10d.ReduceOptions, a, 5, reduceOp=_reduce_op(backend, a[2]), rootRank=a[3], rootTensor=a[4])
    return backend.reduce(a[0], options)


def _reduce_scatter_base(backend: Any, a: tuple[Any, ...]) -> Any:
    options = _options(c10d.ReduceScatterOptions, a, 4, reduceOp=_reduce_op(backend, a[3]))
    return backend._reduce_scatter_base(a[0], a[1], options)


def _reduce_scatter(backend: Any, a: tuple[Any, ...]) -> Any:
    options = _options(c10d.ReduceScatterOptions, a, 4, reduceOp=_reduce_op(backend, a[3]))
    return backend.reduce_scatter(a[0], a[1], options)


def _each(method: Native) -> Native:
    """A coalesced operator as its single operations: Backend has no Python binding for the coalesced method.

    A backend that can coalesce does here what that method of it does.
    """

    def run(backend: Any, a: tuple[Any, ...]) -> Any:
        coalesces = bool(getattr(backend, "supports_coalescing", False))
        if coalesces:
            backend._start_coalescing()
        works = [method(backend, (out, tensor, *a[2:])) for out, tensor in zip(a[0], a[1], strict=True)]
        return backend._end_coalescing() if coalesces else Several(works)

    return run


def _all_gather_base(backend: Any, a: tuple[Any, ...]) -> Any:
    return backend._allgather_base(a[0], a[1], _options(c10d.AllgatherOptions, a, 3))


def _barrier(backend: Any, a: tuple[Any, ...]) -> Any:
    options = _options(c10d.BarrierOptions, a, 3, device_ids=list(a[2]))
    if a[0].device.type != "cpu":
        options.device = a[0].device
    return backend.barrier(options)


def _monitored_barrier(backend: Any, a: tuple[Any, ...]) -> None:
    wait_all = a[4] if len(a) > 4 else False
    backend.monitored_barrier(timedelta(milliseconds=a[3]), wait_all_ranks=wait_all)


class Several:
    """The works of a coalesced operator, as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *timeout: timedelta) -> bool:
        results = [work.wait(*timeout) for work in self._works]  # wait for each, also after a failure
        return all(results)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


NATIVES: dict[str, Native] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce_coalesced,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "_allgather_base_": _all_gather_base,
    "allgather_": lambda b, a: b.allgather(a[0], a[1], _options(c10d.AllgatherOptions, a, 3)),
    "allgather_coalesced_": lambda b, a: b.allgather_coalesced(a[0], a[1], _options(c10d.AllgatherOptions, a, 3)),
    "allgather_into_tensor_coalesced_": _each(_all_gather_base),
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_": _reduce_scatter,
    "reduce_scatter_tensor_coalesced_": _each(_reduce_scatter_base),
    "scatter_": lambda b, a: b.scatter(a[0], a[1], _options(c10d.ScatterOptions, a, 4, rootRank=a[3])),
    "gather_": lambda b, a: b.gather(a[0], a[1], _options(c10d.GatherOptions, a, 4, rootRank=a[3])),
    "alltoall_base_": lambda b, a: b.alltoall_base(a[0], a[1], a[3], a[4], _options(c10d.AllToAllOptions, a, 5)),
    "alltoall_": lambda b, a: b.alltoall(a[0], a[1], _options(c10d.AllToAllOptions, a, 3)),
    "barrier": _barrier,
    "monitored_barrier_": _monitored_barrier,
    "send": lambda b, a: b.send(a[0], a[2], a[3]),
    "recv_": lambda b, a: b.recv(a[0], a[2], a[3]),
    "recv_any_source_": lambda b, a: b.recv_anysource(a[0], a[2]),
}


def device_of(args: tuple[Any, ...]) -> torch.device:
    """The device that an operator's tensors are on."""
    first: Any = args[0]
    while isinstance(first, (list, tuple)):
        if not first:
            return torch.device("cpu") if not isinstance(args[1], (list, torch.Tensor)) else device_of((args[1], None))
        first = first[0]
    return _CPU if first.is_cpu else torch.device(first.device.type)
