"""What every test of Prism shares: skipping what this machine cannot run, and which tests may run side by side.

Fixtures live beside their tests.
"""

from __future__ import annotations

import importlib.util
import signal
from typing import Any

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# These start jobs of several processes, bind them to CPUs, time them or look for what they left behind in /dev/shm.
LAUNCHING = ("tests/runtime/", "docs/trace-your-job.md", "docs/write-an-adapter.md")

# Files that take long, in the order of their begin beside those: many short ones at the end keep both workers busy.
LONG = (
    "tests/conformance/", "tests/architecture/test_layout.py", "plugins/fsdp/", "plugins/megatron/",
    "plugins/deepspeed/", "plugins/pipelining/", "tests/simulate/", "tests/nccl/",
)  # fmt: skip


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``pytest -n 2`` jobs run one after the other, beside them the other tests by files, which share fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "launches" if nodeid.startswith(LAUNCHING) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # files with the most tests first: they are not those that take longest
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, and skip tests marked ``gpu`` where there is no GPU.

    torch is imported only if a test marked ``gpu`` was collected.
    """
    places = [LAUNCHING, *LONG]
    items.sort(key=lambda item: next((n for n, place in enumerate(places) if item.nodeid.startswith(place)), 99))
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
