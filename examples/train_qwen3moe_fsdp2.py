"""Train a tiny, randomly initialised Hugging Face Qwen3-MoE with FSDP2.

    torchrun --nproc-per-node 2 train_qwen3moe_fsdp2.py --steps 5

It is an ordinary training script: nothing in it knows about Prism. It needs ``transformers``.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--width", type=int, default=128, help="model dimension")
    parser.add_argument("--layers", type=int, default=4, help="number of decoder layers")
    parser.add_argument("--experts", type=int, default=8, help="experts per layer, two of them active for each token")
    parser.add_argument("--vocab", type=int, default=512, help="vocabulary size")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the data")
    parser.add_argument("--precise", action="store_true", help="print losses with all their digits")
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        moe_intermediate_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=args.width // 8,
        num_experts=args.experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=1e-3,
        max_position_embeddings=args.context,
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = build_model(args).train()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1000 * args.seed + rank + 1)

    for step in range(args.steps):
        start = torch.randint(args.vocab, (args.batch, 1), generator=data)
        stride = torch.randint(1, 4, (args.batch, 1), generator=data)
        tokens = (start + stride * torch.arange(args.context)) % args.vocab
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        value = output.loss.item()
        if rank == 0:
            print(f"step {step} loss {value!r}" if args.precise else f"step {step} loss {value:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
