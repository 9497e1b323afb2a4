"""Train a small classifier with DistributedDataParallel and gradient accumulation.

    torchrun --nproc-per-node 2 train_ddp.py --steps 5

It is an ordinary training script: nothing in it knows about Prism.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--width", type=int, default=512, help="width of the hidden layers")
    parser.add_argument("--layers", type=int, default=6, help="number of hidden layers")
    parser.add_argument("--batch", type=int, default=256, help="samples per rank and microbatch")
    parser.add_argument("--microbatches", type=int, default=2, help="microbatches accumulated per step")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the data")
    parser.add_argument("--precise", action="store_true", help="print losses with all their digits")
    return parser.parse_args()


def build_model(width: int, layers: int) -> nn.Module:
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
    return nn.Sequential(*blocks, nn.Linear(width, 10))


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(build_model(args.width, args.layers), bucket_cap_mb=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1000 * args.seed + rank + 1)

    for step in range(args.steps):
        total = torch.zeros(())
        for microbatch in range(args.microbatches):
            inputs = torch.randn(args.batch, args.width, generator=data)
            labels = inputs[:, :10].argmax(dim=1)  # something that can be learnt
            model.require_backward_grad_sync = microbatch == args.microbatches - 1
            loss = F.cross_entropy(model(inputs), labels) / args.microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        dist.all_reduce(total)
        mean = total.item() / world_size
        if rank == 0:
            print(f"step {step} loss {mean!r}" if args.precise else f"step {step} loss {mean:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
