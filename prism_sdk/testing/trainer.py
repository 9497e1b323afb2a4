"""A small training engine that does one of everything that adapters name; `train.py` runs it.

    prism record --nproc-per-node 4 --slots 2 -o bare.prism -m prism_sdk.testing.train

Two pipeline stages (one with an odd number of ranks), data parallel over the rest, one expert layer a stage. Each thing
that a framework does is one method of `Engine`, for adapters to wrap. It is no example of good training code, and knows
nothing of traces.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Engine", "main"]

_WIDTH, _TOKENS = 8, 16


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; in the backward pass the gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, counts_in: list[int], counts_out: list[int], group: Any
    ) -> torch.Tensor:  # fmt: skip
        ctx.counts_in, ctx.counts_out, ctx.group = counts_in, counts_out, group
        received = rows.new_empty(sum(counts_out), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), counts_out, counts_in, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        back = gradient.new_empty(sum(ctx.counts_in), gradient.shape[1])
        dist.all_to_all_single(back, gradient.contiguous(), ctx.counts_in, ctx.counts_out, group=ctx.group)
        return back, None, None, None


class Engine:
    """One rank of the job. Every public method is one kind of unit."""

    def __init__(self, *, num_microbatches: int = 2) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.num_stages = 2 if world_size % 2 == 0 else 1
        self.num_replicas = world_size // self.num_stages
        self.stage, self.replica = divmod(rank, self.num_replicas)
        groups = [
            dist.new_group(
                list(range(stage * self.num_replicas, (stage + 1) * self.num_replicas)), group_desc="toy_replicas"
            )
            for stage in range(self.num_stages)
        ]
        self.group = groups[self.stage]
        self.num_microbatches = num_microbatches
        torch.manual_seed(self.stage)
        self.layers = nn.ModuleDict(
            {"dense": nn.Linear(_WIDTH, _WIDTH), "router": nn.Linear(_WIDTH, self.num_replicas)}
        )
        torch.manual_seed(100 + rank)
        self.expert = nn.Linear(_WIDTH, _WIDTH)
        self.parameters = [*self.layers.parameters(), *self.expert.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05)
        self._data = torch.Generator().manual_seed(rank)
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self.losses: list[float] = []

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stage == self.num_stages - 1

    def train_step(self) -> float | None:
        """One step: all forward passes, all backward passes in two halves, gradients, optimizer. Mean loss, or None."""
        self.losses = []
        self.gather_parameters("dense")
        for microbatch in range(self.num_microbatches):
            self.forward_microbatch(microbatch)
        for microbatch in range(self.num_microbatches):
            self.backward_inputs(microbatch)
            self.backward_weights(microbatch)
        self.reduce_gradients("dense")
        self.optimizer_step()
        return sum(self.losses) / len(self.losses) if self.losses else None

    def gather_parameters(self, layer: str) -> None:
        """Every replica brings its share of a layer's weight."""
        weight = self.layers[layer].get_parameter("weight").detach()
        shares = [torch.empty_like(weight) for _ in range(self.num_replicas)]
        dist.all_gather(shares, weight, group=self.group)
        weight.copy_(torch.stack(shares).mean(0))

    def forward_microbatch(self, microbatch: int) -> None:
        """From the previous stage's activations, or from data, to the next stage's."""
        if self.stage == 0:
            x = torch.randn(_TOKENS, _WIDTH, generator=self._data)
        else:
            x = self.receive(microbatch, source=self.stage - 1, what="activation")
        self._inputs[microbatch] = x.requires_grad_()
        self._outputs[microbatch] = y = self.expert_layer(torch.tanh(self.layers["dense"](x)))
        if self.is_last:
            self._outputs[microbatch] = loss = (y - x.detach().sin()).square().mean()
            self.losses.append(loss.item())
        else:
            self.send(y.detach(), microbatch, target=self.stage + 1, what="activation")

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """The order of tokens by expert, and how many each expert gets."""
        choice = self.layers["router"](x).argmax(1)
        counts = torch.bincount(choice, minlength=self.num_replicas)
        return choice.argsort(stable=True), [int(count) for count in counts]

    def expert_layer(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens to the ranks of their experts, and back."""
        order, counts = self.route(x)
        tokens, counts_out = self.dispatch(x[order], counts)
        processed = torch.tanh(self.expert(tokens))
        back = self.combine(processed, counts, counts_out)
        restored = torch.empty_like(x).index_copy(0, order, back)
        return x + restored

    def dispatch(self, rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Send rows to their experts; what came, and how much from each rank."""
        counts_out = torch.empty(self.num_replicas, dtype=torch.int64)
        dist.all_to_all_single(counts_out, torch.tensor(counts), group=self.group)
        received = [int(count) for count in counts_out]
        tokens: torch.Tensor = _Exchange.apply(rows, counts, received, self.group)  # type: ignore[no-untyped-call]
        return tokens, received

    def combine(self, tokens: torch.Tensor, counts: list[int], counts_out: list[int]) -> torch.Tensor:
        """Send processed rows back to where they came from."""
        rows: torch.Tensor = _Exchange.apply(tokens, counts_out, counts, self.group)  # type: ignore[no-untyped-call]
        return rows

    def backward_inputs(self, microbatch: int) -> None:
        """Gradients of the stage's inputs, which the stage before waits for."""
        x, y = self._inputs[microbatch], self._outputs[microbatch]
        if self.is_last:
            gradient = torch.ones_like(y)
        else:
            gradient = self.receive(microbatch, source=self.stage + 1, what="gradient")
        self._gradients[microbatch] = gradient
        (of_input,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        if self.stage > 0:
            self.send(of_input, microbatch, target=self.stage - 1, what="gradient")

    def backward_weights(self, microbatch: int) -> None:
        """Gradients of the stage's weights, which nobody waits for."""
        y, gradient = self._outputs.pop(microbatch), self._gradients.pop(microbatch)
        del self._inputs[microbatch]
        torch.autograd.backward(y, gradient, inputs=[p for p in self.parameters if p.requires_grad])

    def reduce_gradients(self, layer: str) -> None:
        """Means over the replicas."""
        for parameter in self.layers[layer].parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= self.num_replicas

    def optimizer_step(self) -> None:
        """New weights."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def send(self, tensor: torch.Tensor, microbatch: int, *, target: int, what: str) -> None:
        """To the same replica of another stage."""
        dist.send(tensor.contiguous(), target * self.num_replicas + self.replica)

    def receive(self, microbatch: int, *, source: int, what: str) -> torch.Tensor:
        """From the same replica of another stage."""
        tensor = torch.empty(_TOKENS, _WIDTH)
        dist.recv(tensor, source * self.num_replicas + self.replica)
        return tensor


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a few steps and write the losses of the last stage's first rank to stdout."""
    parser = argparse.ArgumentParser(prog="trainer", description="A small job that does one of everything.")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    engine = Engine(num_microbatches=options.microbatches)
    for step in range(options.steps):
        loss = engine.train_step()
        if loss is not None and engine.replica == 0:
            sys.stdout.write(f"step {step} loss {loss!r}\n")
            sys.stdout.flush()
    dist.destroy_process_group()
