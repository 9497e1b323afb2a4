"""What observing adds to one call of torch.distributed, in microseconds, by operation.

    python benchmarks/observe_call.py [--backend fake|gloo] [--device cpu|played] [--calls 200] [--blocks 40]

One process, tiny tensors.  Blocks of calls with and without observing alternate; `plain` is the median of a call
without, `added` the median of the differences of neighbouring blocks.  With the backend `fake`, torch's own, which
moves nothing and returns at once, the time is CPU time of the calling thread, which depends least on what else the
machine does; with `gloo`, a group of one rank, it is wall time.  `played`: the tracer of GPUs with events that cost
nothing to speak of, so that its own Python is what is measured; "stream beside" is what FSDP2 does: a synchronous call
on another stream, and later the main one waits for an event of that.  `--profile OP` prints where the time goes.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C import _distributed_c10d as c10d

from prism_sdk.runtime import intercept, observe
from prism_sdk.runtime.hooks import follow_training
from prism_sdk.runtime.intercept import Interceptor
from prism_sdk.runtime.observe import ObserveSeam
from prism_sdk.runtime.oncuda import clock, durations, tracing
from prism_sdk.runtime.tracer import Tracer, open_shard
from prismtrace import GraphKind


class Played:
    """A GPU that costs nothing: streams are numbers, events hold a time."""

    def __init__(self) -> None:
        self.stream = 0
        played = self

        class Event:
            def __init__(self, **_: Any) -> None:
                self.at = 0

            def record(self, stream: Any = None) -> None:
                self.at = time.monotonic_ns()

            def wait(self, stream: Any = None) -> None:
                return None

            def query(self) -> bool:
                return True

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) / 1e6

        cuda: Any = torch.cuda
        cuda.Event = type(
            "Event", (Event,), {"record": lambda e, stream=None: None, "wait": lambda e, stream=None: None}
        )
        clock.Event = Event
        clock.current_device = lambda: 0  # type: ignore[assignment]
        clock.current_stream = lambda _device: played.stream  # type: ignore[assignment]
        cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=played.stream)
        cuda.is_initialized = lambda: True
        cuda.is_current_stream_capturing = lambda: False
        cuda.synchronize = lambda: None
        durations._entries = list
        device = torch.device("cuda")
        for module in (observe, tracing):
            module.device_of = lambda _call: device  # type: ignore[assignment]
        if hasattr(observe, "OUTLINES"):
            observe.OUTLINES.update({name: _on_device(outliner) for name, outliner in observe.OUTLINES.items()})
        for name in ("allreduce", "broadcast", "_allgather_base", "_reduce_scatter_base", "alltoall_base"):
            setattr(c10d.Backend, name, _as_nccl(getattr(c10d.Backend, name)))
        tracing.uses_nccl = lambda _backend: True
        if hasattr(tracing, "is_capturing"):
            tracing.is_capturing = clock.is_capturing = lambda: False


def _as_nccl(method: Any) -> Any:
    """NCCL gives no handle for what is not asynchronous."""

    def run(backend: Any, *given: Any) -> Any:
        work = method(backend, *given)
        return work if given[-1].asyncOp else None

    return run


def _on_device(outliner: Any) -> Any:
    def outline(group: Any, args: Any) -> Any:
        found = outliner(group, args)
        return None if found is None else (*found[:-1], True)

    return outline


class Switch:
    """Observing in this process, on or off."""

    def __init__(self, interceptor: Interceptor) -> None:
        self.interceptor = interceptor
        self.pid = interceptor.pid

    def turn(self, on: bool) -> None:
        self.interceptor.pid = self.pid if on else -1
        if on:
            intercept.replace_kernels()
        elif hasattr(intercept, "restore_kernels"):
            intercept.restore_kernels()
        elif intercept._library is not None:
            intercept._library._destroy()
            intercept._library = None


def operations(size: int, rank: int, played: Played | None) -> dict[str, Callable[[], object]]:
    one, many = torch.zeros(8), torch.zeros(8 * size)
    parts = list(many.chunk(size))
    group = dist.group.WORLD
    peer = (rank + 1) % size
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name since torch 2.13
    device = torch.device("cpu")

    def block() -> None:
        with dist._coalescing_manager(group, device=device, async_ops=True) as manager:
            dist.all_reduce(one)
            dist.all_reduce(many)
        manager.wait()

    def messages() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, one, peer), dist.P2POp(dist.irecv, many, peer)]):
            work.wait()

    found: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_reduce, async, wait": lambda: dist.all_reduce(one, async_op=True).wait(),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(many, one),
        "all_gather_into_tensor, async, wait": lambda: dist.all_gather_into_tensor(many, one, async_op=True).wait(),
        "reduce_scatter_tensor": lambda: scatter(one, many),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_gather (list)": lambda: dist.all_gather(parts, one),
        "all_to_all_single": lambda: dist.all_to_all_single(many, many.clone()),
        "barrier": lambda: dist.barrier(),
        "functional all_reduce, wait": lambda: functional.wait_tensor(functional.all_reduce(one, "sum", group)),
        "coalesced: 2 all_reduce, wait (a block)": block,
    }
    if size > 1:
        found["isend, wait"] = lambda: dist.isend(one, peer).wait()
        found["irecv, wait"] = lambda: dist.irecv(one, peer).wait()
        found["batch_isend_irecv: 2, waits (a batch)"] = messages
    if played is not None:
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            found[f"{name}, stream beside, main stream waits"] = _beside(played, found[name])
    return found


def _beside(played: Played, call: Callable[[], object]) -> Callable[[], object]:
    event_class: Any = torch.cuda.Event
    side, main = SimpleNamespace(cuda_stream=7), SimpleNamespace(cuda_stream=0)

    def run() -> None:
        played.stream = 7
        call()
        event = event_class()
        event.record(side)
        played.stream = 0
        event.wait(main)

    return run


def measure(
    call: Callable[[], object], switch: Switch, tracer: Tracer, clock_ns: Callable[[], int], *, calls: int, blocks: int
) -> tuple[float, float, float]:
    """Median us of a call without, median and minimum of what observing adds."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * (blocks + 1)):
        on = bool(number % 2) ^ bool(number // 2 % 2)
        switch.turn(on)
        for _ in range(10):
            call()
        begin = clock_ns()
        for _ in range(calls):
            call()
        times[on].append((clock_ns() - begin) / calls / 1e3)
        tracer.flush()
    pairs = [a - b for a, b in zip(times[True][1:], times[False][1:], strict=True)]
    return statistics.median(times[False]), statistics.median(pairs), min(times[True]) - min(times[False])


def profile(call: Callable[[], object], switch: Switch, calls: int) -> None:
    switch.turn(True)
    for _ in range(100):
        call()
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(calls):
            call()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["fake", "gloo"], default="fake")
    parser.add_argument("--device", choices=["cpu", "played"], default="cpu")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--only", default="", help="operations whose name has this in it")
    parser.add_argument("--profile", metavar="OP")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = 2 if args.backend == "fake" else 1
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_end:
        played = Played() if args.device == "played" else None
        tracer_class = Tracer if played is None else tracing.DeviceTracer
        tracer = tracer_class(0, open_shard(Path(folder), 0, GraphKind.OBSERVED, size, {}))
        seam = ObserveSeam(tracer)
        interceptor = Interceptor(seam)
        interceptor.install()
        seam.install()
        follow_training(tracer, lambda: interceptor.active)
        if args.backend == "fake":
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        at_end.callback(dist.destroy_process_group)
        switch = Switch(interceptor)
        found = operations(size, 0, played)
        if args.profile:
            profile(found[args.profile], switch, 5000)
            return
        clock_ns = time.thread_time_ns if args.backend == "fake" else time.perf_counter_ns
        print(f"torch {torch.__version__}, {args.backend}, {args.device}; us a call: plain, added (median, of minima)")
        for name, call in found.items():
            if args.only in name:
                plain, added, least = measure(call, switch, tracer, clock_ns, calls=args.calls, blocks=args.blocks)
                print(f"{name:<60} {plain:7.1f} {added:+7.1f} {least:+7.1f}", flush=True)
        switch.turn(True)
        tracer.finish("complete")


if __name__ == "__main__":
    main()
