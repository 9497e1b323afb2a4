"""Cases of torch's pipelining schedules: the last stage's losses and every stage's gradients; not their speed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from . import LOOSE, Context, case

_SCHEDULES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_WIDTH = 16


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def _stage_indices(ctx: Context, name: str) -> tuple[list[int], int]:
    if issubclass(get_schedule_class(name), PipelineScheduleSingle):
        return [ctx.rank], ctx.world_size
    total = 2 * ctx.world_size
    return [ctx.rank, total - 1 - ctx.rank if name in _V_SHAPED else ctx.rank + ctx.world_size], total


def _register_schedules() -> None:
    for name in _SCHEDULES:

        def run(ctx: Context, name: str = name) -> Any:
            indices, total = _stage_indices(ctx, name)
            chunks = []
            for index in indices:
                torch.manual_seed(index)
                chunks.append(Chunk())
            stages = [
                PipelineStage(chunk, index, total, torch.device("cpu"))
                for chunk, index in zip(chunks, indices, strict=True)
            ]
            num_microbatches = 2 * ctx.world_size
            schedule = get_schedule_class(name)(
                stages[0] if len(stages) == 1 else stages, n_microbatches=num_microbatches, loss_fn=F.mse_loss
            )
            torch.manual_seed(1)
            inputs, target = torch.randn(num_microbatches * 2, _WIDTH), torch.randn(num_microbatches * 2, _WIDTH)
            losses: list[torch.Tensor] = []
            arguments = (inputs,) if 0 in indices else ()
            keywords = {"target": target, "losses": losses} if total - 1 in indices else {}
            schedule.step(*arguments, **keywords)
            return losses, [parameter.grad for chunk in chunks for parameter in chunk.parameters()]

        case(f"pipeline_{name.lower()}", tolerance=LOOSE)(run)


_register_schedules()


@case(tolerance=LOOSE)
def pipeline_for_evaluation(ctx: Context) -> Any:
    torch.manual_seed(ctx.rank)
    stage = PipelineStage(Chunk(), ctx.rank, ctx.world_size, torch.device("cpu"))
    schedule = get_schedule_class("GPipe")(stage, n_microbatches=4)
    torch.manual_seed(1)
    inputs = torch.randn(8, _WIDTH)
    with torch.no_grad():
        return schedule.step(inputs) if ctx.rank == 0 else schedule.step()
