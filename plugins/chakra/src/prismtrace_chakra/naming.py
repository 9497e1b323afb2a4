"""Turns the names that PyTorch, NCCL and Chakra give to operations and element types into the registry's. No I/O."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

from prismtrace import DType, Op, ReduceOp

COMM_TYPES: Final = (
    Op.ALL_REDUCE,
    Op.REDUCE,
    Op.ALL_GATHER,
    Op.GATHER,
    Op.SCATTER,
    Op.BROADCAST,
    Op.ALL_TO_ALL,
    Op.REDUCE_SCATTER,
    Op.REDUCE_SCATTER,
    Op.BARRIER,
)
"""Chakra's collective types by number. 7 and 8 are both reduce-scatters."""

COMM_TYPE_OF: Final = {op: number for number, op in reversed(list(enumerate(COMM_TYPES)))}

_BY_NAME: Final = (
    ("allreduce", Op.ALL_REDUCE),
    ("reducescatter", Op.REDUCE_SCATTER),
    ("allgather", Op.ALL_GATHER),
    ("alltoall", Op.ALL_TO_ALL),
    ("broadcast", Op.BROADCAST),
    ("reduce", Op.REDUCE),
    ("gather", Op.GATHER),
    ("scatter", Op.SCATTER),
    ("barrier", Op.BARRIER),
    ("monitoredbarrier", Op.BARRIER),
    ("isend", Op.SEND),
    ("send", Op.SEND),
    ("irecv", Op.RECV),
    ("recv", Op.RECV),
)

_PREFIX: Final = re.compile(r"^(?:\w+:{1,2})?(?:nccl(?:dev)?kernel_?)?", re.IGNORECASE)

_DTYPES: Final = {
    "float": DType.FLOAT32,
    "double": DType.FLOAT64,
    "c10::half": DType.FLOAT16,
    "half": DType.FLOAT16,
    "c10::bfloat16": DType.BFLOAT16,
    "bfloat16": DType.BFLOAT16,
    "c10::float8_e4m3fn": DType.FLOAT8_E4M3FN,
    "c10::float8_e5m2": DType.FLOAT8_E5M2,
    "long int": DType.INT64,
    "long": DType.INT64,
    "int": DType.INT32,
    "short int": DType.INT16,
    "short": DType.INT16,
    "signed char": DType.INT8,
    "char": DType.INT8,
    "unsigned char": DType.UINT8,
    "byte": DType.UINT8,
    "bool": DType.BOOL,
    "c10::complex<float>": DType.COMPLEX64,
    "c10::complex<double>": DType.COMPLEX128,
}

_REDUCTIONS: Final = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN, "prod": ReduceOp.PRODUCT}
_KERNEL: Final = re.compile(r"nccl(?:Dev)?Kernel_\w+?_(Sum|Max|Min|Prod)(?:_|\()")


@lru_cache(maxsize=4096)
def op_of(name: str) -> Op:
    """The operation that a name says, such as `nccl:all_reduce`, `c10d::_allgather_base_`, `ncclKernel_AllReduce`."""
    plain = _PREFIX.sub("", name).lower().replace("_", "").replace(" ", "")
    return next((op for start, op in _BY_NAME if plain.startswith(start)), Op.UNSPECIFIED)


def reduction_of(name: str, op: Op) -> ReduceOp:
    """The reduction that the name of an NCCL kernel says; UNSPECIFIED where it says none."""
    if op not in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER):
        return ReduceOp.UNSPECIFIED
    found = _KERNEL.search(name)
    return _REDUCTIONS[found[1].lower()] if found else ReduceOp.UNSPECIFIED


def dtype_of(text: str) -> DType:
    """The element type of `Tensor(float)`, also inside `GenericList[...]`; UNSPECIFIED when there is none."""
    start = text.find("Tensor(")
    if start < 0:
        return DType.UNSPECIFIED
    end = text.find(")", start)
    return _DTYPES.get(text[start + 7 : end].strip().lower(), DType.UNSPECIFIED)


def num_elements(value: Any) -> int | None:
    """Elements of a tensor [id, storage, offset, elements, size of one, device], or of a list of tensors."""
    total, found = 0, False
    waiting = [value]
    for _ in range(1 << 20):
        if not waiting:
            break
        item = waiting.pop()
        if not isinstance(item, list):
            continue
        if len(item) in (6, 7) and isinstance(item[-1], str) and all(isinstance(part, int) for part in item[:5]):
            total, found = total + max(item[3], 0), True
        else:
            waiting.extend(item)
    return total if found else None
