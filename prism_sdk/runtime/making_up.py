"""Values of virtual members that the recording does not have as they are: none at all, or of another contribution.

Responsible for the arithmetic on the host; on a GPU oncuda/filling.py does the same.
"""

from __future__ import annotations

import torch

from prism_sdk.runtime.calls import Call
from prism_sdk.runtime.manifest import Expected
from prism_sdk.runtime.tensors import Bytes, deliver
from prismtrace import Op, ReduceOp


def copy_view(target: memoryview, source: memoryview) -> None:
    """All of `source` into `target`, which is as long."""
    target[:] = source


def fill_resized(target: memoryview, recorded: memoryview) -> None:
    """Fill `target` with rows that were recorded in another number: cut, or repeated from their beginning.

    Without any there are only zeros. What others gave for rows that they never saw is not known: these have the right
    kind of values, so that a program goes on as it would, and no meaning.
    """
    if not len(recorded):
        target[:] = bytes(len(target))
    for at in range(0, len(target) if len(recorded) else 0, max(len(recorded), 1)):
        part = target[at : at + len(recorded)]
        part[:] = recorded[: len(part)]


def is_without_values(call: Call, one: Expected) -> bool:
    """Whether virtual members give something that was not recorded."""
    if one.sources or (call.op is Op.SCATTER and call.group.group_rank == call.root):
        return False
    return bool(call.deliveries or call.receive_tensors)


def give_own(call: Call) -> None:
    """No values were recorded: virtual members give what this rank gives, and zeros where it gives nothing.

    Not right, but what programs that check for equal shapes go on with. A broadcast leaves what is there.
    """
    own = Bytes(call.contribution)
    mine = memoryview(own.joined())

    def read_into(member: int, offset: int, view: memoryview) -> None:
        piece = mine[offset : offset + len(view)]
        view[:] = piece if len(piece) == len(view) else bytes(len(view))

    if call.op is not Op.BROADCAST:
        deliver(call, read_into, lambda member: call.send_bytes or ())


def compensate(call: Call, output: torch.Tensor, result: memoryview, *, then: memoryview, now: memoryview) -> None:
    """Put the recorded result into `output`, less what this rank contributed `then` and with what it contributes `now`.

    Products and bitwise reductions stay as recorded: their results do not say what the virtual members contributed.
    """
    total, live = _tensor(result, output), _tensor(now, output)
    if call.reduce_op is ReduceOp.SUM and output.dtype is not torch.bool:
        total.add_(live.sub_(_tensor(then, output)))
    elif call.reduce_op is ReduceOp.AVG and (output.is_floating_point() or output.is_complex()):
        total.add_(live.sub_(_tensor(then, output)).div_(len(call.group.ranks)))
    elif call.reduce_op is ReduceOp.MAX:
        total = torch.maximum(total, live)
    elif call.reduce_op is ReduceOp.MIN:
        total = torch.minimum(total, live)
    with torch.inference_mode():
        output.data.copy_(total.view(output.shape))


def _tensor(view: memoryview, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(view), dtype=like.dtype)  # on the CPU, whatever the default device is
