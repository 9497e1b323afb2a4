"""Train a tiny, randomly initialised Qwen3-MoE with the Hugging Face Trainer, or with accelerate alone.

    torchrun --nproc-per-node 2 train_hf_trainer.py --loop trainer --shard fsdp2

It is an ordinary training script: nothing in it knows about Prism, nothing is downloaded. It needs ``transformers`` and
``accelerate``, which shards only where it sees a GPU: without one, ``prism record --device cpu`` runs it.
"""

import argparse
import tempfile

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, CONTEXT, BLOCK = 128, 32, "Qwen3MoeDecoderLayer"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=("trainer", "accelerate"), default="trainer")
    parser.add_argument("--shard", choices=("ddp", "fsdp1", "fsdp2"), default="fsdp2")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches in a step")
    parser.add_argument("--layers", type=int, default=2, help="number of decoder layers")
    return parser.parse_args()


class Counting(Dataset):
    """Sequences that count up, each by a stride of its own."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + (1 + index % 3) * torch.arange(CONTEXT)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def build_model(layers: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, moe_intermediate_size=32,
            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
            num_experts_per_tok=2, max_position_embeddings=CONTEXT, use_cache=False,
        )
    )  # fmt: skip


class Report(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and "loss" in (logs or {}):
            print(f"step {state.global_step - 1} loss {logs['loss']!r}", flush=True)


def with_trainer(args: argparse.Namespace) -> None:
    sharding = {}
    if args.shard != "ddp":
        version = int(args.shard.removeprefix("fsdp"))
        sharding = {
            "fsdp": "full_shard auto_wrap" if version == 1 else True,
            "fsdp_config": {"version": version, "fsdp_version": version, "transformer_layer_cls_to_wrap": [BLOCK]},
        }
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=args.steps, per_device_train_batch_size=2,
            gradient_accumulation_steps=args.accumulate, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, dataloader_pin_memory=False, **sharding,
        )  # fmt: skip
        model = build_model(args.layers)
        Trainer(model=model, args=arguments, train_dataset=Counting(), callbacks=[Report()]).train()


def with_accelerate(args: argparse.Namespace) -> None:
    plugin = None
    if args.shard != "ddp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(args.shard.removeprefix("fsdp")), auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[BLOCK], cpu_ram_efficient_loading=False,
        )  # fmt: skip
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, fsdp_plugin=plugin)
    model = build_model(args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(Counting(), batch_size=2))
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if accelerator.sync_gradients:
            step = len(losses) // args.accumulate - 1
            if accelerator.is_main_process:
                print(f"step {step} loss {sum(losses[-args.accumulate :]) / args.accumulate!r}", flush=True)
            if step + 1 == args.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    options = parse_args()
    with_trainer(options) if options.loop == "trainer" else with_accelerate(options)
