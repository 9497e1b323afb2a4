"""Writes a comparison of traces as plain text for people, and makes its values such that JSON knows them.

It compares nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any

from prism_sdk.wording import counted

if TYPE_CHECKING:
    from prism_sdk.graph.compare import Comparison

__all__ = ["format_comparison", "plain_values"]


def format_comparison(comparison: Comparison) -> str:
    """The tables of a comparison, sections without data left out, and a list of what is missing."""
    sections = [
        f"real:  {', '.join(comparison.real)}\nother: {', '.join(comparison.other)}",
        _step_times(comparison),
        _losses(comparison),
        _memory(comparison),
        _order(comparison),
        _units(comparison),
        *_kernels(comparison),
        _missing(comparison),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _ms(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e6:.3f}"


def _percent(value: float | None, *, signed: bool = True) -> str:
    if value is None:
        return "-"
    return f"{value:+.2f} %" if signed else f"{value:.2f} %"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 0) -> str:
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(c.ljust(w) if i < num_left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in [header, *rows]
    ]
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def _step_times(comparison: Comparison) -> str:
    rows = []
    for rank in comparison.ranks:
        t = rank.step_time
        if t is not None:
            within = {True: "yes", False: "no", None: "-"}[t.is_within_real_range]
            rows.append([str(rank.rank), str(t.num_steps),
                         _ms(t.real_mean_ns), _ms(t.real_median_ns), _ms(t.real_std_ns),
                         _ms(t.other_mean_ns), _ms(t.other_median_ns), _ms(t.other_std_ns), _percent(t.error_percent),
                         _percent(t.real_spread_percent, signed=False), _percent(t.other_spread_percent, signed=False),
                         within])  # fmt: skip
    header = ["rank", "steps", "real mean", "median", "std", "other mean", "median", "std", "error", "real spread",
              "other spread", "within"]  # fmt: skip
    table = _table("step time, ms (without the first step)", header, rows)
    if comparison.mean_abs_error_percent is None:
        return table
    return (f"{table}\n  mean error {_percent(comparison.mean_abs_error_percent, signed=False)}, worst "
            f"{_percent(comparison.worst_abs_error_percent, signed=False)} (absolute values, over ranks)")  # fmt: skip


def _losses(comparison: Comparison) -> str:
    blocks = []
    for rank in comparison.ranks:
        loss = rank.loss
        if loss is None:
            continue
        if loss.is_bit_equal:
            verdict = "equal to the bit"
        else:
            verdict = f"largest difference {loss.max_abs_difference:.3g} ({loss.max_rel_difference:.3g} relative)"
        if loss.real_max_abs_difference is not None:
            verdict += f"; among the real runs {loss.real_max_abs_difference:.3g}"
        rows = [[str(s), f"{a:.9g}", f"{b:.9g}"] for s, a, b in zip(loss.steps, loss.real, loss.other, strict=True)]
        if len(rows) > 12:
            rows = [*rows[:6], ["...", "...", "..."], *rows[-5:]]
        blocks.append(_table(f"loss of rank {rank.rank}: {verdict}", ["step", "real", "other"], rows))
    return "\n".join(blocks)


def _memory(comparison: Comparison) -> str:
    rows = [
        [str(r.rank), f"{max(r.memory.real_peak_bytes):,}", f"{max(r.memory.other_peak_bytes):,}",
         f"{r.memory.difference_bytes:+,}", _percent(r.memory.error_percent)]
        for r in comparison.ranks if r.memory is not None
    ]  # fmt: skip
    return _table("memory peak, bytes", ["rank", "real", "other", "difference", "error"], rows)


def _order(comparison: Comparison) -> str:
    lines = []
    for rank in comparison.ranks:
        order = rank.order
        if order is None:
            continue
        if order.is_equal:
            lines.append(f"  rank {rank.rank}: equal ({counted(order.num_compared, 'operation')})")
        else:
            lines.append(f"  rank {rank.rank}: differs at operation {order.first_difference_index}\n"
                         f"    real:  {order.real or 'no more operations'}\n"
                         f"    other: {order.other or 'no more operations'}")  # fmt: skip
    return "\n".join(["order of communication", *lines]) if lines else ""


def _units(comparison: Comparison) -> str:
    rows = [
        [str(r.rank), u.kind, u.op, u.phase, str(u.num_real), str(u.num_other), _ms(u.real_median_ns),
         _ms(u.other_median_ns), _percent(u.error_percent)]
        for r in comparison.ranks for u in r.units
    ]  # fmt: skip
    header = ["rank", "kind", "operation", "phase", "real units", "other units", "real median", "other median", "error"]
    return _table("units, ms from start to end (without the first step)", header, rows, num_left=4)


_MAX_KERNELS = 20
_NAME_WIDTH = 60


def _us(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e3:.1f}"


def _kernels(comparison: Comparison) -> list[str]:
    header = ["name", "real", "other", "real us", "other us", "error", "real spread", "start", "real spread"]
    tables = []
    for rank in comparison.ranks:
        rows = [
            [k.name if len(k.name) <= _NAME_WIDTH else k.name[: _NAME_WIDTH - 3] + "...", str(k.num_real),
             str(k.num_other), _us(k.real_ns), _us(k.other_ns), _percent(k.error_percent),
             _percent(k.real_spread_percent, signed=False),
             "-" if k.start_difference_ns is None else f"{k.start_difference_ns / 1e3:+.1f}",
             _us(k.real_start_spread_ns)]
            for k in rank.kernels[:_MAX_KERNELS]
        ]  # fmt: skip
        title = f"kernels of rank {rank.rank}: time in a step, and start within it against the real runs', us"
        if len(rank.kernels) > _MAX_KERNELS:
            title += f" (the first {_MAX_KERNELS} of {len(rank.kernels)} names; all with --json)"
        tables.append(_table(title, header, rows, num_left=1))
    return tables


def _missing(comparison: Comparison) -> str:
    return "\n".join(["missing", *(f"  - {line}" for line in comparison.missing)]) if comparison.missing else ""


def plain_values(value: Any) -> Any:
    """The value with lists for tuples, None for NaN and words for infinities."""
    if isinstance(value, dict):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain_values(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None if isnan(value) else str(value)
    return value
