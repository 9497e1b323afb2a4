"""Megatron's layers and experts: dispatch and combination of tokens, their numbers, and a skew on demand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import TOKENS_PER_EXPERT, Around

__all__ = ["HOOKS", "Experts", "skew_bias"]

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"

HOOKS = {
    "layer": AdapterHook("megatron.core.transformer.transformer_layer", "TransformerLayer.forward", required=False),
    "preprocess": AdapterHook(_DISPATCHER, "MoEAlltoAllTokenDispatcher.preprocess"),
    "dispatch": AdapterHook(_DISPATCHER, "MoEAlltoAllTokenDispatcher.token_dispatch", min_version="0.14"),
    "combine": AdapterHook(_DISPATCHER, "MoEAlltoAllTokenDispatcher.token_combine", min_version="0.14"),
    "gating": AdapterHook("megatron.core.transformer.moe.router", "Router.gating", option="moe_skew"),
}


class Experts:
    """What the hooks do."""

    def __init__(self, namer: UnitNamer) -> None:
        self._namer = namer
        self._skew: float | None = None
        self._bias: Any = None

    def around(self) -> Sequence[Around]:
        """The table of hooks."""
        return [
            Around(HOOKS["layer"], before=self.layer),
            Around(HOOKS["preprocess"], before=self.routed),
            Around(HOOKS["dispatch"], before=lambda *_, **__: self._namer.enter(part="dispatch")),
            Around(HOOKS["combine"], before=lambda *_, **__: self._namer.enter(part="combine")),
            Around(HOOKS["gating"], after=self.gated),
        ]

    def layer(self, layer: Any, *_: Any, **__: Any) -> int:
        """`layer_number` counts from 1 over the whole model."""
        return self._namer.enter(layer=f"layers.{layer.layer_number - 1}")

    def routed(self, _: Any, routing_map: Any, *__: Any, **___: Any) -> None:
        """Called once the router has decided; in a recomputation it decides the same again."""
        if sys.modules["torch"]._C._current_graph_task_id() != -1:
            return
        counts = routing_map.sum(dim=0)
        if counts.device.type == "cpu":
            self._namer.note(TOKENS_PER_EXPERT, counts.tolist())
        else:
            self._namer.note(TOKENS_PER_EXPERT, _later(counts))

    def gated(self, logits: Any, *_: Any, **__: Any) -> None:
        """Called with the router's logits, before anything is decided by them."""
        if self._skew is None:
            self._skew = float(self._namer.option("moe_skew") or 0)
        if self._skew:
            if self._bias is None:
                self._bias = logits.new_tensor(skew_bias(logits.shape[-1], self._skew))
            logits.data.add_(self._bias)  # a constant: no gradient changes, and autograd need not know


def skew_bias(num_experts: int, skew: float) -> list[float]:
    """What to add to router logits so that the probability of expert e gets the factor (e + 1) ** -skew.

    A softmax turns a constant that is added to a logit into a factor of its probability. How often it is among the
    largest ones, which are chosen, is another matter.
    """
    return [-skew * math.log(expert + 1) for expert in range(num_experts)]


def _later(counts: Any) -> Callable[[], Sequence[int]]:
    return lambda: [int(count) for count in counts.tolist()]
