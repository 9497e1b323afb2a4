"""Loads published traces as units, and generates a job of any size with jittered nanosecond times.

Does not measure anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT, ABSENT32, DType, Op, Phase, ProcessGroup, ReduceOp, UnitKind

Columns = dict[str, Any]
Job = dict[int, Columns]

_STRAGGLER: dict[str, tuple[int, int, int]] = {
    "forward-compute": (UnitKind.COMPUTE, Phase.FORWARD, 0),
    "backward-compute": (UnitKind.COMPUTE, Phase.BACKWARD, 0),
    "forward-send": (UnitKind.SEND, Phase.FORWARD, Op.SEND),
    "backward-send": (UnitKind.SEND, Phase.BACKWARD, Op.SEND),
    "forward-recv": (UnitKind.RECV, Phase.FORWARD, Op.RECV),
    "backward-recv": (UnitKind.RECV, Phase.BACKWARD, Op.RECV),
    "grads-reduce-scatter": (UnitKind.COLLECTIVE, Phase.BACKWARD, Op.REDUCE_SCATTER),
    "params-all-gather": (UnitKind.COLLECTIVE, Phase.OPTIMIZER, Op.ALL_GATHER),
    "layernorm-grads-all-reduce": (UnitKind.COLLECTIVE, Phase.BACKWARD, Op.ALL_REDUCE),
    "embedding-grads-all-reduce": (UnitKind.COLLECTIVE, Phase.BACKWARD, Op.ALL_REDUCE),
    "optimizer": (UnitKind.COMPUTE, Phase.OPTIMIZER, 0),
    "optimizer-clip-main-grad": (UnitKind.COMPUTE, Phase.OPTIMIZER, 0),
    "gc": (UnitKind.COMPUTE, Phase.OTHER, 0),
}


def straggler(path: Path) -> Job:
    """Units of a StragglerAnalysis Parquet file; its float32 seconds become nanoseconds, every row and field kept."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    fields = {name: table[name].to_numpy() for name in table.column_names if name != "optype"}
    names = np.array(table["optype"].to_pylist(), object)
    start = np.rint(fields["start_ts"].astype(np.float64) * 1e9).astype(np.int64)
    end = start + np.rint(fields["duration"].astype(np.float64) * 1e9).astype(np.int64)
    job: Job = {}
    for rank in sorted(set(fields["rank"].tolist())):
        rows = np.flatnonzero(fields["rank"] == rank)
        rows = rows[np.lexsort((start[rows], fields["step"][rows]))]
        told = np.array([_STRAGGLER[name] for name in names[rows]], np.uint8)
        job[rank] = {
            "kind": told[:, 0],
            "phase": told[:, 1],
            "op": told[:, 2],
            "step": fields["step"][rows].astype(np.int32),
            "start_ns": start[rows],
            "end_ns": end[rows],
            "seq": fields["seq_id"][rows].astype(np.int64),
            "microbatch": _absent(fields["mb_id"][rows]),
            "stage": fields["stage"][rows].astype(np.int32),
            "model_chunk": _absent(fields["mc"][rows]),
            "label": list(names[rows]),
        }
    return job


def _absent(values: NDArray[Any]) -> NDArray[np.int32]:
    return np.where(values < 0, ABSENT32, values).astype(np.int32)


def primus(folder: Path) -> Job:
    """Units of a Primus pipeline dump: forward and backward of each microbatch; float milliseconds become ns."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    num_chunks, num_microbatches = config["vp_size"] or 1, config["num_mbs"]
    job: Job = {}
    for rank in range(config["world_size"]):
        steps = json.loads((folder / f"pp_rank_{rank}.json").read_text(encoding="utf-8"))
        parts: list[NDArray[np.int64]] = []
        for step, content in steps.items():
            for phase, name in ((Phase.FORWARD, "fwd"), (Phase.BACKWARD, "bwd")):
                begin, end = (np.array(content[f"{name}_{side}"], np.float64) for side in ("start", "end"))
                # the schedule of the dump: groups of pp_size microbatches go through the chunks in turn
                index = np.arange(len(begin))
                size = config["pp_size"]
                turn = index // size % num_chunks
                microbatch = index // (size * num_chunks) * size + index % size
                chunk = turn if phase is Phase.FORWARD else num_chunks - 1 - turn
                assert int(microbatch.max()) < num_microbatches
                parts.append(
                    np.stack(
                        [
                            np.full(len(begin), int(step)),
                            np.full(len(begin), int(phase)),
                            microbatch,
                            chunk,
                            np.rint(begin * 1e6).astype(np.int64),
                            np.rint(end * 1e6).astype(np.int64),
                        ]
                    )
                )
        rows = np.concatenate(parts, axis=1)
        rows = rows[:, np.lexsort((rows[4], rows[0]))]
        job[rank] = {
            "kind": np.full(rows.shape[1], UnitKind.COMPUTE, np.uint8),
            "phase": rows[1].astype(np.uint8),
            "step": rows[0].astype(np.int32),
            "start_ns": rows[4],
            "end_ns": rows[5],
            "microbatch": rows[2].astype(np.int32),
            "stage": np.full(rows.shape[1], rank, np.int32),
            "model_chunk": rows[3].astype(np.int32),
        }
    return job


@dataclass(frozen=True)
class JobShape:
    """A job of `num_stages` pipeline stages (1F1B) and `num_ranks / num_stages` data-parallel replicas."""

    num_ranks: int
    num_stages: int = 4
    num_microbatches: int = 8
    num_units: int = 2636
    """Units of a rank; the last step may be cut off."""

    @property
    def replicas(self) -> int:
        """Size of a data-parallel group."""
        return self.num_ranks // self.num_stages

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank: ranks of one stage are neighbours."""
        return rank // self.replicas


_FORWARD_NS, _BACKWARD_NS, _OPTIMIZER_NS, _TRANSFER_NS = 41_000_000, 83_000_000, 9_000_000, 350_000


def _one_step(shape: JobShape, stage: int) -> list[tuple[int, int, int, int, int, int]]:
    """kind, phase, op, microbatch, distance of the peer in stages, typical length in ns."""
    rows: list[tuple[int, int, int, int, int, int]] = []

    def compute(phase: int, microbatch: int, toward: int, source: int, length: int) -> None:
        if 0 <= stage + source < shape.num_stages:
            rows.append((UnitKind.RECV, phase, Op.RECV, microbatch, source, _TRANSFER_NS))
            rows.append((UnitKind.WAIT, phase, 0, microbatch, 0, _TRANSFER_NS))
        rows.append((UnitKind.COMPUTE, phase, 0, microbatch, 0, length))
        if 0 <= stage + toward < shape.num_stages:
            rows.append((UnitKind.SEND, phase, Op.SEND, microbatch, toward, _TRANSFER_NS))

    warmup = min(shape.num_stages - stage - 1, shape.num_microbatches)
    forwards, backwards = iter(range(shape.num_microbatches)), iter(range(shape.num_microbatches))
    for _ in range(warmup):
        compute(Phase.FORWARD, next(forwards), 1, -1, _FORWARD_NS)
    for microbatch in forwards:
        compute(Phase.FORWARD, microbatch, 1, -1, _FORWARD_NS)
        compute(Phase.BACKWARD, next(backwards), -1, 1, _BACKWARD_NS)
    for microbatch in backwards:
        compute(Phase.BACKWARD, microbatch, -1, 1, _BACKWARD_NS)
    rows.append((UnitKind.COLLECTIVE, Phase.BACKWARD, Op.REDUCE_SCATTER, -1, 0, 20 * _TRANSFER_NS))
    rows.append((UnitKind.WAIT, Phase.BACKWARD, 0, -1, 0, 20 * _TRANSFER_NS))
    rows.append((UnitKind.COMPUTE, Phase.OPTIMIZER, 0, -1, 0, _OPTIMIZER_NS))
    rows.append((UnitKind.COLLECTIVE, Phase.OPTIMIZER, Op.ALL_GATHER, -1, 0, 20 * _TRANSFER_NS))
    rows.append((UnitKind.WAIT, Phase.OPTIMIZER, 0, -1, 0, 20 * _TRANSFER_NS))
    return rows


def groups_of(shape: JobShape) -> list[ProcessGroup]:
    """One data-parallel group a stage, one pipeline group a replica."""
    size = shape.replicas
    stages = [
        ProcessGroup(1 + stage, f"dp{stage}", "data parallel", "nccl", tuple(range(stage * size, (stage + 1) * size)))
        for stage in range(shape.num_stages)
    ]
    lines = [
        ProcessGroup(1001 + replica, f"pp{replica}", "pipeline", "nccl", tuple(range(replica, shape.num_ranks, size)))
        for replica in range(size)
    ]
    return stages + lines


def units_of(shape: JobShape, rank: int, *, own_times: bool = True) -> Columns:
    """The units of one rank. Lengths vary by 2 %, gaps are a few microseconds; `own_times` varies them by rank, too."""
    stage, replica = shape.stage(rank), rank % shape.replicas
    step_rows = np.array(_one_step(shape, stage), np.int64)
    num_steps = -(-shape.num_units // len(step_rows))
    rows = np.tile(step_rows, (num_steps, 1))[: shape.num_units]
    kind, op, distance = rows[:, 0], rows[:, 2], rows[:, 4]
    rng = np.random.default_rng([11, rank if own_times else stage])
    host = (kind == UnitKind.COMPUTE) | (kind == UnitKind.WAIT)
    length = (rows[:, 5] * rng.normal(1, 0.02, len(rows))).astype(np.int64)
    gap = rng.gamma(2.0, 4_000, len(rows)).astype(np.int64)
    ends = np.cumsum(np.where(host, length, 0) + gap)
    start = ends - np.where(host, length, 0)
    end = start + length
    grouped = op != 0
    collective, waits = kind == UnitKind.COLLECTIVE, kind == UnitKind.WAIT
    index = np.arange(len(rows))
    seq = np.full(len(rows), ABSENT)
    for lane in (collective, op == Op.SEND, op == Op.RECV):
        for side in (-1, 0, 1):
            mine = np.flatnonzero(lane & (distance == side))
            seq[mine] = np.arange(len(mine))
    elements = np.where(collective, 1 << 24, 1 << 22)
    return {
        "kind": kind.astype(np.uint8),
        "phase": rows[:, 1].astype(np.uint8),
        "step": (index // len(step_rows)).astype(np.int32),
        "start_ns": start,
        "end_ns": end,
        "group_id": np.where(collective, 1 + stage, np.where(grouped, 1001 + replica, 0)).astype(np.uint64),
        "seq": seq,
        "op": op.astype(np.uint8),
        "reduce_op": np.where(op == Op.REDUCE_SCATTER, ReduceOp.SUM, 0).astype(np.uint8),
        "dtype": np.where(grouped, DType.BFLOAT16, 0).astype(np.uint8),
        "num_elements_in": np.where(grouped, elements, ABSENT),
        "peer": np.where(grouped & ~collective, rank + distance * shape.replicas, ABSENT32).astype(np.int32),
        "tag": np.where(grouped & ~collective, 0, ABSENT),
        "is_async": grouped,
        "awaits": np.where(waits, index - 1, ABSENT),
        "microbatch": np.where(rows[:, 3] < 0, ABSENT32, rows[:, 3]).astype(np.int32),
        "stage": np.full(len(rows), stage, np.int32),
    }
