"""Write the trace of a made-up training job, to try the tools on: no GPU, no torch, the same file every time.

    python examples/sample_trace.py job.prism
    python examples/sample_trace.py slow.prism --slow-rank 6

Eight ranks: two data-parallel replicas of a pipeline of four stages (1F1B, eight microbatches, four steps). Rank r is
stage r % 4 of replica r // 4. The durations are invented; when everything happens then follows from them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from prism_sdk.simulate import Scenario, write_timeline
from prismtrace import ABSENT, ABSENT32, DType, GraphKind, Op, Phase, ProcessGroup, TraceWriter, UnitKind

STAGES, REPLICAS, MICROBATCHES, STEPS = 4, 2, 8, 4
FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS = 3_000_000, 6_000_000, 1_200_000
EMBEDDING_NS, HEAD_NS = 200_000, 700_000  # of the forward pass; the backward pass takes twice as long
MESSAGE_NS, REDUCE_NS, GAP_NS = 150_000, 2_500_000, 12_000
WEIGHTS_BYTES, ACTIVATION_BYTES, WORKSPACE_BYTES = 6 << 30, 1536 << 20, 256 << 20
MESSAGE_ELEMENTS, GRADIENT_ELEMENTS = 2_097_152, 50_000_000
#: What a row has where nothing is said.
ABSENT_VALUES: dict[str, Any] = {
    "kind": 0, "phase": 0, "step": ABSENT32, "start_ns": ABSENT, "end_ns": ABSENT, "transfer_ns": ABSENT,
    "gap_ns": GAP_NS, "microbatch": ABSENT32, "stage": ABSENT32, "group_id": 0, "seq": ABSENT, "op": 0, "dtype": 0,
    "num_elements_in": ABSENT, "num_elements_out": ABSENT, "peer": ABSENT32, "tag": ABSENT, "is_async": False,
    "awaits": ABSENT, "memory_bytes": ABSENT, "label": None,
}  # fmt: skip


class Rank:
    """The program of one rank, row by row."""

    def __init__(self, rank: int) -> None:
        self.rank, self.stage, self.replica = rank, rank % STAGES, rank // STAGES
        self.rows: list[dict[str, Any]] = []
        self.seqs: dict[Any, int] = {}
        self.num_held = 0

    def compute(self, duration_ns: int, **columns: Any) -> None:
        held = WEIGHTS_BYTES + self.num_held * ACTIVATION_BYTES
        self.rows.append({"kind": UnitKind.COMPUTE, "start_ns": 0, "end_ns": duration_ns,
                          "memory_bytes": held + WORKSPACE_BYTES, **columns})  # fmt: skip

    def communicate(self, kind: UnitKind, op: Op, group: int, *, num_elements: int, transfer_ns: int, wait: bool,
                    peer: int = ABSENT32, **columns: Any) -> None:  # fmt: skip
        seq = self.seqs[op, peer] = self.seqs.get((op, peer), -1) + 1
        row = {"kind": kind, "op": op, "group_id": group, "seq": seq, "peer": peer, "dtype": DType.BFLOAT16,
               "num_elements_in": num_elements, "num_elements_out": num_elements, "transfer_ns": transfer_ns,
               "is_async": True, "gap_ns": ABSENT, **columns}  # fmt: skip
        if peer != ABSENT32:
            row["tag"] = 0
        self.rows.append(row)
        if wait:
            self.rows.append({"kind": UnitKind.WAIT, "awaits": len(self.rows) - 1, **columns})

    def microbatch(self, phase: Phase, microbatch: int, *, step: int) -> None:
        """Receive, compute, send on: forward passes go to the next stage, backward passes to the one before."""
        ahead = 1 if phase == Phase.FORWARD else -1
        names = {"phase": phase, "step": step, "stage": self.stage, "microbatch": microbatch}
        message = {"num_elements": MESSAGE_ELEMENTS, "transfer_ns": MESSAGE_NS, **names}
        pipe = 101 + self.replica
        if 0 <= self.stage - ahead < STAGES:
            self.communicate(UnitKind.RECV, Op.RECV, pipe, peer=self.rank - ahead, wait=True, **message)
        extra = EMBEDDING_NS if self.stage == 0 else HEAD_NS if self.stage == STAGES - 1 else 0
        self.num_held += phase == Phase.FORWARD
        self.compute(FORWARD_NS + extra if phase == Phase.FORWARD else BACKWARD_NS + 2 * extra, **names)
        self.num_held -= phase == Phase.BACKWARD
        if 0 <= self.stage + ahead < STAGES:
            self.communicate(UnitKind.SEND, Op.SEND, pipe, peer=self.rank + ahead, wait=False, **message)

    def step(self, step: int) -> None:
        """1F1B: as many forward passes ahead as there are stages behind this one, then by turns."""
        ahead = STAGES - self.stage - 1
        for microbatch in range(MICROBATCHES + ahead):
            if microbatch < MICROBATCHES:
                self.microbatch(Phase.FORWARD, microbatch, step=step)
            if microbatch >= ahead:
                self.microbatch(Phase.BACKWARD, microbatch - ahead, step=step)
        names = {"step": step, "stage": self.stage}
        names_of_reduction = {"phase": Phase.BACKWARD, "label": "gradients", **names}
        self.communicate(UnitKind.COLLECTIVE, Op.ALL_REDUCE, 1 + self.stage, num_elements=GRADIENT_ELEMENTS,
                         transfer_ns=REDUCE_NS, wait=True, **names_of_reduction)  # fmt: skip
        self.compute(OPTIMIZER_NS, phase=Phase.OPTIMIZER, **names)

    def columns(self) -> dict[str, list[Any]]:
        return {name: [row.get(name, absent) for row in self.rows] for name, absent in ABSENT_VALUES.items()}


def write_graph(path: Path) -> None:
    """The job with its durations and without a clock: a calibrated graph in which nothing has been timed yet."""
    world = STAGES * REPLICAS
    metadata = {
        "job.argv": json.dumps(["/home/user/project-x/train.py", "--layers", "32", "--data", "/data/corpus"]),
        "job.status": "complete",
        **{f"rank.{rank}.coordinates": f"dp={rank // STAGES},pp={rank % STAGES}" for rank in range(world)},
        **{f"group.{1 + stage}.purpose": "dp" for stage in range(STAGES)},
        **{f"group.{101 + replica}.purpose": "pp" for replica in range(REPLICAS)},
    }
    with TraceWriter(path, graph_kind=GraphKind.CALIBRATED, world_size=world, metadata=metadata) as writer:
        for stage in range(STAGES):
            writer.add_group(ProcessGroup(1 + stage, f"dp_{stage}", "data parallel", "nccl", (stage, STAGES + stage)))
        for replica in range(REPLICAS):
            ranks = tuple(range(replica * STAGES, (replica + 1) * STAGES))
            writer.add_group(ProcessGroup(101 + replica, f"pp_{replica}", "pipeline", "nccl", ranks))
        for number in range(world):
            rank = Rank(number)
            for step in range(STEPS):
                rank.step(step)
            writer.add_units(number, rank.columns())
            steps = {"step": list(range(STEPS)), "loss": [round(4.0 * 0.9**step, 6) for step in range(STEPS)],
                     "memory_peak_bytes": [max(row.get("memory_bytes", 0) for row in rank.rows)] * STEPS}  # fmt: skip
            writer.add_steps(number, {**steps, "start_ns": [ABSENT] * STEPS, "end_ns": [ABSENT] * STEPS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the file to write")
    parser.add_argument("--slow-rank", type=int, metavar="N", help="computing takes 1.25 times as long on rank N")
    parser.add_argument("--seed", type=int, default=0, help="of the differences between units, about 2 %%")
    args = parser.parse_args()
    slow = () if args.slow_rank is None else (f"rank={args.slow_rank}:1.25",)
    with tempfile.TemporaryDirectory() as folder:
        write_graph(Path(folder) / "graph.prism")
        scenario = Scenario(slow=slow, straggle=(f"lognormal:0.02:seed={args.seed}:per=unit",))
        write_timeline(scenario.run(Path(folder) / "graph.prism"), args.output)
    print(f"wrote {args.output}: {STAGES * REPLICAS} ranks, {STEPS} steps")


if __name__ == "__main__":
    main()
