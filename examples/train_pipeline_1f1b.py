"""Train a small transformer cut into pipeline stages, one stage a rank, with the 1F1B schedule.

    torchrun --nproc-per-node 4 train_pipeline_1f1b.py --steps 5

It is an ordinary training script: nothing in it knows about Prism.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--width", type=int, default=192, help="model dimension")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks per stage")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--vocab", type=int, default=512, help="vocabulary size")
    parser.add_argument("--context", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences per microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches per step, at least one a stage")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the data")
    parser.add_argument("--precise", action="store_true", help="print losses with all their digits")
    return parser.parse_args()


class Stage(nn.Module):
    """The layers of one rank; the first stage embeds, the last one predicts."""

    def __init__(self, args: argparse.Namespace, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.width) if is_first else nn.Identity()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                args.width, args.heads, 4 * args.width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(args.layers)
        )
        self.head = nn.Linear(args.width, args.vocab) if is_last else nn.Identity()
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(args.context), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == world_size - 1

    torch.manual_seed(args.seed + rank)
    module = Stage(args, is_first=is_first, is_last=is_last)
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=args.microbatches, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1000 * args.seed + 1)  # all stages draw the same tokens

    for step in range(args.steps):
        shape = (args.batch * args.microbatches, 1)
        start = torch.randint(args.vocab, shape, generator=data)
        stride = torch.randint(1, 4, shape, generator=data)
        tokens = (start + stride * torch.arange(args.context + 1)) % args.vocab
        losses: list[torch.Tensor] = []
        inputs = (tokens[:, :-1],) if is_first else ()
        if is_last:
            schedule.step(*inputs, target=tokens[:, 1:], losses=losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        if is_last:
            value = torch.stack(losses).mean().item()
            print(f"step {step} loss {value!r}" if args.precise else f"step {step} loss {value:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
