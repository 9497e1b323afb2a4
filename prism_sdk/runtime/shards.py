"""From the shards that ranks wrote to one trace.

Responsible for where shards lie and for merging them, whole or cut off; the format is prismtrace's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import prismtrace


def parts_directory(output: Path) -> Path:
    """The folder beside `output` that holds the ranks' shards while a job runs."""
    return output.with_name(output.name + ".parts")


def merge_shards(parts: Path, output: Path, metadata: Mapping[str, str]) -> int:
    """Merge the shards in `parts` into `output` and remove them; returns how many there were.

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
        prismtrace.merge(shards, output, metadata=dict(metadata), overwrite=True)
    shutil.rmtree(parts, ignore_errors=True)
    return len(shards)
