"""What every test of Prism shares: skipping what this machine cannot run, and which tests may run side by side.

Fixtures live beside their tests.
"""

from __future__ import annotations

import importlib.util

import pytest

# These start jobs of several processes, bind them to CPUs, time them or look for what they left behind in /dev/shm.
LAUNCHING = ("tests/conformance/", "tests/runtime/")


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for ``pytest -n 2 --dist loadgroup``, and skip tests marked ``gpu`` where there is no GPU.

    Jobs run one after the other and begin first, because together they take longest; the other tests go by files, which
    share fixtures. torch is imported only if a test marked ``gpu`` was collected.
    """
    for item in items:
        group = "launches" if item.nodeid.startswith(LAUNCHING) else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: not item.nodeid.startswith(LAUNCHING))
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
