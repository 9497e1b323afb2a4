"""The words that adapters use, so that traces of different frameworks can be compared. It defines no columns."""

from __future__ import annotations

__all__ = ["PARTS", "SCHEDULE_PARTS", "TOKENS_PER_EXPERT"]

PARTS = (
    "forward",
    "backward",  # gradients of inputs and weights in one
    "input_grad",
    "weight_grad",
    "grad_sync",
    "param_gather",
    "param_release",
    "optimizer",
    "dispatch",  # tokens on their way to the experts
    "combine",  # and back
)
"""What is done within a phase."""

SCHEDULE_PARTS = ("warmup", "steady", "cooldown")
"""Where a unit is in a pipeline schedule (see ScheduleParts)."""

TOKENS_PER_EXPERT = "moe.tokens_per_expert"
"""The named column (LIST_INT64) for the number of tokens that this rank routed to each expert of the layer."""
