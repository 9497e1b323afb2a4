"""Jobs that `prism expand` made of a recording: calibrated by the ranks that were copied, and any rank emulated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prism_sdk.runtime.oncuda.usage import others_of
from prism_sdk.runtime.roles.growing import grow
from prism_sdk.runtime.roles.recorded import RecordedRoles
from prism_sdk.testing.launches import Launches
from prism_sdk.testing.workplace import Workplace
from prismtrace import GraphKind, ProcessGroup, TraceReader, TraceWriter, add_alike

RANKS = 64

JOB = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pair = [dist.new_group([at, at + 1], group_desc="EXPERT_MODEL_PARALLEL_GROUP") for at in range(0, world, 2)][rank // 2]
half = [dist.new_group(list(range(at, world, 2)), group_desc="DATA_PARALLEL_GROUP") for at in range(2)][rank % 2]
weight = torch.nn.Parameter(torch.ones(8, 8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(2):
    sent = [1 + rank // 2 % 3, 2]  # as a router would: by the data of each replica
    received = [None, None]
    dist.all_gather_object(received, sent, group=pair)
    rows = torch.empty(sum(one[rank % 2] for one in received), 8)
    splits = [one[rank % 2] for one in received]
    dist.all_to_all_single(rows, torch.ones(sum(sent), 8), splits, sent, group=pair)
    (rows @ weight).sum().backward()
    dist.all_reduce(weight.grad, group=half)
    optimizer.step()
    optimizer.zero_grad()
print("rank", rank, "ended")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def jobs(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = tmp_path_factory.mktemp("grown")
    (folder / "job.py").write_text(JOB)
    return Launches(folder, workplace=workplace)


def test_a_recording_by_roles_grows_is_calibrated_and_any_rank_is_emulated(jobs: Launches) -> None:
    def run(verb: str, *options: object) -> str:
        return jobs.must(verb, jobs.folder / "job.py", (), options=list(map(str, options))).err

    small, large, timed = (jobs.folder / name for name in ("small.prism", "large.prism", "timed.prism"))
    run("record", "--world-size", 4, "--slots", 2, "--roles", "auto", "--samples", 0, "-o", small)
    grow(small, large, num_replicas=RANKS // 2)
    said = run("calibrate", "--graph", large, "--slots", 2, "-O", "passes=1", "-o", timed)
    assert f"2 of {RANKS} ranks run for real" in said
    with TraceReader(timed) as reader:
        roles = RecordedRoles.of(reader)
        assert reader.graph_kind is GraphKind.CALIBRATED and reader.world_size == RANKS
        assert roles is not None and roles.running == (0, 1)
        assert roles.stands_for.tolist() == [0, 1] * (RANKS // 2)
    said = run("emulate", "--graph", timed, "--sandbox", RANKS - 1, "-o", jobs.folder / "emulated.prism")
    assert "another number of replicas by prism expand" in said
    with TraceReader(jobs.folder / "emulated.prism") as reader:
        assert reader.ranks == (RANKS - 1,) and len(reader.steps(RANKS - 1)) == 2
        # that of replica 31: three rows to send in place of one, which is no fault of a rank that never ran
        assert int(reader.metadata[f"rank.{RANKS - 1}.all_to_alls_resized"]) > 0


def test_one_rank_of_each_kind_stands_for_its_copies(tmp_path: Path) -> None:
    """Ranks 0 and 1 share a role and their times; 2 and 3 share one as well, but have times of their own."""
    with TraceWriter(tmp_path / "four.prism", world_size=4) as writer:
        units = {"kind": [1], "start_ns": [0], "end_ns": [5]}
        add_alike(writer, (0, 1), units, role=7)
        add_alike(writer, (2, 3), units, role=8, replaced={"end_ns": (np.zeros(1, np.int64), np.array([[6, 9]]))})
    grow(tmp_path / "four.prism", tmp_path / "eight.prism", num_replicas=8)
    with TraceReader(tmp_path / "eight.prism") as reader:
        assert json.loads(reader.metadata["roles.representatives"]) == [0, 2, 3]
        roles = RecordedRoles.of(reader)
        assert roles is not None and roles.stands_for.tolist() == [0, 0, 2, 3] * 2
        assert [int(reader.units(rank).end_ns[0]) for rank in range(8)] == [5, 5, 6, 9] * 2


def _four(path: Path, groups: dict[int, tuple[str, tuple[int, ...]]], said: dict[str, str]) -> None:
    """A trace of four ranks that differ in a duration alone; of groups, what they are for and who is in them."""
    with TraceWriter(path, world_size=4, metadata=said) as writer:
        for number, (purpose, ranks) in groups.items():
            description = "DATA_PARALLEL_GROUP" if purpose == "dp" else "PIPELINE_MODEL_PARALLEL_GROUP"
            writer.add_group(ProcessGroup(number, f"{purpose}{ranks[0]}", description, "gloo", ranks))
        for rank in range(4):
            writer.add_units(rank, {"kind": [1], "start_ns": [0], "end_ns": [5 + rank]})


def test_what_is_said_of_ranks_and_groups_goes_to_grown_ones(tmp_path: Path) -> None:
    """Two stages of two replicas become four replicas. What ranks counted or said of their place goes."""
    said = {
        "rank.0.fidelity": "full", "rank.1.fidelity": "reduced", "rank.1.fidelity_reasons": "no loop",
        "rank.2.device_other_bytes": "700", "rank.3.times": "device", "rank.0.coordinates": "dp=0,pp=0",
        "rank.3.messages_sent": "9", "job.status": "complete",
    }  # fmt: skip
    groups = {1: ("dp", (0, 2)), 2: ("dp", (1, 3)), 3: ("pp", (0, 1)), 4: ("pp", (2, 3))}
    said |= {f"group.{number}.purpose": purpose for number, (purpose, _) in groups.items()}
    _four(tmp_path / "four.prism", groups, said)
    grow(tmp_path / "four.prism", tmp_path / "eight.prism", num_replicas=4)
    with TraceReader(tmp_path / "eight.prism") as reader:
        facts, grown = reader.metadata, reader.groups
    kept = {key: value for key, value in facts.items() if key.startswith("rank.")}
    assert kept == {key: said[key] for key in list(said)[:5]} and facts["job.status"] == "complete"
    purposes = {grown[int(key.split(".")[1])].ranks: value for key, value in facts.items() if key.startswith("group.")}
    stages = {(0, 2, 4, 6): "dp", (1, 3, 5, 7): "dp"}
    assert purposes == stages | {(rank, rank + 1): "pp" for rank in range(0, 8, 2)}
    # rank 6 has the rows of rank 2, and ranks 0, 1 and 3 said nothing
    assert others_of(tmp_path / "eight.prism") == {2: 700, 6: 700}


def test_one_replica_is_called_what_it_is_there(tmp_path: Path) -> None:
    """Ranks that stand for others have other numbers where replicas lie apart."""
    groups = {1: ("dp", (0, 1)), 2: ("dp", (2, 3)), 3: ("pp", (0, 2)), 4: ("pp", (1, 3))}
    said = {f"rank.{rank}.adapters": f"of {rank}" for rank in range(4)}
    _four(tmp_path / "four.prism", groups, said)
    grow(tmp_path / "four.prism", tmp_path / "other.prism", num_replicas=3)
    with TraceReader(tmp_path / "other.prism") as reader:
        kept = {key: value for key, value in reader.metadata.items() if key.startswith("rank.")}
    assert kept == {f"rank.{new}.adapters": f"of {old}" for new, old in ((0, 0), (1, 1), (3, 2), (4, 3))}
