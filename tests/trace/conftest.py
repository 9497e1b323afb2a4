"""Fixtures of the trace tests. Does not hold tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from trace_sample import write_sample


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A finished sample trace."""
    return write_sample(tmp_path / "sample.prism")
