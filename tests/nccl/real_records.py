"""Record files of real NCCL for tests (data/README.md says where they come from)."""

from __future__ import annotations

from pathlib import Path

import zstandard

DATA = Path(__file__).parent / "data"


def unpack(folder: Path) -> list[Path]:
    """Write the two files into a folder."""
    files = []
    for packed in sorted(DATA.glob("*.zst")):
        files.append(folder / packed.stem)
        files[-1].write_bytes(zstandard.decompress(packed.read_bytes()))
    return files
