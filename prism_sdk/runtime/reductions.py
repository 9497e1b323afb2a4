"""Which reduction an operator of c10d asks for.

Responsible for the code of its boxed ``ReduceOp`` argument. From torch 2.10 on that object says it; before, nothing in
Python can read it. There the methods of process groups and the functional collectives, through which every program
names a reduction, are followed: what they were given holds for the operators that they dispatch, on their thread. The
rest, C++ inside of torch (DDP's reducer), asks for sums.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, ReduceOp

_METHODS = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip
_FUNCTIONAL = (
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_out",
)  # fmt: skip
_CODES = {"sum": 0, "avg": 1, "product": 2, "min": 3, "max": 4, "band": 5, "bor": 6, "bxor": 7, "premul_sum": 8}
_SUM = _CODES["sum"]


class _Asked(threading.local):
    code = _SUM


_asked = _Asked()
_last: tuple[Any, int] = (None, _SUM)  # each operator's argument is asked for twice
_library: torch.library.Library | None = None


def code_of(boxed: Any) -> int:
    """c10d::ReduceOp::RedOpType of an operator's argument."""
    global _last
    last, code = _last
    if boxed is last:
        return code
    try:  # the method as an attribute takes 5 us to look up
        op = boxed._get_method("op") if isinstance(boxed, torch.ScriptObject) else boxed.op
    except (AttributeError, RuntimeError):
        return _asked.code
    code = int(op())
    _last = boxed, code
    return code


def follow_reductions() -> None:
    """Where an operator's argument does not say it, learn it from whoever asks for a reduction in this process."""
    global _library
    if _library is not None or hasattr(torch.classes.c10d.ReduceOp(), "op"):
        return
    _library = torch.library.Library("_c10d_functional", "IMPL")
    for name in _METHODS:
        if method := getattr(ProcessGroup, name, None):
            setattr(ProcessGroup, name, _following(method))
    for name in _FUNCTIONAL:
        if operator := getattr(torch.ops._c10d_functional, name, None):
            for key in ("CPU", "CUDA"):
                _library.impl(name, _following_functional(operator.default), key)


def _following(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def follow(*args: Any, **kwargs: Any) -> Any:
        before, _asked.code = _asked.code, _named((*args[1:], *kwargs.values()))
        try:
            return method(*args, **kwargs)
        finally:
            _asked.code = before

    return follow


def _named(values: Iterable[Any]) -> int:
    """The reduction among the arguments of a method of ProcessGroup: in its options, or by itself."""
    for value in values:
        op: Any = getattr(value, "reduceOp", value)
        if not isinstance(op, ReduceOp.RedOpType):
            op = getattr(op, "op", None)
        if isinstance(op, ReduceOp.RedOpType):
            return int(op.value)
    return _SUM


def _following_functional(operator: Any) -> Callable[..., Any]:
    place = [argument.name for argument in operator._schema.arguments].index("reduce_op")
    # the implementation is one for all devices: that of a device that nobody overrides
    original = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def follow(*args: Any) -> Any:
        before, _asked.code = _asked.code, _CODES.get(args[place].lower(), _SUM)
        try:
            return operator.redispatch(original, *args)
        finally:
            _asked.code = before

    return follow
