"""The mixture-of-experts example with computation that takes given times: layers and experts sleep beside calculating.

    python benchmarks/step_time.py --ranks 16 --any-cpus -- benchmarks/paced_moe.py --tp 1 --pp 2 --ep 2

As in paced_training.py, many real ranks on few cores disturb each other little then, so that what is left of the error
is that of recording, calibrating and emulating.  Experts sleep for each row that they are given, so uneven routing
takes time.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pacing import Pace
from torch import nn

LAYER_MS, ROW_MS = 18.0, 0.2  # forward; backward takes twice as long


def load_example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "train_moe_4d.py"
    spec = importlib.util.spec_from_file_location("train_moe_4d", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    torch.set_num_threads(1)
    example = load_example()

    class PacedLayer(example.Layer):  # type: ignore[misc, name-defined]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            for expert in self.experts:
                expert.register_forward_hook(lambda _, rows, out: Pace.apply(out, ROW_MS * len(rows[0])))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(Pace.apply(x, LAYER_MS))
            return out

    assert issubclass(PacedLayer, nn.Module)
    example.Layer = PacedLayer  # type: ignore[attr-defined]
    example.main()


if __name__ == "__main__":
    sys.exit(main())
