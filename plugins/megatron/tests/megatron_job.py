"""A small GPT on Megatron-Core, written as for GPUs: `prism ... --device cpu` runs it without one.

    prism record --device cpu --nproc-per-node 4 --slots 2 -- megatron_job.py --tp 2 --pp 2

Several jobs run one after another where `then` stands between their arguments.

It holds no test, and nothing in it knows about Prism.
"""

import argparse
import json
import os
import sys
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.timers import Timers
from megatron.core.transformer.transformer_config import TransformerConfig

BATCH, VOCABULARY, EXPERTS = 2, 64, 4


def parse_args(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=None)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--sharded", action="store_true", help="distributed optimizer, everything overlapped")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--expert-width", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--timers", action="store_true", help="print what Megatron's own timers say of each step")
    return parser.parse_args(words)


def make_config(args: argparse.Namespace) -> TransformerConfig:
    options = {}
    if args.moe:
        options |= {
            "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": args.expert_width,
            "moe_aux_loss_coeff": 1e-3, "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss", "moe_grouped_gemm": False,
        }  # fmt: skip
    if args.chunks:
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}  # or two stages would mix up their messages
    return TransformerConfig(
        num_layers=args.pp * (args.chunks or 1), hidden_size=args.width, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=2 * args.width, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=args.tp, pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.chunks, expert_model_parallel_size=args.ep,
        pipeline_dtype=torch.float32, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, deallocate_pipeline_outputs=True, **options,
    )  # fmt: skip


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def forward_step(batches, model):
    tokens = next(batches).cuda()
    length = tokens.shape[1] - 1
    positions = torch.arange(length, device="cuda").expand(BATCH, length)
    mask = torch.triu(torch.ones(1, 1, length, length, device="cuda"), 1).bool()
    labels = tokens[:, 1:].contiguous()
    return model(tokens[:, :-1].contiguous(), positions, mask, labels=labels), partial(loss_of)


def batches(seed: int, length: int):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, VOCABULARY, (BATCH, length + 1), generator=generator)


def build(args: argparse.Namespace, config: TransformerConfig) -> list[torch.nn.Module]:
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS if args.moe else None, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    data_parallel = DistributedDataParallelConfig(
        overlap_grad_reduce=args.sharded, overlap_param_gather=args.sharded, use_distributed_optimizer=args.sharded,
        bucket_size=4000 if args.sharded else None,
    )  # fmt: skip
    chunks = []
    for chunk in range(args.chunks or 1):
        at = {"vp_stage": chunk, "ignore_virtual": False} if args.chunks else {}
        model = GPTModel(
            config, spec, VOCABULARY, args.sequence, pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at), position_embedding_type="rope",
            share_embeddings_and_output_weights=False, **({"vp_stage": chunk} if args.chunks else {}),
        )  # fmt: skip
        chunks.append(DistributedDataParallel(config, data_parallel, model.cuda(), disable_bucketing=chunk > 0))
    return chunks


def train(args: argparse.Namespace) -> None:
    parallel_state.initialize_model_parallel(args.tp, args.pp, args.chunks, expert_model_parallel_size=args.ep)
    model_parallel_cuda_manual_seed(123)
    config = make_config(args)
    chunks = build(args, config)
    config.finalize_model_grads_func = finalize_model_grads
    timers = config.timers = Timers(2, "minmax") if args.timers else None
    config.barrier_with_L1_time = False  # such a barrier would belong to no timer
    if args.sharded:
        config.no_sync_func = chunks[0].no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=args.sharded,
            overlap_param_gather=args.sharded, timers=timers,
        ),
        chunks,
    )  # fmt: skip
    config.grad_scale_func = optimizer.scale_loss
    data = [batches(1 + parallel_state.get_data_parallel_rank(), args.sequence) for _ in chunks]
    run = get_forward_backward_func()
    for step in range(args.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = run(
            forward_step_func=forward_step, data_iterator=data if args.chunks else data[0],
            model=chunks if args.chunks else chunks[0], num_microbatches=args.microbatches, seq_length=args.sequence,
            micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        if timers:
            timers("optimizer", log_level=1).start()
        optimizer.step()
        if timers:
            timers("optimizer").stop()
            seconds = {name: timer.elapsed() for name, timer in timers._timers.items()}
            line = json.dumps({"rank": torch.distributed.get_rank(), "step": step} | seconds)
            print(f"timers {line}\n", end="", flush=True)  # in one piece: other ranks write too
        if outputs and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            mean = sum(output["loss"].item() for output in outputs) / len(outputs)
            print(f"step {step} loss {mean!r}", flush=True)
    parallel_state.destroy_model_parallel()


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    words: list[str] = []
    for word in [*sys.argv[1:], "then"]:
        if word != "then":
            words.append(word)
            continue
        train(parse_args(words))
        words = []
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
