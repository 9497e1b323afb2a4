"""Loads published traces as units, and generates a job of any size with jittered nanosecond times.

Does not measure anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT32, Op, Phase, UnitKind

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
