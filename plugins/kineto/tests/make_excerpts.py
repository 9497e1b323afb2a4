"""Cuts the excerpts in data/ out of the published files: the first ones, NCCL kernels with their records.

Usage: python make_excerpts.py FOLDER_WITH_THE_PUBLISHED_FILES
"""

from __future__ import annotations

import gzip
import re
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent / "data"
PRIVATE = re.compile(r'("(?:host_?name|username|tw_job|trace_id|mast_\w+)": )"[^"]*"')
EVENT = re.compile(r"\n  \{.*?\n  \}", re.DOTALL)


def excerpt(text: str, *, first: int, wanted: str) -> str:
    """The same text with fewer events, byte for byte otherwise."""
    start = text.index("[", text.index('"traceEvents"')) + 1
    stop = text.rindex("]")
    events = EVENT.findall(text[start:stop])
    pattern = re.compile(wanted)
    kept = [
        event for index, event in enumerate(events) if index < first or pattern.search(event) or '"ph": "M"' in event
    ]
    kept = kept[:first] + kept[first:][-160:]
    before, after = (PRIVATE.sub(r'\1"redacted"', part) for part in (text[:start], text[stop:]))
    return before + ",".join(kept) + "\n  " + after


def main(folder: Path) -> None:
    """Writes the excerpts."""
    wanted = "nccl|record_param_comms|ProfilerStep"
    sources = {
        "nccl_data.json": folder / "hta/nccl_data.json.gz",
        "mi300.json": folder / "tracelens/resnet_act_checkpoint.json.gz",
        "ns_times.json": folder / "hta/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    }
    for name, path in sources.items():
        text = excerpt(gzip.decompress(path.read_bytes()).decode(), first=60, wanted=wanted)
        (HERE / name).write_text(text)
    with tarfile.open(folder / "param/dlrm_kineto.tar.gz") as archive:
        for member in archive:
            found = re.search(r"worker([01])_", member.name)
            content = archive.extractfile(member) if found else None
            if found and content:
                text = excerpt(content.read().decode(), first=40, wanted=r'"cat": "kernel"|ProfilerStep')
                (HERE / f"dlrm-worker{found[1]}.json").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
