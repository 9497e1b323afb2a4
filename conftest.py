"""Collects the code blocks of the documentation as tests, where Sybil is installed; ``tests/docs`` has the rest."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

_collect: Any = None
if importlib.util.find_spec("sybil") is not None:
    from tests.docs.blocks import collector

    _collect = collector()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Any:
    """The items of a page; nothing for other files."""
    return None if _collect is None else _collect(file_path, parent)
