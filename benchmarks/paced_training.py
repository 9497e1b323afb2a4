"""A training script whose computation takes given times, on any machine: layers sleep instead of calculating.

    python benchmarks/step_time.py --ranks 8 --any-cpus -- benchmarks/paced_training.py --jitter 0.1

Real ranks that sleep disturb each other little, so a job can be compared with its emulation on a noisy machine of few
cores, and what is left of the error is the emulation's own: structure, waiting, overlap.  The communication is real.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
import torch.distributed as dist
from pacing import Pace
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--forward-ms", type=float, default=5.0, help="of a layer; backward takes twice as long")
parser.add_argument("--jitter", type=float, default=0.0, help="standard deviation of a duration's logarithm")
parser.add_argument("--imbalance", type=float, default=0.0, help="how much longer the last rank computes")
parser.add_argument("--long-every", type=int, default=1, help="every so many steps one takes --long-factor as long")
parser.add_argument("--long-factor", type=float, default=1.0)
parser.add_argument("--wrap", choices=("fsdp2", "ddp"), default="fsdp2")


class Layer(nn.Module):
    def __init__(self, width: int, forward_ms: float) -> None:
        super().__init__()
        self.linear, self.forward_ms = nn.Linear(width, width), forward_ms

    def forward(self, x):
        return Pace.apply(torch.tanh(self.linear(x)), self.forward_ms, args.jitter)


args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
random.seed(f"{time.time_ns()} {rank}")  # another run, another jitter
forward_ms = args.forward_ms * (1 + args.imbalance * rank / max(size - 1, 1))
layers = [Layer(args.width, forward_ms) for _ in range(args.layers)]
model = nn.Sequential(*layers)
if args.wrap == "ddp":
    model = DistributedDataParallel(model, bucket_cap_mb=args.width**2 * 8 / 2**20)
else:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(rank)
for step in range(args.steps):
    for layer in layers:
        layer.forward_ms = forward_ms * (args.long_factor if (step + 1) % args.long_every == 0 else 1.0)
    loss = model(torch.rand(4, args.width, generator=data)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
