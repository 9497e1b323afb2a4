"""The adapter for experts of Hugging Face transformers: how many tokens each router sends to each expert.

Responsible for what routers put out; layers come from whoever shards them, and it changes no decision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import TOKENS_PER_EXPERT, Around, PatchingAdapter

__all__ = ["RoutersAdapter"]

# package of a model -> its router, which returns logits, weights and the chosen experts of each token
_ROUTERS = {
    "deepseek_v2": "DeepseekV2TopkRouter", "deepseek_v3": "DeepseekV3TopkRouter",
    "ernie4_5_moe": "Ernie4_5_MoeTopKRouter", "glm4_moe": "Glm4MoeTopkRouter", "gpt_oss": "GptOssTopKRouter",
    "granitemoe": "GraniteMoeTopKRouter", "minimax_m2": "MiniMaxM2TopKRouter", "mixtral": "MixtralTopKRouter",
    "olmoe": "OlmoeTopKRouter", "qwen2_moe": "Qwen2MoeTopKRouter", "qwen3_moe": "Qwen3MoeTopKRouter",
    "qwen3_next": "Qwen3NextTopKRouter", "qwen3_vl_moe": "Qwen3VLMoeTextTopKRouter",
}  # fmt: skip
# before transformers 5 the router was a linear layer, and the block around it returned its logits
_BLOCKS = {
    "mixtral": "MixtralSparseMoeBlock", "olmoe": "OlmoeSparseMoeBlock", "qwen2_moe": "Qwen2MoeSparseMoeBlock",
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",
}  # fmt: skip


def _hook(package: str, owner: str, **versions: str) -> AdapterHook:
    """Models come and go with versions of transformers: none of them must be there."""
    module = f"transformers.models.{package}.modeling_{package}"
    return AdapterHook(module, f"{owner}.forward", required=False, **versions)


_OF_ROUTERS = [_hook(package, owner, min_version="5.0") for package, owner in _ROUTERS.items()]
_OF_BLOCKS = [_hook(package, owner, max_version="4.999") for package, owner in _BLOCKS.items()]


class RoutersAdapter(PatchingAdapter):
    """Notes `moe.tokens_per_expert` at every routing of a forward pass."""

    name = "transformers"
    description = "tokens of each expert in models of Hugging Face transformers"
    distribution = "transformers"

    def hooks(self) -> Sequence[AdapterHook]:
        """Every hook of the adapter."""
        return [*_OF_ROUTERS, *_OF_BLOCKS]

    def around(self, namer: UnitNamer) -> Sequence[Around]:
        """What to do at the hooks. The stretch makes a unit of each routing, so that a unit lies between two notes."""
        calls = _Calls(namer)
        return [
            *(Around(hook, before=calls.begin, after=calls.routed) for hook in _OF_ROUTERS),
            *(Around(hook, before=calls.begin, after=calls.block_done) for hook in _OF_BLOCKS),
        ]


class _Calls:
    """What each hook does."""

    def __init__(self, namer: UnitNamer) -> None:
        self._namer = namer
        self._token: int | None = None

    def begin(self, *_: Any, **__: Any) -> int | None:
        self._token = None if _is_no_forward_pass() else self._namer.enter(label="routing")
        return self._token

    def routed(self, result: Any, *_: Any, **__: Any) -> None:
        """Called with what a router returned."""
        if not self._ends():
            return
        logits, _weights, chosen = result
        self._note(chosen, num_experts=int(logits.shape[-1]))

    def block_done(self, result: Any, block: Any, *_: Any, **__: Any) -> None:
        """Called with what a block returned, the logits last; the softmax that follows keeps their order."""
        if not self._ends():
            return
        logits = result[1]
        self._note(logits.topk(block.top_k, dim=-1).indices, num_experts=int(logits.shape[-1]))

    def _ends(self) -> bool:
        """End the stretch: the note belongs to the unit behind it."""
        token, self._token = self._token, None
        if token is not None:
            self._namer.leave(token)
        return token is not None

    def _note(self, chosen: Any, *, num_experts: int) -> None:
        chosen = chosen.to_local() if hasattr(chosen, "to_local") else chosen
        counts = chosen.detach().flatten().bincount(minlength=num_experts)
        if counts.device.type == "cpu":
            self._namer.note(TOKENS_PER_EXPERT, counts.tolist())
        else:
            self._namer.note(TOKENS_PER_EXPERT, _later(counts))


def _is_no_forward_pass() -> bool:
    """A recomputation in the backward pass decides the same again; in what is only traced there is nothing to count."""
    torch = sys.modules["torch"]
    return bool(torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling())


def _later(counts: Any) -> Callable[[], Sequence[int]]:
    return lambda: [int(count) for count in counts.tolist()]
