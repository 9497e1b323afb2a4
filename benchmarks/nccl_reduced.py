"""Runs collectives of large groups as reduced calls over NCCL: results, and how long they last when they are paced.

    python benchmarks/nccl_reduced.py          # two GPUs: a sandbox rank on the first, the assistant on the second

Results are compared with sums on the CPU. Times: of the reduced call alone ("native"), and of one that shall last as
long as the full one would at the same bandwidth with a fixed cost a hop, for which the assistant joins late by the
difference. The sandbox rank's kernel is timed by CUDA events.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prism_sdk.pruning import ring_sends
from prism_sdk.runtime.announce import Announcement
from prism_sdk.runtime.oncuda.nccl import NcclGroup
from prism_sdk.runtime.reduced import WHOLE, Running, Shape, join_as_member, join_as_virtual
from prismtrace import Op, ReduceOp

SIZES = (2, 3, 8, 64)
HOP_NS = 2000
COUNTS = (1 << 10, 1 << 18, 1 << 22, 1 << 24)
REPEATS = 15


def announced(op: Op, size: int, count: int, dtype: torch.dtype, member: int, reduce_op: ReduceOp) -> Announcement:
    each = count * dtype.itemsize
    sizes = (each,) * size if op in (Op.ALL_GATHER, Op.GATHER, Op.ALL_TO_ALL) else ()
    reduces = op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)
    return Announcement(
        rank=member, member=member, handle=(0, 0), group_id=1, seq=0, op=op, reduce_op=reduce_op,
        dtype=dtype if reduces else torch.uint8, root={Op.REDUCE: 0, Op.GATHER: 0, Op.BROADCAST: size - 1}.get(op),
        count=count * size if op is Op.REDUCE_SCATTER else count if reduces else each, sizes=sizes, received=sizes,
    )  # fmt: skip


def contribution(op: Op, size: int, count: int, dtype: torch.dtype, member: int) -> torch.Tensor:
    num = count * size if op in (Op.REDUCE_SCATTER, Op.ALL_TO_ALL) else count
    values = np.random.default_rng(1000 * member + size).integers(-8, 8, num)
    return torch.from_numpy(values).to(dtype)


def room(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="cuda")


def check(op: Op, size: int, count: int, dtype: torch.dtype, member: int, running: Running, own: Any) -> str | None:
    """What is wrong with the results of a sandbox member, if anything."""
    parts = {key: part.cpu() for key, part in running.parts.items()}
    values = [contribution(op, size, count, dtype, m) for m in range(size)]
    if op in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER):
        total = torch.stack([v.double() for v in values]).sum(0).to(dtype)
        if op is Op.REDUCE_SCATTER:
            total = total[count * member : count * (member + 1)]
        good = WHOLE in parts and torch.equal(parts[WHOLE].view(dtype), total)
    elif op is Op.ALL_TO_ALL:
        good = len(parts) == size and all(
            torch.equal(parts[m].view(dtype), values[m][count * member : count * (member + 1)]) for m in range(size)
        )
    else:
        good = bool(parts) and all(torch.equal(part.view(dtype), values[m]) for m, part in parts.items())
    return None if good else f"{op.name} of {size} ranks, {count} x {dtype}: wrong result at member {member}"


def one_call(op: Op, size: int, count: int, dtype: torch.dtype, group: NcclGroup, *, is_sandbox: bool) -> Any:
    shape = Shape(size, (0,))
    told = announced(op, size, count, dtype, 0, ReduceOp.SUM)
    reduces = op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)
    if is_sandbox:
        own = contribution(op, size, count, dtype, 0).cuda()
        own = own if reduces else own.view(torch.uint8)
        torch.cuda.synchronize()
        with torch.cuda.stream(group.stream):
            running = join_as_member(told, group, shape, own, room)
            running.work.wait()
        return check(op, size, count, dtype, 0, running, own)
    values = {m: contribution(op, size, count, dtype, m) for m in shape.virtual}
    if reduces:
        total = torch.stack([v.double() for v in values.values()]).sum(0).to(dtype).cuda() if values else None
        parts = {} if total is None else {WHOLE: total}
    else:
        parts = {m: v.cuda().view(torch.uint8) for m, v in values.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(group.stream):
        join_as_virtual({0: told}, group, shape, parts, room).wait()
    return None


def sleep_until(at_ns: int) -> None:
    while time.monotonic_ns() < at_ns:
        pass


def timed(op: Op, size: int, count: int, group: NcclGroup, pipe: Any, *, is_sandbox: bool) -> dict[str, Any] | None:
    """Native and paced times, us."""
    shape, told = Shape(size, (0,)), announced(op, size, count, torch.float32, 0, ReduceOp.SUM)
    own = torch.zeros(count * (size if op is Op.REDUCE_SCATTER else 1), device="cuda")
    own = own if op is not Op.ALL_GATHER else own.view(torch.uint8)
    parts = {WHOLE: torch.zeros_like(own)} if op is not Op.ALL_GATHER else {}
    scratch: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
    serial = [0]

    def reused(count: int, dtype: torch.dtype) -> torch.Tensor:
        key = (serial[0], count, dtype)
        serial[0] += 1
        if key not in scratch:
            scratch[key] = room(count, dtype)
        return scratch[key]

    def call() -> float:
        serial[0] = 0
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(group.stream):
            before.record(group.stream)
            if is_sandbox:
                join_as_member(told, group, shape, own, reused)
            else:
                join_as_virtual({0: told}, group, shape, parts, reused)
            after.record(group.stream)
        after.synchronize()
        return before.elapsed_time(after) * 1e6

    def together(late_ns: int, lead_ns: int) -> float:
        """Both ends at a time that the sandbox sets, the assistant `late_ns` later."""
        torch.cuda.synchronize()
        if is_sandbox:
            at = time.monotonic_ns() + 400_000
            pipe.send(at)
            sleep_until(at)
        else:
            sleep_until(pipe.recv() + late_ns - lead_ns)
        return call()

    for _ in range(5):
        together(0, 0)
    natives = [together(0, 0) for _ in range(REPEATS)]
    native = statistics.median(natives)
    native = pipe_share(pipe, native, is_sandbox=is_sandbox)
    hops = (2 if op is Op.ALL_REDUCE else 1) * (size - 2)
    wanted = native + hops * HOP_NS + 200_000  # 200 us: later than what a launch takes
    late = round(wanted - native)
    # how long the kernels of both ends run after the assistant's launch is learnt from one series, used in the next
    first = statistics.median([together(late, 0) for _ in range(REPEATS)])
    lead = round(pipe_share(pipe, first, is_sandbox=is_sandbox) - wanted)
    paced = [together(late, lead) for _ in range(REPEATS)]
    if not is_sandbox:
        return None
    sent = float(ring_sends(op, size, count)) * 4
    return {
        "op": op.name.lower(), "size": size, "bytes": count * 4, "sent_bytes": sent, "native_us": native / 1e3,
        "gb_s": sent / native, "wanted_us": wanted / 1e3, "paced_us": statistics.median(paced) / 1e3,
        "lead_us": lead / 1e3, "worst_error_us": max(abs(p - wanted) for p in paced) / 1e3,
        "median_error_percent": 100 * (statistics.median(paced) / wanted - 1),
    }  # fmt: skip


def pipe_share(pipe: Any, value: float, *, is_sandbox: bool) -> float:
    """The sandbox's value, at both ends."""
    if is_sandbox:
        pipe.send(value)
        return value
    return float(pipe.recv())


def end(position: int, folder: str, pipe: Any, out: str | None) -> None:
    torch.cuda.set_device(position)
    stream = torch.cuda.Stream()
    group = NcclGroup(Path(folder), "pair", position=position, size=2, stream=stream)
    problems: list[str] = []
    results: list[dict[str, Any]] = []
    num = 0
    for size in SIZES:
        for op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.BROADCAST, Op.REDUCE, Op.GATHER):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                for count in (1, 1000, 65_537):
                    wrong = one_call(op, size, count, dtype, group, is_sandbox=position == 0)
                    num += 1
                    problems += [wrong] if wrong else []
    for op in (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER):
        for size in (2, 8, 64):
            for count in COUNTS:
                if op is Op.ALL_REDUCE or count * size <= 1 << 27:
                    result = timed(op, size, count, group, pipe, is_sandbox=position == 0)
                    results += [result] if result else []
    group.close()
    if out is not None:
        Path(out).write_text(json.dumps({"num_checked": num, "problems": problems, "times": results}, indent=1))


def main() -> int:
    if torch.cuda.device_count() < 2:
        print("two GPUs are needed: NCCL before 2.30 has one rank of a communicator on a GPU")
        return 2
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # two ranks have no use for it
    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = spawn.Pipe()
        out = os.path.join(folder, "out.json")
        assistant = spawn.Process(target=end, args=(1, folder, theirs, None), daemon=True)
        sandbox = spawn.Process(target=end, args=(0, folder, ours, out))
        assistant.start(), sandbox.start()
        sandbox.join(150)
        assistant.join(5)
        if sandbox.exitcode != 0 or not os.path.exists(out):
            print(f"the sandbox end ended with {sandbox.exitcode}")
            return 1
        result = json.loads(Path(out).read_text())
    for one in result["times"]:
        print(
            f"{one['op']:15} n={one['size']:<3} {one['bytes']:>10} B native {one['native_us']:9.1f} us "
            f"{one['gb_s']:6.1f} GB/s wanted {one['wanted_us']:9.1f} paced {one['paced_us']:9.1f} "
            f"({one['median_error_percent']:+.3f} %, worst {one['worst_error_us']:.1f} us, lead {one['lead_us']:.1f})"
        )
    print(f"{result['num_checked']} calls checked, {len(result['problems'])} wrong, {time.monotonic() - started:.0f} s")
    print("\n".join(result["problems"][:10]))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
