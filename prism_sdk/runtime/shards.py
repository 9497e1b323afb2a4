"""From the shards that ranks wrote to one trace.

Responsible for where shards lie and for merging them, whole or cut off; the format is prismtrace's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import prismtrace
from prism_sdk.runtime.config import StepRange


def parts_directory(output: Path) -> Path:
    """The folder beside `output` that holds the ranks' shards while a job runs."""
    return output.with_name(output.name + ".parts")


def output_of(shard: str) -> str:
    """The output that a file in its folder of shards is for; the file itself where it lies elsewhere."""
    folder = Path(shard).parent
    return str(folder.with_name(folder.name.removesuffix(".parts"))) if folder.name.endswith(".parts") else shard


def merge_shards(parts: Path, output: Path, metadata: Mapping[str, str], *, steps: StepRange | None = None) -> int:
    """Merge the shards in `parts` into `output` and remove them; returns how many there were.

    With `steps` only the units, scalars and rows of those steps go into the output.

    A shard that its rank could not finish is recovered up to its last whole chunk first. With no shard nothing is
    written. The output appears whole or not at all.
    """
    shards = []
    for shard in sorted(parts.glob("rank-*.prism")):
        try:
            with prismtrace.TraceReader(shard):
                shards.append(shard)
        except prismtrace.PrismTraceError:
            recovered = shard.with_suffix(".recovered")
            try:
                prismtrace.recover(shard, recovered)
                shards.append(recovered)
            except prismtrace.TraceWriteError:
                raise
            except prismtrace.PrismTraceError:
                continue  # not even a header was written
    if shards:
        if steps is None or steps.is_all:
            prismtrace.merge(shards, output, metadata=dict(metadata), overwrite=True)
        else:
            joined = parts / "joined.prism"
            prismtrace.merge(shards, joined, metadata=dict(metadata), overwrite=True)
            prismtrace.slice_trace(joined, output, steps=steps.as_range(), overwrite=True)
    shutil.rmtree(parts, ignore_errors=True)
    return len(shards)
