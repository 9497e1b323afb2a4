"""Cases of work handles, coalescing and object collectives: how results come back, not what the collectives do."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from . import Context, case, expect
from .collectives import of_rank, whole


@case()
def async_waits_out_of_order(ctx: Context) -> Any:
    tensors = [whole(ctx, offset=index) for index in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for index in (3, 0, 5, 1, 4, 2):
        works[index].wait()
    return tensors


@case()
def async_never_waited_for(ctx: Context) -> Any:
    """The backend's threads write the results all the same, some time after the barrier."""
    dropped, kept, into = whole(ctx), whole(ctx, offset=1), torch.zeros(6 * ctx.world_size)
    wanted = [whole(ctx), whole(ctx, offset=1), torch.zeros(6 * ctx.world_size)]
    dist.all_reduce(wanted[0])
    dist.broadcast(wanted[1], src=0)
    dist.all_gather_into_tensor(wanted[2], whole(ctx))
    dist.all_reduce(dropped, async_op=True)
    works = [dist.all_gather_into_tensor(into, whole(ctx), async_op=True), dist.broadcast(kept, src=0, async_op=True)]
    dist.barrier()
    _until_equal([dropped, kept, into], wanted)
    group = dist.new_group()
    last = whole(ctx)
    dist.all_reduce(last, group=group, async_op=True)
    dist.destroy_process_group(group)
    dist.barrier()
    _until_equal([last], wanted[:1])
    return [dropped, kept, into, last, [work.wait() for work in works]]


def _until_equal(tensors: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Give the backend's threads some seconds; what is wrong then is seen in what the case returns."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not all(map(torch.equal, tensors, wanted)):
        time.sleep(0.01)


@case()
def async_of_every_kind(ctx: Context) -> Any:
    reduced, sent = whole(ctx), whole(ctx, offset=1)
    gathered, into = [torch.zeros(6) for _ in ctx.peers], torch.zeros(6 * ctx.world_size)
    scattered, exchanged = torch.zeros(2), torch.zeros(ctx.world_size)
    works = [
        dist.all_reduce(reduced, async_op=True),
        dist.broadcast(sent, src=0, async_op=True),
        dist.all_gather(gathered, whole(ctx), async_op=True),
        dist.all_gather_into_tensor(into, whole(ctx), async_op=True),
        dist.reduce_scatter_tensor(scattered, whole(ctx, 2 * ctx.world_size), async_op=True),
        dist.all_to_all_single(exchanged, whole(ctx, ctx.world_size), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    return reduced, sent, gathered, into, scattered, exchanged


@case()
def async_overlapping_groups(ctx: Context) -> Any:
    other = dist.new_group(list(ctx.peers))
    first, second = whole(ctx), whole(ctx, offset=1)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, group=other, async_op=True)]
    works[1].wait()
    works[0].wait()
    dist.destroy_process_group(other)
    return first, second


@case()
def is_completed_polling(ctx: Context) -> Any:
    tensor = whole(ctx)
    work = dist.all_reduce(tensor, async_op=True)
    deadline = time.monotonic() + 60
    while not work.is_completed():
        if time.monotonic() > deadline:
            return "never completed"
        time.sleep(0.001)
    work.wait()
    return tensor


@case()
def is_completed_polling_of_recv(ctx: Context) -> Any:
    """Rank 0 polls for a message that comes late; gloo itself never says that it is there, so polling is bounded."""
    tensor = whole(ctx, offset=3)
    if ctx.rank == 0:
        tensor = torch.zeros(6)
        work = dist.irecv(tensor, 1)
        deadline = time.monotonic() + 1
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        work.wait()
    elif ctx.rank == 1:
        time.sleep(0.2)
        dist.send(tensor, 0)
    return tensor


@case()
def wait_twice(ctx: Context) -> Any:
    tensor = whole(ctx)
    work = dist.all_reduce(tensor, async_op=True)
    return work.wait(), work.wait(), work.is_completed(), tensor


@case()
def wait_with_timeout(ctx: Context) -> Any:
    tensor = whole(ctx)
    work = dist.all_reduce(tensor, async_op=True)
    return work.wait(timeout=timedelta(seconds=30)), tensor


@case()
def handle_dropped(ctx: Context) -> Any:
    """Nobody waits for the first reduction; the barrier and the second one come after it."""
    first, second = whole(ctx), whole(ctx, offset=1)
    dist.all_reduce(first, async_op=True)
    dist.all_reduce(second)
    dist.barrier()
    time.sleep(0.1)
    return second


@case()
def synchronous_returns_nothing(ctx: Context) -> Any:
    return [
        dist.all_reduce(whole(ctx)) is None,
        dist.broadcast(whole(ctx), src=0) is None,
        dist.barrier() is None,
        dist.all_gather([torch.zeros(6) for _ in ctx.peers], whole(ctx)) is None,
    ]


@case()
def future_wait(ctx: Context) -> Any:
    work = dist.all_reduce(whole(ctx), async_op=True)
    return work.get_future().wait()


@case()
def future_then(ctx: Context) -> Any:
    work = dist.all_reduce(whole(ctx), async_op=True)
    chained = work.get_future().then(lambda future: future.value()[0] * 2)
    return chained.wait(), chained.done()


@case()
def work_result(ctx: Context) -> Any:
    work = dist.all_reduce(whole(ctx), async_op=True)
    work.wait()
    return work.result()


@case()
def future_collected(ctx: Context) -> Any:
    works = [dist.all_reduce(whole(ctx, offset=index), async_op=True) for index in range(4)]
    return torch.futures.wait_all([work.get_future() for work in works])


@case()
def futures_crossed(ctx: Context) -> Any:
    """Half of the ranks ask for the futures of two groups in the one order, half in the other."""
    groups = [dist.new_group(list(ctx.peers)), dist.new_group(list(ctx.peers))]
    tensors = [whole(ctx), whole(ctx, offset=1)]
    order = (0, 1) if dist.get_rank() % 2 else (1, 0)
    futures = [dist.all_reduce(tensors[i], group=groups[i], async_op=True).get_future() for i in order]
    total = torch.futures.collect_all(futures).then(lambda done: sum(one.value()[0].sum() for one in done.value()))
    return total.wait(), tensors


@case()
def future_callback(ctx: Context) -> Any:
    seen: list[Any] = []
    work = dist.all_reduce(whole(ctx), async_op=True)
    work.get_future().add_done_callback(lambda done: seen.append(done.value()[0].tolist()))
    for _ in range(2):
        dist.barrier()
    for _ in range(100):
        if seen:
            break
        time.sleep(0.01)
    return seen


@case()
def all_reduce_coalesced(ctx: Context) -> Any:
    tensors = [whole(ctx), whole(ctx, 3, offset=1)]
    dist.all_reduce_coalesced(tensors)
    more = [whole(ctx, 2), whole(ctx, 5, offset=2)]
    dist.all_reduce_coalesced(more, async_op=True).wait()
    return tensors, more


@case()
def all_gather_coalesced(ctx: Context) -> Any:
    outputs = [[torch.zeros(6), torch.zeros(3)] for _ in ctx.peers]
    dist.all_gather_coalesced(outputs, [whole(ctx), whole(ctx, 3, offset=1)])
    return outputs


@case()
def coalescing_manager_all_reduce(ctx: Context) -> Any:
    tensors = [whole(ctx, offset=index) for index in range(3)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    more = [whole(ctx, offset=index) for index in range(3)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in more:
            dist.all_reduce(tensor)
    manager.wait()
    return tensors, more


@case()
def coalescing_manager_gathers(ctx: Context) -> Any:
    outputs = [torch.zeros(6 * ctx.world_size) for _ in range(2)]
    with _coalescing_manager():
        for index, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, whole(ctx, offset=index))
    return outputs


@case()
def coalescing_manager_reduce_scatters(ctx: Context) -> Any:
    outputs = [torch.zeros(3) for _ in range(2)]
    with _coalescing_manager():
        for index, output in enumerate(outputs):
            dist.reduce_scatter_tensor(output, whole(ctx, 3 * ctx.world_size, offset=index))
    return outputs


@case(optional=True)
def coalescing_manager_with_device(ctx: Context) -> Any:
    """With a device the manager brackets the backend's own coalescing, as DeepSpeed uses it.

    It has a group of its own: where the backend refuses, torch queues every later collective of that group for ever.
    """
    group = dist.new_group(list(ctx.peers))
    outputs = [torch.zeros(6 * ctx.world_size) for _ in range(2)]
    with _coalescing_manager(group=group, device=torch.device("cpu"), async_ops=True) as manager:
        for index, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, whole(ctx, offset=index), group=group)
    manager.wait()
    expect(outputs, [torch.cat([of_rank(ctx, peer, offset=index) for peer in ctx.peers]) for index in range(2)])
    return outputs


@case()
def object_broadcast(ctx: Context) -> Any:
    objects: list[Any] = [{"rank": ctx.rank}, "text", None, [1.5, ctx.rank]] if ctx.rank == 1 else [None] * 4
    dist.broadcast_object_list(objects, src=1)
    return objects


@case()
def object_all_gather(ctx: Context) -> Any:
    gathered: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(gathered, {"rank": ctx.rank, "text": "x" * (ctx.rank * 100)})
    return gathered


@case()
def object_gather(ctx: Context) -> Any:
    gathered: list[Any] | None = [None] * ctx.world_size if ctx.rank == 0 else None
    dist.gather_object((ctx.rank, "a" * ctx.rank), gathered, dst=0)
    return gathered


@case()
def object_scatter(ctx: Context) -> Any:
    received: list[Any] = [None]
    objects = [{"for": peer} for peer in ctx.peers] if ctx.rank == 0 else None
    dist.scatter_object_list(received, objects, src=0)
    return received


@case()
def object_send_and_recv(ctx: Context) -> Any:
    objects: list[Any] = ["from 0", {"n": 3}] if ctx.rank == 0 else [None, None]
    if ctx.rank == 0:
        dist.send_object_list(objects, dst=1)
    elif ctx.rank == 1:
        dist.recv_object_list(objects, src=0)
    return objects


@case()
def object_with_tensors(ctx: Context) -> Any:
    gathered: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(gathered, {"value": whole(ctx)})
    return gathered
