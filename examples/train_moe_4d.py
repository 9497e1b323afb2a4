"""Train a small mixture-of-experts model with tensor, pipeline, expert and data parallelism, laid out as Megatron does.

    torchrun --nproc-per-node 16 train_moe_4d.py --tp 2 --pp 2 --ep 2 --steps 3

Ranks count through tensor, then data, then pipeline parallelism; expert parallelism folds into data parallelism.  It is
an ordinary training script: nothing in it knows about Prism.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, TOKENS, VOCAB = 64, 32, 128


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--ep", type=int, default=2, help="expert-parallel ranks")
    parser.add_argument("--experts", type=int, default=4, help="experts in each layer")
    parser.add_argument("--layers", type=int, default=1, help="layers in each stage")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches a step")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    parser.add_argument("--same", action="store_true", help="the same data on all replicas")
    return parser.parse_args()


class Grid:
    """The process groups of a rank; every rank makes all of them in the same order."""

    def __init__(self, args: argparse.Namespace) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        tp, pp, ep = args.tp, args.pp, args.ep
        self.dp = dp = world // (tp * pp)
        self.tp_rank, self.dp_rank, self.stage = rank % tp, rank // tp % dp, rank // (tp * dp)
        self.ep_rank = self.dp_rank % ep

        def at(t: int, d: int, p: int) -> int:
            return t + tp * (d + dp * p)

        self.tp_group = self._make([[at(t, d, p) for t in range(tp)] for p in range(pp) for d in range(dp)],
                                   "TENSOR_MODEL_PARALLEL_GROUP")  # fmt: skip
        self.pp_group = self._make([[at(t, d, p) for p in range(pp)] for d in range(dp) for t in range(tp)],
                                   "PIPELINE_MODEL_PARALLEL_GROUP")  # fmt: skip
        self.dp_group = self._make([[at(t, d, p) for d in range(dp)] for p in range(pp) for t in range(tp)],
                                   "DATA_PARALLEL_GROUP")  # fmt: skip
        self.ep_group = self._make(
            [[at(t, k * ep + e, p) for e in range(ep)] for p in range(pp) for k in range(dp // ep) for t in range(tp)],
            "EXPERT_MODEL_PARALLEL_GROUP",
        )
        self.edp_group = self._make(
            [[at(t, k * ep + e, p) for k in range(dp // ep)] for p in range(pp) for e in range(ep) for t in range(tp)],
            "EXPERT_DATA_PARALLEL_GROUP",
        )
        self.is_first, self.is_last = self.stage == 0, self.stage == pp - 1
        self.previous = at(self.tp_rank, self.dp_rank, self.stage - 1)
        self.next = at(self.tp_rank, self.dp_rank, self.stage + 1)

    @staticmethod
    def _make(groups: list[list[int]], description: str) -> dist.ProcessGroup:
        mine = None
        for ranks in groups:
            group = dist.new_group(ranks, group_desc=description)
            if dist.get_rank() in ranks:
                mine = group
        assert mine is not None
        return mine


class _Copy(torch.autograd.Function):
    """To all tensor-parallel ranks; gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """The sum over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Exchange(torch.autograd.Function):
    """Rows to the expert-parallel ranks they belong to; gradients go back."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sizes = sent, received, group
        out = x.new_empty((sum(received), x.shape[1]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        sent, received, group = ctx.sizes
        out = gradient.new_empty((sum(sent), gradient.shape[1]))
        dist.all_to_all_single(out, gradient.contiguous(), sent, received, group=group)
        return out, None, None, None


class Layer(nn.Module):
    """A dense part split over tensor parallelism, then experts split over expert parallelism."""

    def __init__(self, args: argparse.Namespace, grid: Grid) -> None:
        super().__init__()
        self.grid, self.ep, self.num_experts = grid, args.ep, args.experts
        self.up = nn.Linear(WIDTH, 4 * WIDTH // args.tp)
        self.down = nn.Linear(4 * WIDTH // args.tp, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, args.experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(args.experts // args.ep))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + _Sum.apply(self.down(F.gelu(self.up(_Copy.apply(x, self.grid.tp_group)))), self.grid.tp_group)
        return x + self.mixture(x.reshape(-1, WIDTH)).view_as(x)

    def mixture(self, rows: torch.Tensor) -> torch.Tensor:
        weights = self.router(rows).softmax(-1)
        chosen = weights.argmax(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.grid.ep_group)
        sent = counts.view(self.ep, -1).sum(1).tolist()
        received = theirs.view(self.ep, -1).sum(1).tolist()
        arrived = _Exchange.apply(rows[order], sent, received, self.grid.ep_group)
        expert = torch.cat([
            torch.arange(len(self.experts)).repeat_interleave(row) for row in theirs.view(self.ep, -1)
        ])  # fmt: skip
        done = torch.zeros_like(arrived)
        for index, module in enumerate(self.experts):
            picked = (expert == index).nonzero().flatten()
            done = done.index_copy(0, picked, F.gelu(module(arrived[picked])))
        back = _Exchange.apply(done, received, sent, self.grid.ep_group)
        result = torch.zeros_like(rows).index_copy(0, order, back)
        return result * weights.gather(1, chosen[:, None])


class Stage(nn.Module):
    def __init__(self, args: argparse.Namespace, grid: Grid) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH) if grid.is_first else None
        self.layers = nn.ModuleList(Layer(args, grid) for _ in range(args.layers))
        self.head = nn.Linear(WIDTH, VOCAB) if grid.is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def next_batch(grid: Grid, generator: torch.Generator) -> torch.Tensor:
    """Tokens come from tensor-parallel rank 0."""
    tokens = torch.randint(VOCAB, (2, TOKENS + 1), generator=generator)
    dist.broadcast(tokens, group_src=0, group=grid.tp_group)
    return tokens


def run_step(
    args: argparse.Namespace, grid: Grid, stage: Stage, batches: list[torch.Tensor]
) -> torch.Tensor:
    """One forward, one backward: the schedule that keeps as few microbatches alive as there are stages left."""
    warmup = min(args.pp - grid.stage - 1, len(batches))
    alive: list[tuple[torch.Tensor, torch.Tensor]] = []
    sent: list[dist.Work] = []  # neighbours send to each other at once: waiting at once would block both
    loss = torch.zeros(())

    def forward(index: int) -> None:
        nonlocal loss
        tokens = batches[index]
        x = tokens[:, :-1]
        if not grid.is_first:
            x = torch.empty(2, TOKENS, WIDTH)
            dist.recv(x, grid.previous, group=grid.pp_group)
            x.requires_grad_()
        out = stage(x)
        if grid.is_last:
            out = F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten()) / len(batches)
            loss = loss + out.detach()
        else:
            sent.append(dist.isend(out.detach().contiguous(), grid.next, group=grid.pp_group))
        alive.append((x, out))

    def backward() -> None:
        x, out = alive.pop(0)
        gradient = None
        if not grid.is_last:
            gradient = torch.empty_like(out)
            dist.recv(gradient, grid.next, group=grid.pp_group)
        out.backward(gradient)
        if not grid.is_first:
            sent.append(dist.isend(x.grad, grid.previous, group=grid.pp_group))

    for index in range(warmup):
        forward(index)
    for index in range(warmup, len(batches)):
        forward(index)
        backward()
    for _ in range(warmup):
        backward()
    for work in sent:
        work.wait()
    return loss


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    grid = Grid(args)
    torch.manual_seed(1000 * grid.stage + 10 * grid.tp_rank)
    stage = Stage(args, grid)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1 + (grid.ep_rank if args.same else grid.dp_rank))
    expert_replicas = grid.dp // args.ep
    for step in range(args.steps):
        go_on = torch.tensor([step < args.steps], dtype=torch.int32)
        dist.broadcast(go_on, 0)
        if not go_on.item():
            break
        loss = run_step(args, grid, stage, [next_batch(grid, data) for _ in range(args.microbatches)])
        for name, parameter in stage.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            is_expert = ".experts." in name
            dist.all_reduce(parameter.grad, group=grid.edp_group if is_expert else grid.dp_group)
            parameter.grad /= grid.dp if is_expert else expert_replicas * args.ep
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, group=grid.dp_group)
        dist.barrier()
        if grid.is_last and grid.tp_rank == 0 and grid.dp_rank == 0:
            print(f"step {step} loss {loss.item() / grid.dp!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
