"""Prepares the fork server, so that a rank forked from it pays little memory and time for what all ranks need.

Responsible for the imports, for one small training run ahead and for the state of the heap; forking is forkserver.py's.

A forked rank pays for each page that it writes, and CPython writes nearly everywhere: reference counts, the warm-up
counters of code that runs for the first times, the caches of specialised instructions.  What ran here before the fork
is warm already (0102-fork-server.md has the measurements).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prismtrace import GraphKind

# what a rank imports itself it pays for itself; torch's first optimizer step would import torch._dynamo
_MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.profiler._cupti_monitor",
    "torch.testing._internal.distributed.fake_pg",
    "prism_sdk.runtime.agent",
    "prism_sdk.runtime.emulate",
    "prism_sdk.runtime.hooks",
    "prism_sdk.runtime.observe",
    "prism_sdk.runtime.record",
    "prism_sdk.runtime.store",
)

# torch.manual_seed and torch.library quote these files' lines for their messages: 1 MiB a rank
_QUOTED = (
    "torch._compile",
    "torch._dynamo.eval_frame",
    "torch.cuda",
    "torch.cuda.random",
    "torch.mtia",
    "torch.random",
    "torch.xpu",
    "torch.xpu.random",
    "prism_sdk.runtime.agent",
    "prism_sdk.runtime.forkserver",
    "prism_sdk.runtime.intercept",
    "prism_sdk.runtime.program",
)

_REHEARSED_STEPS = 10  # CPython 3.11 specialises code at its eighth run
_SMALLEST_CHUNK_BYTES = 24  # glibc's
_LARGEST_HOLE_BYTES = 1 << 17  # larger ones are mapped, not carved from the heap
_MOST_CHUNKS = 100_000
_EMPTY_BYTES = sys.getsizeof(b"")

_kept: list[Any] = []  # what fills the holes of Python's own allocator


def prepare(adapters: Sequence[str] = (), imports: Sequence[str] = ()) -> None:
    """Import torch and get it warm; no thread, no group, no random state stays. Raises what an import raises.

    The modules `imports` are imported too, and the wrappers of `adapters` are in place then where that is possible.
    """
    gc.disable()  # imports make next to no garbage, and to look for some takes a tenth of their time
    try:
        _prepare(adapters, imports)
        gc.collect()
        _fill_holes()
    finally:
        gc.enable()
    gc.freeze()
    _check_no_gpu_is_open()


def _prepare(adapters: Sequence[str], imports: Sequence[str]) -> None:
    variables = dict(os.environ)
    for name in (*_MODULES, *imports):
        if importlib.util.find_spec(name) is not None:  # some are private to a version of torch
            importlib.import_module(name)
    from prism_sdk.runtime import intercept
    from prism_sdk.runtime.activating import adapters_before_fork, prepare_adapters

    adapters = adapters_before_fork(adapters)
    _forget_lookups()
    with _one_thread():
        _compute()
        with contextlib.suppress(Exception):  # no room for a file, a torch without the fake group: costs memory only
            _trace(adapters)
    intercept.replace_kernels()
    prepare_adapters(adapters)
    for name in _QUOTED:
        if name in sys.modules:
            linecache.getlines(inspect.getsourcefile(sys.modules[name]) or "")
    for variable in os.environ.keys() - variables.keys():  # set by an import: a rank gets it when it imports that
        del os.environ[variable]
    _forget_finalizers()


def reseed() -> None:
    """Draw the seed that torch draws when it is imported; a device's is not drawn there."""
    import torch

    torch.default_generator.seed()


def undo() -> None:
    """Take the wrappers out again, before the interpreter takes itself apart around them."""
    from prism_sdk.runtime.activating import release_adapters

    release_adapters()


def _forget_lookups() -> None:
    """Empty CPython's cache of attribute lookups: replacing an entry lets go of a name, on a page of the imports'."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 3.13 calls it deprecated
        sys._clear_type_cache()


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.current_accelerator() is not None  # of the build: asks no driver


def _check_no_gpu_is_open() -> None:
    """CUDA does not survive a fork: what opens a GPU at import would break every rank."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                    raise RuntimeError("an import has opened the GPU, which a forked rank could not use then")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """No other thread outlives a fork."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _compute() -> None:
    """What libraries set up at the first computation."""
    import torch

    with torch.no_grad():
        rows, weight = torch.zeros(16, 64), torch.zeros(64, 64)
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(rows, weight, weight[0]))
        torch.nn.functional.cross_entropy(torch.nn.functional.layer_norm(hidden, (64,)), torch.zeros(16).long())


def _trace(adapters: Sequence[str]) -> None:
    """Write a few steps as a rank's trace, with the adapters at work."""
    from prism_sdk.runtime.activating import activate_adapters
    from prism_sdk.runtime.tracer import Tracer, open_shard

    with tempfile.TemporaryDirectory() as folder:
        tracer = Tracer(0, open_shard(Path(folder), 0, GraphKind.BARE, 1, {}))
        with contextlib.ExitStack() as until:
            naming = activate_adapters(adapters, (), tracer, until)
            if not _has_accelerator():  # its backward would start threads and a driver, and no fork survives those
                _rehearse()
            for _ in range(_REHEARSED_STEPS):
                tracer.backward_begins([0.0])
                tracer.backward_ends()
                tracer.optimizer_begins()
                tracer.optimizer_ends()
                tracer.flush()
        naming.write()
        tracer.finish("complete")


def _rehearse() -> None:
    """Train a few steps with DistributedDataParallel over torch's fake process group, and undo what that left."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook, state = sys.excepthook, torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            for optimizer_class in (torch.optim.SGD, torch.optim.AdamW):
                _train(optimizer_class)
        finally:
            dist.destroy_process_group()
            torch.set_rng_state(state)
            sys.excepthook = hook


def _train(optimizer_class: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    layers = (torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    for _ in range(_REHEARSED_STEPS):
        with model.no_sync():  # the fake group answers the reducer's all-reduce with nothing
            loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.zeros(4).long())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        dist.barrier()
        loss.item()


def _forget_finalizers() -> None:
    """Ranks need not undo what the imports registered: taking torch's operators apart costs 30 MiB and 30 ms a rank."""
    registry = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        finalizer.atexit = False


def _fill_holes() -> None:
    """Use up the free places between what the imports allocated, so that a rank allocates on pages of its own.

    Scattered over the holes, a few small objects of a rank would take a private copy of a whole page each.
    """
    _fill_python_pools()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return  # not glibc, or one before 2.33
    libc.mallinfo2.restype = _MallInfo2
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    size, num_chunks = _LARGEST_HOLE_BYTES, 0
    while size >= _SMALLEST_CHUNK_BYTES and num_chunks < _MOST_CHUNKS:
        top = _top_of_heap(libc)
        while _top_of_heap(libc) == top and num_chunks < _MOST_CHUNKS:  # a smaller top: no hole of this size was left
            libc.malloc(size)  # kept for ever
            num_chunks += 1
        size = size // 2 if size > 1024 else size - 16


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2` (mallinfo(3))."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _top_of_heap(libc: Any) -> tuple[int, int]:
    info = libc.mallinfo2()
    return info.arena, info.keepcost


def _fill_python_pools() -> None:
    """The same for objects of up to 512 bytes; how many places are free stands in CPython's own statistics only."""
    for size, num_free in re.findall(r"^ *\d+ +(\d+) +\d+ +\d+ +(\d+)$", _malloc_statistics(), re.MULTILINE):
        if int(size) > _EMPTY_BYTES:
            _kept.append([bytes(int(size) - _EMPTY_BYTES) for _ in range(int(num_free))])


def _malloc_statistics() -> str:
    """What `sys._debugmallocstats` writes to the file descriptor of standard error."""
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        saved = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            sys._debugmallocstats()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        file.seek(0)
        return file.read().decode(errors="replace")
