"""A program of two ranks on gloo that plays NCCL beside every operation; run by prism observe (see test_observe.py)."""

import os
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from nccl_player import Communicator, Nccl

VERSION = int(os.environ.get("PLAYED_VERSION", "5"))


def main() -> None:
    dist.init_process_group("gloo")
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    twin = dist.new_group([0, 1])  # the same members as the world: only the order of things tells them apart
    nccl = Nccl(os.environ["NCCL_PROFILER_PLUGIN"], version=VERSION, gpu_offset_ns=7_000_000_000 * (rank + 1))
    world, second = Communicator(nccl, 0xAAAA, 2, rank, "world"), Communicator(nccl, 0xBBBB, 2, rank)
    kernel_ns = 300_000 if rank == 0 else 100_000  # rank 1 comes last and does not wait
    for step in range(6):
        tensor = torch.ones(64 + step)
        dist.all_reduce(tensor)
        world.call("AllReduce", 64 + step, kernel_ns=kernel_ns)
        dist.all_reduce(tensor, group=twin)
        second.call("AllReduce", 64 + step, kernel_ns=kernel_ns)
        out = torch.zeros(2 * 32)
        dist.all_gather_into_tensor(out, torch.ones(32))
        world.call("AllGather", 32)
        dist.broadcast(torch.ones(16, dtype=torch.int64), src=1)
        world.call("Broadcast", 16, dtype="ncclInt64", peer=1)
        if rank == 0:
            dist.send(torch.ones(8), 1)
            world.call("Send", 8, peer=1)
        else:
            dist.recv(torch.ones(8), 0)
            world.call("Recv", 8, peer=0)
        works = []
        with nccl.group():
            works.append(dist.isend(torch.ones(128), peer))
            world.call("Send", 128, peer=peer)
            works.append(dist.irecv(torch.ones(128), peer))
            world.call("Recv", 128, peer=peer)
        for work in works:
            work.wait()
        parts = [torch.zeros(4), torch.zeros(4)]
        dist.all_to_all(parts, [torch.ones(4), torch.ones(4)])
        with nccl.group():  # as NCCL does it: messages, also to oneself
            for other in (rank, peer):
                world.call("Send", 4, peer=other)
                world.call("Recv", 4, peer=other)
        dist.barrier()
        world.call("AllReduce", 1)
    dist.destroy_process_group()


main()
