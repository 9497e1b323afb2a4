"""A pipeline of torch.distributed.pipelining whose stages take given times, one stage a rank: layers sleep.

    prism observe --nproc-per-node 4 -o run.prism -- benchmarks/paced_pipeline.py --schedule gpipe --microbatches 8
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from pacing import Pace
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Layer(nn.Module):
    def __init__(self, width: int, forward_ms: float) -> None:
        super().__init__()
        self.linear, self.forward_ms = nn.Linear(width, width), forward_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        paced: torch.Tensor = Pace.apply(torch.tanh(self.linear(x)), self.forward_ms)
        return paced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=10.0, help="of a stage and microbatch; backward twice that")
    parser.add_argument("--slow-stage", default="-1:1", metavar="STAGE:FACTOR")
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    slow, factor = arguments.slow_stage.split(":")
    layer = Layer(arguments.width, arguments.forward_ms * (float(factor) if rank == int(slow) else 1.0))
    stage = PipelineStage(layer, rank, size, torch.device("cpu"))
    schedule = SCHEDULES[arguments.schedule](stage, arguments.microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)
    for _ in range(arguments.steps):
        x = torch.rand(2 * arguments.microbatches, arguments.width, generator=data)
        given = (x,) if rank == 0 else ()
        target = {"target": torch.zeros_like(x)} if rank == size - 1 else {}
        schedule.step(*given, **target)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
