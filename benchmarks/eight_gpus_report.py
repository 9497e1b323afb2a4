"""What eight_gpus.py says of its runs: comparisons of traces, rows of a table, and small redacted traces.

Responsible for form; nothing is run here. It is no script.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_MOST_KERNELS = 12


def compared(real: Sequence[str], other: Sequence[str], rank: int) -> dict[str, Any]:
    """What traces say of a rank's units, kernels, memory and order, beside the real runs' own variation."""
    from prism_sdk.graph.compare import compare_traces

    comparison = compare_traces(list(real), list(other))
    one = next(found for found in comparison.ranks if found.rank == rank)
    return {
        "units": [
            [unit.kind, unit.op, unit.phase, unit.num_real, unit.num_other, unit.real_median_ns,
             unit.other_median_ns, unit.error_percent] for unit in one.units
        ],
        "kernels": [
            [kernel.name[:60], kernel.num_real, kernel.num_other, round(kernel.real_ns), kernel.error_percent,
             kernel.real_spread_percent, kernel.start_difference_ns, kernel.real_start_spread_ns]
            for kernel in one.kernels[:_MOST_KERNELS]
        ],
        "peak_bytes_apart": None if one.memory is None else one.memory.difference_bytes,
        "order_is_equal": None if one.order is None else one.order.is_equal,
    }  # fmt: skip


def table(results: Mapping[str, Any], cut: Sequence[str], *, gpus: int, names: Sequence[str]) -> str:
    """Rows of Markdown: of each job the real step, the errors of both emulations and of the prediction, and bytes."""
    titles = [f"job, {gpus} ranks", "real, ms", "spread, %", *(f"{name}: mean error, worst, %" for name in names),
              "bytes apart", "from one GPU alone, %"]  # fmt: skip
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for job, found in results.items():
        known = [found.get(name, {}) for name in names]
        errors = [
            f"{one['error_percent']:+.2f}, {one['worst_percent']:+.2f}" if "error_percent" in one else "not run"
            for one in known
        ]
        apart = [one["worst_bytes"] for one in known if "worst_bytes" in one]
        alone = found.get("predicted from one GPU", {}).get("error_percent")
        cells = [
            job, *(str(found.get(key, "not run")) for key in ("real_ms", "real_spread_percent")), *errors,
            str(max(apart)) if apart else "not run", "not run" if alone is None else f"{alone:+.2f}",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", *(f"Not run: {line.strip()}" for line in cut), ""])


def keep_traces(
    traces: Mapping[str, Mapping[str, Sequence[Path]]], output: Path, *, rank_of: Callable[[str], int]
) -> None:
    """Of each job and kind of run the first trace, of one rank, redacted."""
    from prismtrace import redact, slice_trace

    with tarfile.open(output, "w") as kept:
        for job, by_name in traces.items():
            for name, paths in by_name.items():
                path = next((path for path in paths if path.exists()), None)
                if path is None:
                    continue
                part, public = path.with_suffix(".part"), path.with_suffix(".public")
                slice_trace(path, part, ranks=[rank_of(job)], keep_payloads=False)
                redact(part, public)
                kept.add(public, arcname=f"{job}-{name.replace(' ', '-')}.prism")
