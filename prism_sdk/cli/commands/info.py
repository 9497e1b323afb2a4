"""``prism info``: prints what a trace holds. Comparing and checking are other commands."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prism_sdk.cli.output import echo_json, echo_table, format_bytes, format_ns
from prism_sdk.errors import ExitCode
from prism_sdk.keys import PURPOSE_KEY
from prism_sdk.wording import counted, ranks_text

if TYPE_CHECKING:
    from prismtrace import TraceReader

_MAX_ROWS = 16
_MOST_RANKS = 1 << 14  # a small damaged file may name millions


@click.command("info")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--all", "show_all", is_flag=True, help="Show every rank and group, not the first 16.")
@click.option("--sizes", is_flag=True, help="Show where the bytes of the file go, by table and column.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(file: Path, show_all: bool, sizes: bool, as_json: bool) -> int:
    """Show what a trace holds: its kind, ranks, process groups, steps, and where it comes from.

    Files of a run that was cut off are shown as far as they go.

    \b
    Example:
        prism info real.prism
        prism info real.prism --sizes
    """
    from prismtrace import TraceReader

    with TraceReader(file, allow_unfinished=True) as reader:
        values = describe(reader, file=file)
        if sizes:
            values["sizes"] = _sizes(reader)
    if as_json:
        echo_json(values)
    else:
        _show(values, limit=None if show_all else _MAX_ROWS)
    return ExitCode.OK


def describe(reader: TraceReader, *, file: Path) -> dict[str, Any]:
    """What ``prism info --json`` prints. Absent values are null."""
    described = reader.ranks[:_MOST_RANKS]
    ranks = [_describe_rank(reader, rank) for rank in described]
    whole = len(described) == len(reader.ranks)
    medians = sorted(rank["step_ns_median"] for rank in ranks if rank["step_ns_median"] is not None)
    groups = [
        {
            "group_id": f"{group.group_id:016x}",
            "name": group.name,
            "description": group.description,
            "purpose": reader.metadata.get(PURPOSE_KEY.format(group.group_id)),
            "backend": group.backend,
            "ranks": [int(rank) for rank in group.ranks],
        }
        for group in reader.groups.values()
    ]
    return {
        "file": str(file),
        "size_bytes": file.stat().st_size,
        "format_version": list(reader.format_version),
        "writer": reader.writer,
        "graph_kind": reader.graph_kind.name.lower(),
        "world_size": int(reader.world_size),
        "finished": not reader.unfinished,
        "num_ranks": len(reader.ranks),
        "num_units": sum(rank["num_units"] for rank in ranks) if whole else None,
        "step_ns_median": medians[len(medians) // 2] if medians else None,
        "num_events": sum(rank["num_events"] for rank in ranks) if whole else None,
        "num_tracks": sum(rank["num_tracks"] for rank in ranks) if whole else None,
        "roles": _roles(reader),
        "attachments": _attachments(reader),
        "num_payloads": len(reader.payload_digests),
        "ranks": ranks,
        "groups": groups,
        "metadata": dict(sorted(reader.metadata.items())),
    }


def _roles(reader: TraceReader) -> dict[str, int]:
    """Role -> number of ranks that refer to it; empty where the trace has no roles."""
    role_of = getattr(reader, "role_of", None)
    if role_of is None or not getattr(reader, "roles", ()):
        return {}
    counts = Counter(role_of(rank) for rank in reader.ranks)
    return {str(role): counts[role] for role in sorted(role for role in counts if role is not None)}


def _attachments(reader: TraceReader) -> dict[str, int]:
    """Name -> bytes."""
    found = reader.attachments.items()
    return {name: reader.payload_bytes(digest) for name, digest in found if reader.has_payload(digest)}


def _sizes(reader: TraceReader) -> dict[str, Any]:
    from prismtrace import file_sizes

    found = file_sizes(reader)
    return {
        "file_bytes": found.file_bytes,
        "payload_bytes": found.payload_bytes,
        "payload_raw_bytes": found.payload_raw_bytes,
        "other_bytes": found.other_bytes,
        "num_rows": found.num_rows,
        "columns": [vars(column) for column in found.columns],
    }


def _describe_rank(reader: TraceReader, rank: int) -> dict[str, Any]:
    import numpy as np

    from prismtrace import ABSENT

    steps = reader.steps(rank)
    timed = (steps.start_ns != ABSENT) & (steps.end_ns != ABSENT)
    durations = (steps.end_ns - steps.start_ns)[timed]
    peaks = steps.memory_peak_bytes[steps.memory_peak_bytes != ABSENT]
    losses = steps.loss[~np.isnan(steps.loss)]
    numbers = steps.step
    return {
        "rank": int(rank),
        "num_units": int(reader.num_units(rank)),
        "num_events": int(reader.num_events(rank)),
        "num_tracks": len(reader.tracks(rank, columns=("kind",))),
        "num_steps": len(steps),
        "first_step": int(numbers.min()) if len(steps) else None,
        "last_step": int(numbers.max()) if len(steps) else None,
        "step_ns_median": int(np.median(durations)) if len(durations) else None,
        "step_ns_min": int(durations.min()) if len(durations) else None,
        "step_ns_max": int(durations.max()) if len(durations) else None,
        "loss_first": float(losses[0]) if len(losses) else None,
        "loss_last": float(losses[-1]) if len(losses) else None,
        "memory_peak_bytes": int(peaks.max()) if len(peaks) else None,
    }


def _show(values: dict[str, Any], *, limit: int | None) -> None:
    metadata: dict[str, str] = values["metadata"]
    size = format_bytes(values["size_bytes"])
    version = ".".join(map(str, values["format_version"]))
    state = "" if values["finished"] else ", unfinished (prism recover saves it)"
    click.echo(f"{values['file']}: {values['graph_kind']} graph, format {version}, {size}{state}")
    ranks, groups = values["ranks"], values["groups"]
    world = f" of {values['world_size']}" if values["world_size"] else ""  # 0: unknown
    units = "" if values["num_units"] is None else f", {counted(values['num_units'], 'unit')}"
    click.echo(f"ranks: {values['num_ranks']}{world}{units}")
    if values["num_events"] or values["num_tracks"]:
        click.echo(f"events: {values['num_events']} on {counted(values['num_tracks'], 'track')}")
    if values["roles"]:
        click.echo(f"roles: {len(values['roles'])} for {counted(sum(values['roles'].values()), 'rank')}")
    if values["attachments"]:
        named = ", ".join(f"{name} ({format_bytes(size)})" for name, size in values["attachments"].items())
        click.echo(f"attachments: {named}")
    if values["step_ns_median"] is not None:
        click.echo(f"step: {format_ns(values['step_ns_median'])} (median)")
    rows = []
    for rank in ranks[:limit]:
        span = "" if rank["first_step"] is None else f"{rank['first_step']}..{rank['last_step']}"
        times = [format_ns(rank[key]) for key in ("step_ns_median", "step_ns_min", "step_ns_max")]
        loss = "-" if rank["loss_last"] is None else f"{rank['loss_last']:.6g}"
        rows.append((rank["rank"], rank["num_units"], span, *times, loss, format_bytes(rank["memory_peak_bytes"])))
    if rows:
        headers = ("rank", "units", "steps", "step median", "min", "max", "last loss", "peak memory")
        click.echo()
        echo_table(headers, rows, right=range(8))
        _show_rest(values["num_ranks"] - len(rows), what="rank")
    if groups:
        click.echo()
        table = [
            (group["name"], group["description"], group["purpose"] or "-", group["backend"], len(group["ranks"]),
             ranks_text(group["ranks"]), int(group["group_id"], 16))
            for group in groups[:limit]
        ]  # fmt: skip
        echo_table(("group", "description", "purpose", "backend", "size", "ranks", "group_id"), table, right=(4,))
        _show_rest(len(groups) - len(table), what="group")
    if "sizes" in values:
        _show_sizes(values["sizes"], limit=limit)
    in_table = {PURPOSE_KEY.format(int(group["group_id"], 16)) for group in groups}
    if rest := {key: value for key, value in metadata.items() if key not in in_table}:
        click.echo()
        for key, value in rest.items():
            click.echo(f"{key} = {_short(value)}")


def _show_sizes(sizes: dict[str, Any], *, limit: int | None) -> None:
    total = max(1, sizes["file_bytes"])
    columns = sizes["columns"][:limit]
    rows = [(item["table"], item["column"], item["stored_bytes"], item["raw_bytes"]) for item in columns]
    if sizes["payload_bytes"]:
        rows.append(("payloads", "", sizes["payload_bytes"], sizes["payload_raw_bytes"]))
    rows.append(("index and rest", "", sizes["other_bytes"], sizes["other_bytes"]))
    shown = []
    for table, column, stored, raw in sorted(rows, key=lambda row: -row[2]):
        num_rows = sizes["num_rows"].get(table)
        per_row = f"{stored / num_rows:.3f}" if num_rows else ""
        shown.append((table, column, format_bytes(stored), f"{100 * stored / total:.1f} %", per_row, format_bytes(raw)))
    click.echo()
    echo_table(("table", "column", "in the file", "share", "bytes a row", "decompressed"), shown, right=(2, 3, 4, 5))
    _show_rest(len(sizes["columns"]) - len(columns), what="column")


def _show_rest(number: int, *, what: str) -> None:
    if number > 0:
        click.echo(f"... and {counted(number, f'more {what}')} (--all shows them)")


def _short(text: str, *, limit: int = 100) -> str:
    try:
        parsed = json.loads(text)
        text = " ".join(map(str, parsed)) if isinstance(parsed, list) else text
    except ValueError:
        pass
    text = text.replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 3] + "..."
