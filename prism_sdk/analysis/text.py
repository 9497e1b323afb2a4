"""Writes analyses as plain text and as HTML for notebooks. It analyses nothing and prints nothing."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prism_sdk.wording import counted

if TYPE_CHECKING:
    from prism_sdk.analysis.difference import Explanation
    from prism_sdk.analysis.overview import Analysis

__all__ = ["analysis_html", "analysis_tables", "format_analysis", "format_explanation"]

#: A title, the names of the columns, and the rows; the first column is text.
Table = tuple[str, Sequence[str], list[list[str]]]

_MAX_ROWS = 12


def ms(ns: float | None) -> str:
    """Milliseconds with three decimals."""
    return "-" if ns is None else f"{ns / 1e6:.3f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 6 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"


def analysis_tables(analysis: Analysis) -> Iterator[Table]:
    """The tables of an analysis; those without rows are left out."""
    yield from (table for table in _tables(analysis) if table[2])


def _tables(a: Analysis) -> Iterator[Table]:
    step = a.breakdown.mean_step_ns
    rows = [[name.replace("_", " "), ms(value), _share(value, step)] for name, value in
            a.breakdown.mean_parts_ns.items()]  # fmt: skip
    yield "where a step goes (mean over ranks and steps)", ("part", "ms", "share"), [*rows, ["step", ms(step), ""]]
    rows = [[run.path, str(run.num_steps), ms(run.mean_ns), f"{ms(run.interval.low)} .. {ms(run.interval.high)}",
             f"{100 * run.variation:.2f} %", ms(run.min_ns), ms(run.max_ns)] for run in a.variation.runs]  # fmt: skip
    yield ("step times of the job, ms", ("run", "steps", "mean", "95 % interval", "variation", "min", "max"),
           rows)  # fmt: skip
    path = a.critical_path
    if path is not None:
        total = path.length_ns
        rows = [[name, str(number), ms(time), _share(time, total)] for name, number, time in a.top_units()]
        yield f"critical path through all steps, {ms(total)} ms", ("on the path", "segments", "ms", "share"), rows
        slack = a.rank_slack_ns()
        on_path = sorted(path.ranks_ns.items(), key=lambda item: -item[1])[:_MAX_ROWS]
        rows = [[str(rank), ms(time), _share(time, total), ms(slack.get(rank))] for rank, time in on_path]
        yield "ranks on the critical path", ("rank", "ms on it", "share", "smallest slack, ms"), rows
    if a.pipeline is not None:
        p = a.pipeline
        rows = [[str(s.stage), _ranks(s.ranks), ms(s.busy_ns), ms(s.bubble_ns), f"{s.bubble_ratio:.4f}",
                 f"{p.expected_ratio:.4f}"] for s in p.stages]  # fmt: skip
        microbatches = counted(p.num_microbatches, "microbatch", "microbatches")
        title = (f"pipeline: {counted(p.num_stages, 'stage')}, {microbatches}, "
                 f"{counted(p.num_chunks, 'chunk')} a stage; bubble / busy beside (p - 1) / (v m)")  # fmt: skip
        yield title, ("stage", "ranks", "busy ms", "bubble ms", "ratio", "formula"), rows
    rows = [[str(r.rank), "-" if r.stage is None else str(r.stage), r.cause or "-", f"{r.num_last}/{r.num_collectives}",
             ms(r.caused_wait_ns), ms(r.excess_compute_ns), ms(r.stage_excess_ns), ms(r.excess_network_ns),
             ms(r.excess_host_ns)] for r in a.stragglers.found[:_MAX_ROWS]]  # fmt: skip
    yield ("stragglers (excess over peers: ms a step)",
           ("rank", "stage", "cause", "last", "wait caused", "compute", "stage compute", "network", "host"),
           rows)  # fmt: skip
    rows = [[f"{b.op} in {b.group_name or (hex(b.group_id) if b.group_id else 'no group')}", str(b.num_members),
             f"{b.size_bytes:,}", str(b.num_operations), ms(b.time_ns), _gb(b.algbw_gb_per_s), _gb(b.busbw_gb_per_s),
             "" if b.is_transfer else "with waiting"] for b in a.bandwidths[:_MAX_ROWS]]  # fmt: skip
    yield ("communication (medians)", ("operation", "ranks", "bytes", "times", "ms", "algbw GB/s", "busbw GB/s", ""),
           rows)  # fmt: skip
    rows = [[b.group_name or hex(b.group_id), str(b.num_operations), f"{b.imbalance:.3f}", f"{b.variation:.3f}",
             f"{b.worst_imbalance:.3f} (seq {b.worst_seq})", str(b.ranks[b.shares.index(max(b.shares))])]
            for b in a.balance[:_MAX_ROWS]]  # fmt: skip
    yield ("balance of all-to-alls (largest load over mean)",
           ("group", "times", "imbalance", "variation", "worst", "most loaded rank"), rows)  # fmt: skip
    for title, name, costs in (("layers", "layer", a.layers), (f"by {a.by}", a.by or "", a.costs_by)):
        rows = [[one.layer or f"no {name}", str(one.num_ranks), ms(one.forward_ns), ms(one.backward_ns),
                 ms(one.other_ns), ms(one.waiting_ns), _share(one.share, 1), ms(one.communication_ns),
                 f"{one.communication_bytes:,.0f}"] for one in costs[:_MAX_ROWS]]  # fmt: skip
        if left := costs[_MAX_ROWS:]:
            rows.append([f"{len(left)} more", *[""] * 5, _share(sum(one.share for one in left), 1), "", ""])
        header: Sequence[str] = (name, "ranks", "forward ms", "backward ms", "other ms", "waiting ms", "share",
                                 "communication ms", "bytes")  # fmt: skip
        if title == "layers":  # other computing is in the share alone
            rows, header = [[*row[:4], *row[5:]] for row in rows], [*header[:4], *header[5:]]
        yield (f"{title} (a step, mean over the ranks that have them; share: computing and waiting, of the step of all "
               "ranks)", header, rows)  # fmt: skip
    rows = [[one.layer or "no layer", str(one.num_ranks), str(one.num_routings),
             f"{one.imbalance:.3f}", f"{one.worst_imbalance:.3f}", _tokens(one.tokens)]
            for one in a.experts[:_MAX_ROWS]]  # fmt: skip
    yield ("experts (largest load over mean, by microbatch; share of tokens by expert)",
           ("layer", "ranks", "microbatches", "imbalance", "worst", "tokens of experts"), rows)  # fmt: skip
    most = sorted(a.memory, key=lambda m: -m.peak_bytes)[:_MAX_ROWS]
    rows = [[str(m.rank), f"{m.peak_bytes:,}", "-" if m.peak_step is None else str(m.peak_step), m.peak_phase or "-",
             str(len(m.microbatches_held)), "-" if m.bytes_per_microbatch is None else f"{m.bytes_per_microbatch:,.0f}"]
            for m in most]  # fmt: skip
    yield ("memory peaks", ("rank", "bytes", "step", "phase", "microbatches held", "bytes a microbatch"), rows)


def _tokens(tokens: Sequence[int]) -> str:
    """The share of each expert; of many, those of the three that have most and the one that has least."""
    order = sorted(range(len(tokens)), key=lambda expert: -tokens[expert])
    shown = range(len(tokens)) if len(tokens) <= 8 else [*order[:3], order[-1]]
    shares = [f"{expert}: {_share(tokens[expert], sum(tokens))}" for expert in shown]
    return ", ".join(shares if len(tokens) <= 8 else [*shares[:3], "...", shares[3]])


def _gb(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def plain(table: Table) -> str:
    """A table as lines of text."""
    title, header, rows = table
    widths = [max(len(row[i]) for row in [list(header), *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
             for row in [list(header), *rows]]  # fmt: skip
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def format_analysis(analysis: Analysis) -> str:
    """The tables of an analysis, and its notes."""
    job = analysis.loaded
    overlap = analysis.breakdown.overlap_ratio
    ranks = f"{len(job.ranks)} of {counted(job.graph.world_size, 'rank')}"
    head = f"{job.path}: {job.graph.graph_kind.name.lower()} graph, {ranks}"
    if overlap is not None:
        head += f", {100 * overlap:.1f} % of communication hidden by computing"
    notes = "\n".join(["notes", *(f"  - {note}" for note in analysis.notes)]) if analysis.notes else ""
    return "\n\n".join(part for part in [head, *map(plain, analysis_tables(analysis)), notes] if part) + "\n"


def format_explanation(explanation: Explanation) -> str:
    """Why two traces differ, as text."""
    e = explanation
    rows = [[part.name.replace("_", " "), ms(part.first_ns), ms(part.second_ns), f"{part.difference_ns / 1e6:+.3f}"]
            for part in e.parts]  # fmt: skip
    rows.append(["step", ms(e.first_step_ns), ms(e.second_step_ns), f"{e.difference_ns / 1e6:+.3f}"])
    rows.append(["step of the job", ms(e.first_job_ns), ms(e.second_job_ns),
                 f"{(e.second_job_ns - e.first_job_ns) / 1e6:+.3f}"])  # fmt: skip
    units = [[u.name, ms(u.first_ns), ms(u.second_ns), f"{u.difference_ns / 1e6:+.3f}"] for u in e.units[:_MAX_ROWS]]
    columns = ("", "first", "second", "difference")
    parts = [f"first:  {e.first}\nsecond: {e.second}\n{e.sentence}",
             plain(("where the difference lies, ms a step (mean over ranks)", columns, rows)),
             plain(("in which units, ms a step (they overlap: no sum)", columns, units)) if units else "",
             "\n".join(["notes", *(f"  - {note}" for note in e.notes)]) if e.notes else ""]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def table_html(table: Table) -> str:
    """A table as HTML, escaped."""
    title, header, rows = table
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (f"<table><caption>{html.escape(title)}</caption><thead><tr>{cells}</tr></thead>"
            f"<tbody>{body}</tbody></table>")  # fmt: skip


def analysis_html(analysis: Analysis) -> str:
    """The analysis for a notebook."""
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in analysis.notes)
    return "<div>" + "".join(map(table_html, analysis_tables(analysis))) + (f"<ul>{notes}</ul>" if notes else "") + (
        "</div>")  # fmt: skip
