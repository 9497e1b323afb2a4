"""Keeps a stream of a GPU busy for a time, as a collective that runs there would.

Responsible for the kernel that stands for NCCL's; when it runs and for how long is slicing.py's business.

NCCL's kernels take processors and memory from what computes beside them: a job that overlaps communication is slower
for it by some percent.  The kernel here takes as many processors as NCCL's does between two Hopper GPUs, and moves
memory.  torch compiles it (NVRTC, from torch 2.9 on); where it cannot, one thread spins, which takes time alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

NUM_BLOCKS, NUM_THREADS = 24, 640
"""Thread blocks and threads in each; NCCL 2.28 launches so many between two H200s over NVLink."""

_LONGEST_NS = 1_000_000_000
_MEMORY_BYTES = 64 << 20  # more than caches hold
_CYCLES_TO_MEASURE = 4_000_000

_SOURCE = r"""
extern "C" __global__ void prism_occupy(int4* memory, int num_elements, int duration_ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    do {
        int4 value = memory[at];
        value.x += 1;
        memory[at] = value;
        at += gridDim.x * blockDim.x;
        if (at >= num_elements) at -= num_elements;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < (unsigned long long)duration_ns);
}
"""


class Occupier:
    """Occupies the streams of one device."""

    def __init__(self, *, num_blocks: int = NUM_BLOCKS) -> None:
        """With `num_blocks` 0 it takes time alone: one thread."""
        self._num_blocks = num_blocks
        self._run: Callable[[int], None] | None = None
        self.kind = ""
        """Once something was occupied: kernel, spin, or nothing (where torch offers neither)."""

    def occupy(self, duration_ns: int) -> None:
        """Keep the current stream busy for about that long; the host goes on."""
        if duration_ns <= 0:
            return
        if self._run is None:
            self._run = self._prepare()
        self._run(min(duration_ns, _LONGEST_NS))

    def _prepare(self) -> Callable[[int], None]:
        compile_kernel: Any = getattr(torch.cuda, "_compile_kernel", None)
        if self._num_blocks and compile_kernel is not None:
            with contextlib.suppress(Exception):  # no NVRTC, an older driver: the spinning thread is left
                return self._kernel(compile_kernel)
        sleep: Any = getattr(torch.cuda, "_sleep", None)
        if sleep is None:
            self.kind = "nothing"
            return lambda duration_ns: None
        self.kind = "spin"
        per_ns = _cycles_per_ns(sleep)
        return lambda duration_ns: sleep(round(duration_ns * per_ns))

    def _kernel(self, compile_kernel: Any) -> Callable[[int], None]:
        kernel = compile_kernel(_SOURCE, "prism_occupy")
        memory = torch.zeros(_MEMORY_BYTES // 4, dtype=torch.int32, device="cuda")
        count = _MEMORY_BYTES // 16

        def run(duration_ns: int) -> None:
            kernel(grid=(self._num_blocks, 1, 1), block=(NUM_THREADS, 1, 1), args=[memory, count, duration_ns])

        run(1)
        torch.cuda.synchronize()  # whether it runs at all shows now
        self.kind = "kernel"
        return run


def _cycles_per_ns(sleep: Callable[[int], None]) -> float:
    """The clock of the current device, by a kernel that spins for a number of cycles; waits for it, once."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    sleep(_CYCLES_TO_MEASURE)
    end.record()
    end.synchronize()
    return float(_CYCLES_TO_MEASURE / max(start.elapsed_time(end) * 1e6, 1.0))
