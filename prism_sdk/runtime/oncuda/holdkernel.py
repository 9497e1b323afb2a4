"""Holds a stream by a kernel that takes as much of the device as a collective's would, in place of a bare wait.

Responsible for the kernel and its launch; when it ends is the releaser's business, as for a bare wait.

A kernel of NCCL has a CTA of some 640 threads for each channel, from its launch until the last rank has come and all
bytes have moved, and what computes beside it has that many SMs less.  How much it reads and writes matters little
beside that (../../../spec/decisions/0420-holding-streams.md).
"""

from __future__ import annotations

from typing import Any

import torch

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime.calls import Call
from prismtrace import Op

_THREADS = 640
_MESSAGE_SMS = 2  # channels of a message between two ranks
_SOURCE = """
extern "C" __global__ void __launch_bounds__(640) prism_hold(const volatile unsigned* flag, unsigned ticket) {
  if (threadIdx.x == 0) {
    while ((int)(*flag - ticket) < 0) __nanosleep(100);
  }
  __syncthreads();
}
"""


def sms_for(call: Call, num_sms: int) -> int:
    """How many SMs an operation takes where a collective takes `num_sms`."""
    if call.op is Op.BARRIER or not num_sms:
        return min(num_sms, 1)
    return min(num_sms, _MESSAGE_SMS) if call.is_p2p else num_sms


class HoldKernel:
    """The kernel, compiled for the device at hand."""

    def __init__(self, flags: torch.Tensor, num_sms: int) -> None:
        """`flags`: the 32-bit words that the device shares with the releaser. Raises UnsupportedError."""
        self.num_sms = num_sms
        self._flags = flags
        compile_kernel: Any = getattr(torch.cuda, "_compile_kernel", None)
        try:
            if compile_kernel is None:
                raise RuntimeError(f"torch {torch.__version__} does not compile kernels")
            self._kernel = compile_kernel(_SOURCE, "prism_hold")
        except Exception as error:
            hint = "leave the option out: streams are then held without taking SMs"
            raise UnsupportedError(f"-O occupy: {error}", hint=hint) from error

    def hold(self, call: Call, word: int, ticket: int) -> None:
        """The current stream goes on once word `word` is `ticket`."""
        grid = (sms_for(call, self.num_sms), 1, 1)
        self._kernel(grid=grid, block=(_THREADS, 1, 1), args=[self._flags[word : word + 1], ticket])
