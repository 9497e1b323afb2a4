"""Cases of the data- and tensor-parallel trainers of torch: DDP, FSDP1, FSDP2, TP, ZeRO, checkpoints, loaders."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from . import LOOSE, Context, case
from .groups import mesh_shape


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, use_all: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        x = self.head(x)
        return x + self.unused(x) if use_all else x


def train(ctx: Context, model: nn.Module, *, steps: int = 3, optimizer: Any = None, **kwargs: Any) -> Any:
    """Losses and final parameters of a short training run with data that differ by rank."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(ctx.rank)
    losses = []
    for _ in range(steps):
        inputs, labels = torch.randn(8, 16), torch.randint(0, 4, (8,))
        loss = F.cross_entropy(model(inputs, **kwargs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return losses, [parameter_value(parameter) for parameter in model.parameters()]


def parameter_value(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return value.detach().clone()


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


@case(tolerance=LOOSE)
def ddp(ctx: Context) -> Any:
    return train(ctx, DistributedDataParallel(fresh(), bucket_cap_mb=0.002))


@case(tolerance=LOOSE)
def ddp_no_sync(ctx: Context) -> Any:
    model = DistributedDataParallel(fresh())
    torch.manual_seed(ctx.rank)
    with model.no_sync():
        model(torch.randn(8, 16)).square().mean().backward()
    local = [parameter.grad.clone() for parameter in model.parameters()]
    model(torch.randn(8, 16)).square().mean().backward()
    return local, [parameter.grad for parameter in model.parameters()]


@case(tolerance=LOOSE)
def ddp_find_unused_parameters(ctx: Context) -> Any:
    model = DistributedDataParallel(fresh(), find_unused_parameters=True)
    return train(ctx, model, use_all=ctx.rank == 0)


@case(tolerance=LOOSE)
def ddp_static_graph(ctx: Context) -> Any:
    return train(ctx, DistributedDataParallel(fresh(), static_graph=True, gradient_as_bucket_view=True))


@case(tolerance=1e-2)
def ddp_compressing_hook(ctx: Context) -> Any:
    model = DistributedDataParallel(fresh())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(ctx, model)


@case(tolerance=LOOSE)
def ddp_hook_of_the_user(ctx: Context) -> Any:
    model = DistributedDataParallel(fresh())
    calls: list[int] = []

    def hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(ctx.world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(calls, hook)
    return train(ctx, model), len(calls) > 0


@case(tolerance=LOOSE)
def ddp_uneven_inputs(ctx: Context) -> Any:
    model = DistributedDataParallel(fresh())
    torch.manual_seed(ctx.rank)
    with Join([model]):
        for _ in range(1 + ctx.rank):
            model(torch.randn(8, 16)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@case(tolerance=LOOSE)
def ddp_broadcasts_buffers(ctx: Context) -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)))
    torch.manual_seed(ctx.rank)
    for _ in range(2):
        model(torch.randn(8, 16)).square().mean().backward()
    model(torch.randn(8, 16))
    return list(model.buffers())


@case(tolerance=LOOSE)
def zero_redundancy_optimizer(ctx: Context) -> Any:
    model = DistributedDataParallel(fresh())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return train(ctx, model, optimizer=optimizer)


def _fsdp1(ctx: Context, strategy: ShardingStrategy) -> Any:
    model = FullyShardedDataParallel(
        fresh(),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    losses, _ = train(ctx, model)
    norm = model.clip_grad_norm_(1.0)
    with FullyShardedDataParallel.summon_full_params(model):
        return losses, norm, [parameter.detach().clone() for parameter in model.parameters()]


@case(tolerance=LOOSE)
def fsdp1_full_shard(ctx: Context) -> Any:
    return _fsdp1(ctx, ShardingStrategy.FULL_SHARD)


@case(tolerance=LOOSE)
def fsdp1_shard_grad_op(ctx: Context) -> Any:
    return _fsdp1(ctx, ShardingStrategy.SHARD_GRAD_OP)


@case(tolerance=LOOSE)
def fsdp2(ctx: Context) -> Any:
    model = fresh()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    losses, parameters = train(ctx, model)
    return losses, parameters


@case(tolerance=LOOSE)
def fsdp2_accumulating(ctx: Context) -> Any:
    model = fresh()
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(ctx.rank)
    for microbatch in range(3):
        model.set_requires_gradient_sync(microbatch == 2)
        model(torch.randn(8, 16)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm.full_tensor(), [parameter.grad.full_tensor() for parameter in model.parameters()]


@case(tolerance=LOOSE)
def fsdp2_hybrid(ctx: Context) -> Any:
    mesh = init_device_mesh("cpu", mesh_shape(ctx), mesh_dim_names=("replicate", "shard"))
    model = fresh()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(ctx, model)


def _tensor_parallel(model: Net, mesh: Any) -> Net:
    for layer in model.layers:
        parallelize_module(layer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


@case(tolerance=LOOSE)
def tensor_parallel(ctx: Context) -> Any:
    model = _tensor_parallel(fresh(), init_device_mesh("cpu", (ctx.world_size,)))
    same = Context(rank=0, world_size=ctx.world_size, scratch=ctx.scratch)  # all ranks see the same data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return train(same, model, optimizer=optimizer)


@case(tolerance=LOOSE)
def tensor_parallel_with_fsdp2(ctx: Context) -> Any:
    mesh = init_device_mesh("cpu", mesh_shape(ctx), mesh_dim_names=("dp", "tp"))
    model = _tensor_parallel(fresh(), mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    by_replica = Context(rank=mesh.get_local_rank("dp"), world_size=ctx.world_size, scratch=ctx.scratch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return train(by_replica, model, optimizer=optimizer)


@case(tolerance=LOOSE, slow=True)
def distributed_checkpoint(ctx: Context) -> Any:
    model = fresh()
    fully_shard(model)
    train(ctx, model, steps=1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(ctx.scratch / "checkpoint"))
    other = Net()
    fully_shard(other)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=str(ctx.scratch / "checkpoint"))
    other.load_state_dict(state["model"])
    return [parameter_value(parameter) for parameter in other.parameters()]


@case()
def loader_with_workers(ctx: Context) -> Any:
    """Worker processes beside a rank must not take part in the job."""
    data = torch.utils.data.TensorDataset(torch.arange(24).float())
    sampler = torch.utils.data.DistributedSampler(data, shuffle=True, seed=3)
    loader = torch.utils.data.DataLoader(data, batch_size=3, sampler=sampler, num_workers=2)
    seen = [batch[0] for batch in loader]
    total = torch.stack([batch.sum() for batch in seen]).sum()
    dist.all_reduce(total)
    return seen, total
