"""Cases of rendezvous stores: the job's own and ones that the program makes; no tensor travels here."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from . import Context, attempt, case


@case()
def store_values(ctx: Context) -> Any:
    store = _get_default_store()
    store.set(f"values/{ctx.rank}", f"of {ctx.rank}")
    values = [store.get(f"values/{peer}") for peer in ctx.peers]
    store.wait([f"values/{peer}" for peer in ctx.peers])
    return values, store.check([f"values/{ctx.rank}"]), store.check(["values/none"])


@case()
def store_counter_as_barrier(ctx: Context) -> Any:
    store = _get_default_store()
    mine = store.add("counter/arrived", 1)
    if mine == ctx.world_size:
        store.set("counter/all", "yes")
    return store.get("counter/all"), store.add("counter/arrived", 0)


@case()
def store_compare_set(ctx: Context) -> Any:
    store = _get_default_store()
    won = store.compare_set("election", "", str(ctx.rank)) == str(ctx.rank).encode()
    dist.barrier()
    winners: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(winners, won)
    agreed: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(agreed, store.get("election"))
    return sum(winners), len(set(agreed))


@case()
def store_prefix(ctx: Context) -> Any:
    store = _get_default_store()
    prefixed = dist.PrefixStore("mine", store)
    if ctx.rank == 0:
        prefixed.set("key", "value")
    dist.barrier()
    return prefixed.get("key"), dist.PrefixStore("other", store).check(["key"])


@case()
def store_wait_times_out(ctx: Context) -> Any:
    store = _get_default_store()
    return attempt(lambda: store.wait(["never"], timedelta(milliseconds=200)), text=False)


@case()
def store_waits_for_a_late_key(ctx: Context) -> Any:
    """A rank blocked in ``get`` must let the one that sets the key run."""
    store = _get_default_store()
    if ctx.rank == ctx.world_size - 1:
        dist.barrier()
        store.set("late", "here")
        return b"here"
    dist.barrier()
    return store.get("late")


@case()
def store_delete_and_count(ctx: Context) -> Any:
    store = _get_default_store()
    result = None
    if ctx.rank == 0:
        store.set("short-lived", "x")
        result = store.delete_key("short-lived"), store.check(["short-lived"])
    dist.barrier()
    return result


@case()
def store_many_keys(ctx: Context) -> Any:
    store = _get_default_store()
    keys = [f"many/{ctx.rank}/{index}" for index in range(3)]
    store.multi_set(keys, ["a", "b", "c"])
    return store.multi_get(keys)


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@case()
def store_of_its_own(ctx: Context) -> Any:
    port: list[Any] = [free_port() if ctx.rank == 0 else None]
    dist.broadcast_object_list(port, src=0)
    store = dist.TCPStore("127.0.0.1", port[0], ctx.world_size, is_master=ctx.rank == 0, timeout=timedelta(seconds=30))
    store.set(str(ctx.rank), f"from {ctx.rank}")
    values = [store.get(str(peer)) for peer in ctx.peers]
    count = store.add("left", 1)
    dist.barrier()  # the master must outlive the others' last request
    return values, count <= ctx.world_size


@case()
def store_in_a_file(ctx: Context) -> Any:
    store = dist.FileStore(str(ctx.scratch / "store"), ctx.world_size)
    store.set(str(ctx.rank), f"from {ctx.rank}")
    values = [store.get(str(peer)) for peer in ctx.peers]
    dist.barrier()
    return values


@case()
def store_in_memory(ctx: Context) -> Any:
    store = dist.HashStore()
    setter = threading.Timer(0.05, lambda: store.set("key", "value"))
    setter.start()
    value = store.get("key")
    setter.join()
    return value, store.num_keys()
