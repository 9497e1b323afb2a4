"""What a process group is called in messages."""

from __future__ import annotations

from prism_sdk.runtime.calls import GroupState


def test_a_group_without_a_description_is_called_by_its_ranks() -> None:
    group = GroupState(name="dp", ranks=(4, 7, 9), group_rank=1, backend="gloo", description="", group_id=77)
    assert group.label == "of ranks 4,7,9"
    assert GroupState("1", (0, 1), 0, "gloo", "pairs", 7).label == "pairs"
