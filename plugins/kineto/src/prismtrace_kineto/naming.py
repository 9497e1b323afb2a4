"""What words in Kineto traces mean: operations, element types, reductions, categories. Holds tables, no algorithms."""

from __future__ import annotations

import re
from typing import Final

from prismtrace import DType, Op, ReduceOp

DTYPES: Final = {
    "float": DType.FLOAT32, "double": DType.FLOAT64, "half": DType.FLOAT16, "bfloat16": DType.BFLOAT16,
    "float8_e4m3fn": DType.FLOAT8_E4M3FN, "float8_e5m2": DType.FLOAT8_E5M2, "long": DType.INT64, "int": DType.INT32,
    "short": DType.INT16, "char": DType.INT8, "byte": DType.UINT8, "bool": DType.BOOL,
    "complexfloat": DType.COMPLEX64, "complexdouble": DType.COMPLEX128,
}  # fmt: skip
"""PyTorch's scalar types as Kineto writes them, in lower case."""

_OPS: Final = {
    "allreduce": Op.ALL_REDUCE, "broadcast": Op.BROADCAST, "reduce": Op.REDUCE, "allgather": Op.ALL_GATHER,
    "gather": Op.GATHER, "scatter": Op.SCATTER, "reducescatter": Op.REDUCE_SCATTER, "alltoall": Op.ALL_TO_ALL,
    "alltoallv": Op.ALL_TO_ALL, "barrier": Op.BARRIER, "send": Op.SEND, "recv": Op.RECV,
}  # fmt: skip
_DECORATION: Final = re.compile(r"[_\s]|base|coalesced|into|tensor|single|oop|^nccl:|^c10d::")
_KERNEL_OP: Final = re.compile(
    r"(?:nccl|rccl)\w*?(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|AllToAll)", re.IGNORECASE
)
_REDUCE: Final = re.compile(r"_(Sum|Prod|Min|Max|Avg|PreMulSum|SumPostDiv)_", re.IGNORECASE)
_REDUCE_OPS: Final = {
    "sum": ReduceOp.SUM, "prod": ReduceOp.PRODUCT, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "avg": ReduceOp.AVG,
    "premulsum": ReduceOp.PREMUL_SUM, "sumpostdiv": ReduceOp.AVG,
}  # fmt: skip
_COMMUNICATION: Final = re.compile(r"(?:^|[\s:(])(?:nccl|rccl|msccl)", re.IGNORECASE)

GPU_CATEGORIES: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
RUNTIME_CATEGORIES: Final = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver"})
COMMUNICATION_RECORD: Final = "record_param_comms"
STEP_NAME: Final = re.compile(r"ProfilerStep#(\d+)$")


def op_of(name: str) -> Op:
    """The operation that `Collective name` or an annotation names; UNSPECIFIED when it is none that is known."""
    return _OPS.get(_DECORATION.sub("", name.lower()), Op.UNSPECIFIED)


def op_of_kernel(name: str) -> Op:
    """The operation in the name of a kernel; a SendRecv kernel may be several things and is UNSPECIFIED."""
    found = _KERNEL_OP.search(name)
    return op_of(found[1]) if found else Op.UNSPECIFIED


def reduce_op_of_kernel(name: str) -> ReduceOp:
    """The reduction in the name of a kernel."""
    found = _REDUCE.search(name)
    return _REDUCE_OPS[found[1].lower()] if found else ReduceOp.UNSPECIFIED


def is_communication(name: str) -> bool:
    """Whether a kernel is one of NCCL or of a library with the same interface."""
    return _COMMUNICATION.search(name) is not None
