"""Compensates reductions on the device in one kernel, where torch compiles kernels.

Responsible for the kernel; filling.py does the same in five steps of torch, on any device and for any type of numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from prismtrace import ReduceOp

_THREADS, _MOST_BLOCKS = 256, 264
_SOURCE = """
__device__ __forceinline__ float wide(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ __forceinline__ unsigned short narrow(float value) {
  unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((bits >> 16) | 0x40u);
  return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
extern "C" __global__ void prism_float32(
    const unsigned* total, const unsigned* live, const unsigned* then, unsigned* out, int n, double factor,
    volatile unsigned* differs, int ticket) {
  int mine = 0;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x) {
    unsigned sum = total[i], now = live[i], was = then[i];
    if (now != was) {
      float change = __fmul_rn(__fsub_rn(__uint_as_float(now), __uint_as_float(was)), (float)factor);
      sum = __float_as_uint(__fadd_rn(__uint_as_float(sum), change));
      mine = 1;
    }
    out[i] = sum;
  }
  if (__syncthreads_or(mine) && threadIdx.x == 0) *differs = (unsigned)ticket;
}
extern "C" __global__ void prism_bfloat16(
    const unsigned short* total, const unsigned short* live, const unsigned short* then, unsigned short* out, int n,
    double factor, volatile unsigned* differs, int ticket) {
  int mine = 0;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x) {
    unsigned short sum = total[i], now = live[i], was = then[i];
    if (now != was) {
      float change = wide(narrow(__fmul_rn(wide(narrow(__fsub_rn(wide(now), wide(was)))), (float)factor)));
      sum = narrow(__fadd_rn(wide(sum), change));
      mine = 1;
    }
    out[i] = sum;
  }
  if (__syncthreads_or(mine) && threadIdx.x == 0) *differs = (unsigned)ticket;
}
"""
_NAMES = {torch.float32: "prism_float32", torch.bfloat16: "prism_bfloat16"}


class Compensator:
    """The kernels for the device at hand."""

    def __init__(self) -> None:
        """Raises RuntimeError, or what torch raises, where it compiles none."""
        compile_kernel: Any = getattr(torch.cuda, "_compile_kernel", None)
        if compile_kernel is None:
            raise RuntimeError(f"torch {torch.__version__} does not compile kernels")
        self._kernels = {dtype: compile_kernel(_SOURCE, name) for dtype, name in _NAMES.items()}

    def __call__(
        self, output: torch.Tensor, result: torch.Tensor, live: torch.Tensor, then: torch.Tensor, op: ReduceOp,
        num_members: int, differs: torch.Tensor, ticket: int,
    ) -> bool:  # fmt: skip
        """Start it on the current stream; False where there is no kernel for this.

        Args:
            output: flat, contiguous.
            result: the recorded result, flat bytes, as `live` and `then`: what this rank gives and gave.
            op: the reduction.
            num_members: ranks of the group.
            differs: one 32-bit word, which becomes `ticket` if any element differs.
        """
        kernel = self._kernels.get(output.dtype)
        if kernel is None or op not in (ReduceOp.SUM, ReduceOp.AVG) or not 0 < output.numel() < 1 << 31:
            return False
        factor = 1.0 / num_members if op is ReduceOp.AVG else 1.0
        blocks = min(-(-output.numel() // (4 * _THREADS)), _MOST_BLOCKS)
        kernel(
            grid=(blocks, 1, 1), block=(_THREADS, 1, 1),
            args=[result, live, then, output, output.numel(), factor, differs, ticket],
        )  # fmt: skip
        return True
