"""Keeps a stream of a GPU busy as a collective that runs there would: for a time, or until it is released.

Responsible for the kernel that stands for NCCL's; when it runs and until when is slicing.py's business (for a time), or
the releaser's (holding.py).

NCCL's kernels take processors and memory from what computes beside them: a job that overlaps communication is slower
for it by some percent.  A kernel of NCCL has a CTA of some 640 threads for each channel, from its launch until the last
rank has come and all bytes have moved.  The one here takes as many processors, and moves memory where its time is
known; how much it reads and writes matters little beside that (../../../spec/decisions/0420-holding-streams.md).
torch compiles it (NVRTC, from torch 2.9 on); where it cannot, one thread spins for a time, which takes time alone.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime.calls import Call
from prism_sdk.runtime.oncuda.driver import Driver
from prismtrace import Op

NUM_BLOCKS, NUM_THREADS = 24, 640
"""Thread blocks and threads in each; NCCL 2.28 launches so many between two H200s over NVLink."""

_MESSAGE_BLOCKS = 16  # NCCL's channels of a message between two ranks, as measured there
_LONGEST_NS = 1_000_000_000
MEMORY_BYTES = 64 << 20
"""What kernels that occupy read and write: more than caches hold."""

_ELEMENT_BYTES = 16
_CYCLES_TO_MEASURE = 4_000_000

_FOR_A_TIME = r"""
extern "C" __global__ void __launch_bounds__(640) prism_occupy(
    int4* memory, int num_elements, int wait_ns, int duration_ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    for (now = start; now - start < (unsigned long long)wait_ns;) {
        __nanosleep(100);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    }
    if (duration_ns == 0) return;
    start = now;
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

# One thread asks the host, which is slow and holds up others; all look at the gate that it opens. It also says that the
# stream goes on: what the stream itself writes behind the kernel would hold up all streams that share its connection.
_UNTIL_RELEASED = r"""
extern "C" __global__ void __launch_bounds__(640) prism_hold(
    const volatile unsigned* flag, volatile unsigned* done, unsigned ticket, volatile unsigned* gate, int4* memory,
    int num_elements, int num_moves) {
    bool asks = threadIdx.x == 0 && blockIdx.x == 0;
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    for (int move = 0; move < num_moves; ++move) {
        if (move % 4 == 0) {
            if (asks && (int)(*flag - ticket) >= 0) {
                *gate = ticket;
                *done = ticket;
            }
            if ((int)(*gate - ticket) >= 0) return;
        }
        int4 value = memory[at];
        value.x += 1;
        memory[at] = value;
        at += gridDim.x * blockDim.x;
        if (at >= num_elements) at -= num_elements;
    }
    if (asks) {
        while ((int)(*flag - ticket) < 0) __nanosleep(100);
        *gate = ticket;
        *done = ticket;
    } else if (threadIdx.x == 0) {
        while ((int)(*gate - ticket) < 0) __nanosleep(100);
    }
    __syncthreads();
}
"""
_POINTER, _WORD, _INT = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
_TYPES = {
    "prism_occupy": (_POINTER, _INT, _INT, _INT),
    "prism_hold": (_POINTER, _POINTER, _WORD, _POINTER, _POINTER, _INT, _INT),
}
Launch = Callable[[int, Sequence[int], int], None]


def compile_kernel(source: str, name: str) -> Launch:
    """A kernel for the device at hand: launches it with a number of blocks, its arguments, and on a stream's address.

    Raises whatever torch does where it cannot compile, RuntimeError where it offers nothing.
    """
    compiler: Any = getattr(torch.cuda, "_compile_kernel", None)
    if compiler is None:
        raise RuntimeError(f"torch {torch.__version__} does not compile kernels")
    function = getattr(compiler(source, name), "func", None)
    if function is None:
        raise RuntimeError(f"torch {torch.__version__} does not say where its kernels are")
    driver, types = Driver(), _TYPES[name]

    # by the driver: torch's own way takes the host five times as long, for each operation of a program
    def launch(blocks: int, arguments: Sequence[int], stream: int) -> None:
        values = [kind(value) for kind, value in zip(types, arguments, strict=True)]
        driver.launch(function, blocks, NUM_THREADS, stream, values)

    return launch


def blocks_for(call: Call, num_blocks: int) -> int:
    """How many blocks an operation takes where a collective takes `num_blocks`."""
    if call.op is Op.BARRIER or not num_blocks:
        return min(num_blocks, 1)
    return min(num_blocks, _MESSAGE_BLOCKS) if call.is_p2p else num_blocks


class HoldKernel:
    """Occupies streams until they are released, and moves as many bytes of memory as the operation brings meanwhile.

    Of each kernel one block looks at the host's memory, the others at a word of the device's that it sets: four blocks
    that ask the host all the time make kernels beside them take up to four times as long.
    """

    def __init__(self, flags: torch.Tensor, gates: torch.Tensor, memory: torch.Tensor, num_blocks: int) -> None:
        """`flags`: the 32-bit words that the device shares with the releaser; `gates`: others, 0, on the device.

        `memory`: what is moved, flat bytes of the device. Raises UnsupportedError.
        """
        self.num_blocks = num_blocks
        self._kept = flags, gates, memory
        self._flags, self._gates, self._num_gates = flags.data_ptr(), gates.data_ptr(), gates.numel()
        self._memory, self._num_elements = memory.data_ptr(), memory.numel() // _ELEMENT_BYTES
        try:
            self._launch = compile_kernel(_UNTIL_RELEASED, "prism_hold")
        except Exception as error:
            hint = "leave the option out: streams are then held without taking SMs"
            raise UnsupportedError(f"-O occupy: {error}", hint=hint) from error

    def hold(self, call: Call, stream: Any, ticket: int, *, release: int, done: int) -> None:
        """`stream` goes on once word `release` is `ticket`, which is written to word `done` then."""
        blocks = blocks_for(call, self.num_blocks)
        num_bytes = max(sum([tensor.nbytes for tensor in tensors]) for tensors in (call.contribution, call.outputs))
        arguments = (
            self._flags + 4 * release, self._flags + 4 * done, ticket, self._gates + 4 * (ticket % self._num_gates),
            self._memory, self._num_elements, num_bytes // (blocks * NUM_THREADS * _ELEMENT_BYTES),
        )  # fmt: skip
        self._launch(blocks, arguments, stream.cuda_stream)


def hold_kernel(
    flags: torch.Tensor, gates: torch.Tensor, memory: torch.Tensor, option: str | None
) -> HoldKernel | None:
    """What holds streams; None where they wait without taking processors.

    Args:
        flags: the words that the device shares with the releaser.
        gates: as many words of the device as operations may be held at once.
        memory: what is moved meanwhile.
        option: the value of `-O occupy`; absent: as many blocks as in a calibration, where torch compiles kernels.

    Raises:
        UnsupportedError: the option asks for blocks, and torch compiles no kernels here.
    """
    num_blocks = blocks_of(option)
    if not num_blocks:
        return None
    try:
        return HoldKernel(flags, gates, memory, num_blocks)
    except UnsupportedError:
        if option is not None:
            raise
        return None


def blocks_of(option: str | None) -> int:
    """What `-O occupy` says: a number of thread blocks, or `off`, which is 0; absent: `NUM_BLOCKS`."""
    return NUM_BLOCKS if option is None else 0 if option == "off" else int(option)


class Occupier:
    """Occupies the streams of one device for a time."""

    def __init__(self, *, num_blocks: int = NUM_BLOCKS) -> None:
        """With `num_blocks` 0 it takes time alone: one thread."""
        self._num_blocks = num_blocks
        self._run: Callable[[int, int, int], None] | None = None
        self.kind = ""
        """Once something was occupied: kernel, spin, or nothing (where torch offers neither)."""

    def occupy(self, duration_ns: int, *, wait_ns: int = 0, call: Call | None = None) -> None:
        """Keep the current stream busy for about that long, moving memory, after waiting for others; the host goes on.

        With a `call` by as many blocks as that takes.
        """
        wait_ns, duration_ns = (min(max(time_ns, 0), _LONGEST_NS) for time_ns in (wait_ns, duration_ns))
        if not wait_ns + duration_ns:
            return
        if self._run is None:
            self._run = self._prepare()
        self._run(self._num_blocks if call is None else blocks_for(call, self._num_blocks), wait_ns, duration_ns)

    def _prepare(self) -> Callable[[int, int, int], None]:
        if self._num_blocks:
            with contextlib.suppress(Exception):  # no NVRTC, an older driver: the spinning thread is left
                return self._kernel(compile_kernel(_FOR_A_TIME, "prism_occupy"))
        sleep: Any = getattr(torch.cuda, "_sleep", None)
        if sleep is None:
            self.kind = "nothing"
            return lambda blocks, wait_ns, duration_ns: None
        self.kind = "spin"
        per_ns = _cycles_per_ns(sleep)
        return lambda blocks, wait_ns, duration_ns: sleep(round((wait_ns + duration_ns) * per_ns))

    def _kernel(self, launch: Launch) -> Callable[[int, int, int], None]:
        memory = torch.zeros(MEMORY_BYTES // 4, dtype=torch.int32, device="cuda")
        count = MEMORY_BYTES // _ELEMENT_BYTES

        def run(blocks: int, wait_ns: int, duration_ns: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            launch(blocks, (memory.data_ptr(), count, wait_ns, duration_ns), stream)

        run(1, 0, 1)
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
