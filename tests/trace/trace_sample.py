"""A small correct trace for the trace tests. Does not hold random data."""

from __future__ import annotations

from pathlib import Path

from prismtrace import ABSENT, DType, GraphKind, Op, Phase, ProcessGroup, ReduceOp, TraceWriter, UnitKind

GROUP = ProcessGroup(group_id=2**63 + 11, name="dp", description="data parallel", backend="gloo", ranks=(0, 1))


def write_sample(path: Path, *, ranks: tuple[int, ...] = (0, 1), steps: int = 2, close: bool = True) -> Path:
    """A small trace without findings: compute, a synchronous all-reduce, a send or receive, all waited for."""
    writer = TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=2, metadata={"job.status": "running"})
    writer.add_group(GROUP)
    blob = writer.add_payload(b"payload " * 64)
    for step in range(steps):
        for rank in ranks:
            base, first = 10_000 * step + rank, 5 * step
            kinds = [UnitKind.COMPUTE, UnitKind.COLLECTIVE, UnitKind.WAIT]
            kinds += [UnitKind.SEND if rank == 0 else UnitKind.RECV, UnitKind.WAIT]
            writer.add_units(
                rank,
                {
                    "kind": kinds,
                    "phase": [Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.OTHER, Phase.OTHER],
                    "step": [step] * 5,
                    "start_ns": [base, base + 1000, base + 1000, base + 3000, base + 3000],
                    "end_ns": [base + 1000, base + 3000, base + 3000, None, base + 3500],
                    "group_id": [0, GROUP.group_id, 0, GROUP.group_id, 0],
                    "seq": [ABSENT, step, ABSENT, step, ABSENT],
                    "op": [0, Op.ALL_REDUCE, 0, Op.SEND if rank == 0 else Op.RECV, 0],
                    "reduce_op": [0, ReduceOp.SUM, 0, 0, 0],
                    "dtype": [0, DType.FLOAT32, 0, DType.INT64, 0],
                    "num_elements_in": [None, 1024, None, 8, None],
                    "num_elements_out": [None, 1024, None, None, None],
                    "peer": [None, None, None, 1 - rank, None],
                    "tag": [None, None, None, 0, None],
                    "awaits": [None, None, first + 1, None, first + 3],
                    "label": ["forward", None, None, "grüße", None],
                    "payload_in": [None, blob, None, None, None],
                    "splits_in": [None, [512, 512], None, [], None],
                },
            )
            writer.add_steps(rank, {"step": [step], "end_ns": [base + 3500], "loss": [1.5 - step], "num_losses": [1]})
            writer.add_scalars(rank, {"step": [step], "name": ["loss"], "value": [1.5 - step]})
    writer.set_metadata("job.status", "complete")
    if close:
        writer.close()
    else:
        writer.abandon()
    return path
