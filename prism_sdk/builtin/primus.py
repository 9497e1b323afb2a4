"""The importer ``primus``: pipeline dumps of AMD's Primus, as graphs that can be simulated.

A dump is a folder with ``config.json`` and ``pp_rank_N.json``: start and end, in ms from the start of the step, of the
forward and backward part of every microbatch. It has no communication. Messages between stages are made up from
microbatch and model chunk; their transfer is 0, what they took is in the gap before the part that needed them. What a
step has beyond its last part is one optimizer unit, which begins when all ranks are there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prism_sdk.abc import ConversionReport, TraceImporter
from prism_sdk.errors import UsageError
from prism_sdk.hookspecs import hookimpl
from prism_sdk.interop import options as reading
from prismtrace import ABSENT, ABSENT32, GraphKind, Op, Phase, ProcessGroup, TraceReadError, TraceWriter, UnitKind
from prismtrace.rewriting import atomic_output

_WORLD, _WAYS = 1, ((Phase.FORWARD, "fwd"), (Phase.BACKWARD, "bwd"))


class PrimusImporter(TraceImporter):
    """Reads a folder of ``pp_rank_N.json`` with its ``config.json``."""

    name = "primus"
    description = "pipeline dumps of Primus (a folder with config.json and pp_rank_N.json)"

    def recognises(self, source: Path, head: bytes) -> bool:
        """A folder that has both kinds of files."""
        try:
            return source.is_dir() and (source / "config.json").is_file() and (source / "pp_rank_0.json").is_file()
        except OSError:
            return False

    def import_trace(
        self, sources: Sequence[Path], *, output: Path, options: Mapping[str, str], report: Callable[[str], None]
    ) -> ConversionReport:  # fmt: skip
        """Read one folder."""
        reading.check_known(options, ("lossless",), of=f"the importer {self.name}")
        if len(sources) != 1:
            raise UsageError("a Primus dump is one folder", hint="give the folder that holds config.json")
        folder = sources[0] if sources[0].is_dir() else sources[0].parent
        config = _read(folder / "config.json")
        try:
            size, chunks = int(config["pp_size"]), int(config.get("vp_size") or 1)
            if int(config["world_size"]) != size:
                ranks = config["world_size"]
                raise UsageError(f"{folder} has {ranks} ranks for {size} stages: only one pipeline is read")
            dumps = [_read(folder / f"pp_rank_{rank}.json") for rank in range(size)]
            rows = _rows(dumps, size, chunks)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise TraceReadError(f"it is no Primus dump: {error!r}", path=str(folder)) from error
        members = tuple(range(size))
        facts = {"import.format": self.name}
        with (
            atomic_output(os.fspath(output), overwrite=True) as temporary,
            TraceWriter(temporary, graph_kind=GraphKind.CALIBRATED, world_size=size, metadata=facts) as writer,
        ):
            writer.add_group(ProcessGroup(_WORLD, "pipeline", "pipeline: all stages", "nccl", members))
            for rank, mine in enumerate(rows):
                writer.add_units(rank, _columns(mine))
        note = "messages between stages are made up: their time is in the gaps before computing"
        return ConversionReport(output, {"units": sum(map(len, rows)), "steps": len(dumps[0])}, (note,))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceReadError(error.strerror or str(error), path=str(path)) from error
    except ValueError as error:
        raise TraceReadError(f"it is no JSON: {error}", path=str(path)) from error


def _parts(dump: Mapping[str, Any], rank: int, size: int, chunks: int) -> list[tuple[int, int, Phase, int, int]]:
    """Start, end, phase, microbatch and chunk of the parts of one step, in order of time."""
    found = []
    for phase, name in _WAYS:
        starts, ends = (np.rint(np.array(dump[f"{name}_{side}"], np.float64) * 1e6) for side in ("start", "end"))
        if len(starts) != len(ends):
            raise ValueError(f"rank {rank} has {len(starts)} starts and {len(ends)} ends of {name}")
        for i, (start, end) in enumerate(zip(starts.astype(int).tolist(), ends.astype(int).tolist(), strict=True)):
            # an interleaved schedule takes groups of `size` microbatches through the chunks in turn
            turn = i // size % chunks
            microbatch = i // (size * chunks) * size + i % size
            found.append((start, end, phase, microbatch, turn if phase is Phase.FORWARD else chunks - 1 - turn))
    return sorted(found)


def _rows(dumps: Sequence[Mapping[str, Any]], size: int, chunks: int) -> list[list[dict[str, Any]]]:
    rows: list[list[dict[str, Any]]] = [[] for _ in dumps]
    seqs: dict[tuple[int, ...], int] = {}
    origin = 0

    def add(rank: int, kind: UnitKind, **columns: Any) -> int:
        if kind in (UnitKind.SEND, UnitKind.RECV, UnitKind.COLLECTIVE):
            lane = (rank, int(kind), columns.get("peer", -1), columns.get("tag", -1))
            seqs[lane] = seqs.get(lane, -1) + 1
            columns.update(seq=seqs[lane], group_id=_WORLD, transfer_ns=0, end_ns=columns["start_ns"])
        rows[rank].append({"kind": int(kind), "stage": rank, **columns})
        return len(rows[rank]) - 1

    for number, key in enumerate(dumps[0]):
        parts = [_parts(dump[key], rank, size, chunks) for rank, dump in enumerate(dumps)]
        ends = {(rank, phase, m, c): end for rank, mine in enumerate(parts) for _, end, phase, m, c in mine}
        last = max(ends.values())
        for rank, mine in enumerate(parts):
            now = 0
            for start, end, phase, m, c in mine:
                common = {"step": number, "phase": int(phase), "microbatch": m}
                way = 1 if phase is Phase.FORWARD else -1
                place = c * size + rank
                if 0 <= place - way < size * chunks:
                    other = (place - way) % size
                    common_post = {**common, "start_ns": origin + now}
                    row = add(rank, UnitKind.RECV, op=int(Op.RECV), peer=other, tag=2 * c + (way < 0), **common_post)
                    there = max(now, ends[other, phase, m, (place - way) // size])
                    there = max(now, min(there, start))  # clocks of ranks differ by microseconds
                    add(rank, UnitKind.WAIT, awaits=row, end_ns=origin + there, **common_post)
                    now = there
                start, end = max(start, now), max(end, now)
                add(rank, UnitKind.COMPUTE, model_chunk=c, start_ns=origin + start, end_ns=origin + end,
                    gap_ns=start - now, **common)  # fmt: skip
                now = end
                if 0 <= place + way < size * chunks:
                    add(rank, UnitKind.SEND, op=int(Op.SEND), peer=(place + way) % size, start_ns=origin + now,
                        tag=2 * ((place + way) // size) + (way < 0), **common)  # fmt: skip
            common = {"step": number, "phase": int(Phase.OPTIMIZER)}
            row = add(rank, UnitKind.COLLECTIVE, op=int(Op.BARRIER), start_ns=origin + now, **common)
            add(rank, UnitKind.WAIT, awaits=row, start_ns=origin + now, end_ns=origin + last, **common)
            total = max(round(float(dumps[rank][key]["total"]) * 1e6), last)
            add(rank, UnitKind.COMPUTE, start_ns=origin + last, end_ns=origin + total, **common)
        origin += max(round(float(dump[key]["total"]) * 1e6) for dump in dumps)
        origin = max(origin, max(row["end_ns"] for mine in rows for row in mine))
    return rows


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    zero = ("kind", "phase", "op", "group_id")
    narrow = ("step", "peer", "microbatch", "stage", "model_chunk")
    wide = ("start_ns", "end_ns", "seq", "tag", "awaits", "transfer_ns", "gap_ns")
    empty = {**dict.fromkeys(zero, 0), **dict.fromkeys(narrow, ABSENT32), **dict.fromkeys(wide, ABSENT)}
    return {name: [row.get(name, default) for row in rows] for name, default in empty.items()}


@hookimpl
def prism_register_importers() -> list[TraceImporter]:
    """Hand over the importer."""
    return [PrimusImporter()]
