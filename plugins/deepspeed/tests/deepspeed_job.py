"""Small jobs on DeepSpeed, on CPU: ZeRO of any stage, or a pipeline.

    prism record --nproc-per-node 2 ... -- deepspeed_job.py zero:3:torch
    prism record --nproc-per-node 4 ... -- deepspeed_job.py pipe:4

Several words are several jobs, one after another.

It holds no test, and nothing in it knows about Prism.
"""

import sys

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

WIDTH, MICROBATCHES, STEPS = 16, 4, 2
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}  # its own one would be compiled first
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # so would this, which only inference uses


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.tanh()


def report(step: int, loss: float) -> None:
    if deepspeed.comm.get_rank() == 0:
        print(f"step {step} loss {loss!r}", flush=True)


def zero(stage: int, style: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": OPTIMIZER,
        "steps_per_print": 1000,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500},
    }  # fmt: skip
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = Data()
    for number in range(2 * STEPS):
        x, y = (torch.stack(pair) for pair in zip(data[2 * number], data[2 * number + 1], strict=True))
        loss = nn.functional.mse_loss(engine(x), y)
        if style == "torch":
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        report(number, loss.item())


def pipe(num_stages: int) -> None:
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    torch.manual_seed(0)
    model = PipelineModule(
        layers=layers, loss_fn=nn.functional.mse_loss, num_stages=num_stages, partition_method="uniform",
        activation_checkpoint_interval=0,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICROBATCHES, "optimizer": OPTIMIZER,
        "steps_per_print": 1000,
    }  # fmt: skip
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config, training_data=Data())
    for step in range(STEPS):
        report(step, engine.train_batch().item())


deepspeed.init_distributed()
for word in sys.argv[1:]:
    kind, number, *style = word.split(":")
    if kind == "zero":
        zero(int(number), *style)
    else:
        pipe(int(number))
deepspeed.comm.destroy_process_group()
