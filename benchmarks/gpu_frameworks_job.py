"""Jobs of frameworks for the table of real and emulated steps: Megatron-Core and DeepSpeed on two GPUs.

    python benchmarks/gpu_frameworks_job.py KIND STEPS [--small]

KIND: megatron-tp, megatron-pp (a GPT of local layers, without Transformer Engine and Apex), zero3 (DeepSpeed). They
need megatron-core, or deepspeed with hjson, pydantic, pydantic-core and annotated-types (docs/gpu.md says how to carry
them). They say what gpu_table_job.py says, and wait for GATE as that does.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SMALL = "--small" in sys.argv
WIDTH, LENGTH, HEADS, LAYERS = (64, 16, 4, 4) if SMALL else (4096, 2048, 32, 8)
VOCABULARY, MICROBATCHES = (64, 2) if SMALL else (32_000, 4)
ZERO_LAYERS, ZERO_BATCH = (4, 2) if SMALL else (8, 6)
if "TABLE_BLOCKS" in os.environ:
    LAYERS = ZERO_LAYERS = int(os.environ["TABLE_BLOCKS"])

Step = Callable[[], float]


def say(kind: str, **values: object) -> None:
    os.write(1, f"{kind} {json.dumps({'rank': dist.get_rank(), **values})}\n".encode())


def megatron(kind: str) -> Step:
    """Tensor parallel over all ranks, or a pipeline of them."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    size = dist.get_world_size()
    tp, pp = (size, 1) if kind == "megatron-tp" else (1, size)
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(123)
    dtype = torch.float32 if SMALL else torch.bfloat16
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, ffn_hidden_size=4 * WIDTH,
        normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=dtype, bf16=not SMALL,
        params_dtype=dtype, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, deallocate_pipeline_outputs=True,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), VOCABULARY, LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    model = model.cuda()
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model if SMALL else model.bfloat16())
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0, bf16=not SMALL, params_dtype=dtype), [chunk]
    )
    config.grad_scale_func = optimizer.scale_loss
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(LENGTH, device="cuda").expand(1, LENGTH)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, device="cuda"), 1).bool()

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    def forward_step(_: Any, part: nn.Module) -> Any:
        tokens = torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=generator).cuda()
        labels = tokens[:, 1:].contiguous()
        return part(tokens[:, :-1].contiguous(), positions, mask, labels=labels), partial(loss_of)

    run = get_forward_backward_func()

    def step() -> float:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = run(
            forward_step_func=forward_step, data_iterator=itertools.repeat(None), model=chunk,
            num_microbatches=MICROBATCHES, seq_length=LENGTH, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        return sum(float(output["loss"]) for output in outputs) / len(outputs) if outputs else 0.0

    return step


def zero3(_: str) -> Step:
    """ZeRO-3 of a perceptron with residuals, its optimizer torch's: DeepSpeed would compile its own first."""
    import deepspeed

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    config = {
        "train_micro_batch_size_per_gpu": ZERO_BATCH, "gradient_accumulation_steps": 1, "bf16": {"enabled": not SMALL},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}, "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
            return out

    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*(Layer() for _ in range(ZERO_LAYERS)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator(device="cuda").manual_seed(dist.get_rank())
    dtype = torch.float32 if SMALL else torch.bfloat16

    def step() -> float:
        x = torch.randn(ZERO_BATCH, 2 * LENGTH, WIDTH, device="cuda", generator=generator).to(dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step


KINDS = {"megatron-tp": megatron, "megatron-pp": megatron, "zero3": zero3}


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ.get("GPU_JOB_SECONDS", "110")), exit=True)
    kind, steps = sys.argv[1], int(sys.argv[2])
    gate = os.environ.get("GATE")
    while gate and not os.path.exists(gate):
        time.sleep(0.05)
    local = int(os.environ["LOCAL_RANK"])
    if "GPU_JOB_SHARES" in os.environ:  # NCCL lets ranks share a GPU that say they are on different hosts
        local %= torch.cuda.device_count()
        os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
                       "LOCAL_RANK": str(local)}  # fmt: skip
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    step = KINDS[kind](kind)
    torch.cuda.synchronize()
    times, losses, memory = [time.perf_counter()], [], []
    for _ in range(steps):
        losses.append(step())
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        memory.append([torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()])
    say("STEPS", ms=[(b - a) * 1e3 for a, b in itertools.pairwise(times)])
    say("LOSS", losses=losses)
    say("MEMORY", parts=memory)
    dist.destroy_process_group()


main()
