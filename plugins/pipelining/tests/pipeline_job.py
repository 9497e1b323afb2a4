"""A pipeline job on CPU that runs several schedules one after another and writes down what torch planned.

    prism record --nproc-per-node 8 ... -- pipeline_job.py PLAN.json SCHEDULE...

There are two replicas of the pipeline, on even and on odd ranks. Each schedule runs one optimizer step. It holds no
test, and nothing in it knows about Prism.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

WIDTH, MICROBATCHES, REPLICAS = 16, 8, 2


def run(name: str, plans: dict[str, list[list[str]]], pipeline: dist.ProcessGroup, replicas: dist.ProcessGroup) -> None:
    rank, num_ranks = pipeline.rank(), pipeline.size()
    schedule_class = get_schedule_class(name)
    is_single = issubclass(schedule_class, PipelineScheduleSingle)
    num_stages = num_ranks if is_single else 2 * num_ranks
    is_v = name in ("ZBVZeroBubble", "DualPipeV")
    own = [rank] if is_single else [rank, num_stages - 1 - rank if is_v else rank + num_ranks]
    modules, stages = [], []
    for index in own:
        torch.manual_seed(index)
        modules.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        stages.append(PipelineStage(modules[-1], index, num_stages, torch.device("cpu"), group=pipeline))
    schedule = schedule_class(
        stages[0] if is_single else stages, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(100 + replicas.rank())
    data = torch.randn(MICROBATCHES * 2, WIDTH)
    losses: list[torch.Tensor] = []
    has_last = num_stages - 1 in own
    target = {"target": data * 0.5, "losses": losses} if has_last else {}
    schedule.step(*([data] if 0 in own else []), **target)
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=replicas)
    optimizer.step()
    order = schedule._get_pipeline_order() if is_single else schedule.pipeline_order_with_comms
    plans[name] = [[str(action) for action in order[at] if action is not None] for at in range(num_ranks)]
    if has_last and replicas.rank() == 0:
        print(f"step {len(plans) - 1} loss {torch.stack(losses).mean().item()!r}", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pipelines = [dist.new_group(list(range(at, world_size, REPLICAS))) for at in range(REPLICAS)]
    replicas = [dist.new_group(list(range(at, at + REPLICAS))) for at in range(0, world_size, REPLICAS)]
    plans: dict[str, list[list[str]]] = {}
    for name in sys.argv[2:]:
        run(name, plans, pipelines[rank % REPLICAS], replicas[rank // REPLICAS])
    if rank == 0 and sys.argv[1] != "-":
        Path(sys.argv[1]).write_text(json.dumps(plans))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
