"""A job of many ranks in pipeline, data and tensor parallelism, as columns. Does not write files or test anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from prismtrace import ABSENT, ABSENT32, DType, Op, ProcessGroup, ReduceOp, UnitKind

_KINDS = (UnitKind.COMPUTE, UnitKind.COLLECTIVE, UnitKind.WAIT)


class Job:
    """Ranks in the layout (pp, dp, tp), tp fastest; every rank of a stage has the same structure."""

    def __init__(self, *, pp: int, dp: int, tp: int, num_layers: int = 4, steps: int = 2, seed: int = 0) -> None:
        self.pp, self.dp, self.tp, self.num_layers, self.steps = pp, dp, tp, num_layers, steps
        self.world_size = pp * dp * tp
        self.rng = np.random.default_rng(seed)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Pipeline stage, data-parallel and tensor-parallel index."""
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def group_ids(self, rank: int) -> tuple[int, int, int]:
        """Ids of the rank's pipeline, data-parallel and tensor-parallel group."""
        stage, replica, shard = self.place(rank)
        pipe = 1 << 62 | replica << 16 | shard
        data = 1 << 61 | stage << 16 | shard
        return pipe, data, 1 << 60 | stage << 16 | replica

    def groups(self) -> Iterator[ProcessGroup]:
        """Every process group."""
        ranks = np.arange(self.world_size).reshape(self.pp, self.dp, self.tp)
        for axis, name in enumerate(("pp", "dp", "tp")):
            for members in np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis]).tolist():
                group_id = self.group_ids(members[0])[axis]
                yield ProcessGroup(group_id, name, f"{name} group", "nccl", tuple(members))

    def units(self, rank: int, *, own_times: bool = False, noise_ns: int = 2000) -> dict[str, Any]:
        """The units of a rank; all ranks of a stage share their times unless they have their own."""
        stage, _, _ = self.place(rank)
        pipe, data, tensor = self.group_ids(rank)
        per_layer = 6
        n = per_layer * self.num_layers * self.steps
        row = np.arange(n)
        kind = np.resize(np.array([*_KINDS, UnitKind.COMPUTE, UnitKind.SEND, UnitKind.WAIT], np.uint8), n)
        last = stage == self.pp - 1
        if last:
            kind[kind == UnitKind.SEND] = UnitKind.COLLECTIVE
        lengths = np.random.default_rng(7 + stage).integers(20_000, 900_000, n)
        if own_times:
            lengths = lengths + self.rng.integers(-noise_ns, noise_ns, n)
        end = np.cumsum(lengths)
        start = end - lengths
        is_tensor, is_pipe = row % per_layer == 1, row % per_layer == 4
        communicates = is_tensor | is_pipe
        start[communicates], end[communicates] = end[communicates] - 1, end[communicates] + 5000
        wait = kind == UnitKind.WAIT
        group = np.where(is_tensor, tensor, np.where(is_pipe, data if last else pipe, 0)).astype(np.uint64)
        peer = np.full(n, ABSENT32, np.int32)
        if not last:
            peer[is_pipe] = rank + self.dp * self.tp
        seq = np.full(n, ABSENT, np.int64)
        seq[is_tensor] = np.arange(is_tensor.sum())
        seq[is_pipe] = np.arange(is_pipe.sum())
        elements = np.where(communicates, 1 << 20 | row % 7, ABSENT)
        sends = is_pipe & (not last)
        return {
            "kind": kind,
            "phase": np.where(row // per_layer % 2, 2, 1).astype(np.uint8),
            "step": (row // (per_layer * self.num_layers)).astype(np.int32),
            "start_ns": start,
            "end_ns": end,
            "group_id": group,
            "seq": seq,
            "op": np.where(sends, Op.SEND, np.where(communicates, Op.ALL_REDUCE, 0)).astype(np.uint8),
            "reduce_op": np.where(communicates & ~sends, ReduceOp.SUM, 0).astype(np.uint8),
            "dtype": np.where(communicates, DType.BFLOAT16, 0).astype(np.uint8),
            "num_elements_in": elements,
            "num_elements_out": elements,
            "peer": peer,
            "awaits": np.where(wait, row - 1, ABSENT),
            "stage": np.full(n, stage, np.int32),
        }
