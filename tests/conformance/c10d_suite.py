"""Runs the c10d conformance cases in one rank and writes what each returned; launching and comparing are others' work.

    torchrun --nproc-per-node 4 c10d_suite.py --out DIR
    python c10d_suite.py --out DIR --ranks 4
    prism record --nproc-per-node 4 --slots 2 -- c10d_suite.py --out DIR --only ddp

Every rank appends to ``DIR/rank-N.pickles``: for each case its name with ``{"value": ...}`` or ``{"error": text}``. So
a run that dies leaves what it had.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from c10d_cases import Case, Context, load_cases
from torch.distributed.tensor import DTensor


def plain(value: Any) -> Any:
    """``value`` with every tensor detached and copied, so that it can be written at any later time."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return value.detach().clone().contiguous()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"{type(value).__name__}({value})"


def run_case(chosen: Case, ctx: Context) -> dict[str, Any]:
    torch.manual_seed(7)
    try:
        return {"value": plain(chosen.run(ctx))}
    except Exception as error:
        if not chosen.is_optional:
            print(f"rank {ctx.rank}: {chosen.name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        lines = str(error).splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}"}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the results and the cases' scratch files")
    parser.add_argument("--ranks", type=int, metavar="N", help="fork a job of N ranks: no launcher is there")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this case; may be repeated")
    parser.add_argument("--skip", action="append", default=[], metavar="NAME", help="leave this case out")
    parser.add_argument("--no-slow", action="store_true", help="leave out the slow cases")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--case-timeout", type=float, default=120.0, help="seconds after which a case is a hang")
    return parser.parse_args()


def fork_ranks(num_ranks: int) -> None:
    """Return in each of `num_ranks` new processes, which share what was imported; this one ends when they have."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # as torchrun has it: cases ask torch whether it is there
    os.environ.update(TORCHELASTIC_RUN_ID="none", LOCAL_WORLD_SIZE=str(num_ranks), WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    running = set()
    for rank in range(num_ranks):
        pid = os.fork()
        if not pid:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            return
        running.add(pid)
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:
            for other in running:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")
    sys.exit()


def main() -> None:
    args = parse_args()
    cases = load_cases()
    if args.list:
        print("\n".join(cases))
        return
    unknown = sorted({*args.only, *args.skip} - set(cases))
    if unknown or args.out is None:
        sys.exit(f"no case is called {', '.join(unknown)}: see --list" if unknown else "--out DIR is missing")
    if args.ranks:
        fork_ranks(args.ranks)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    args.out.mkdir(parents=True, exist_ok=True)
    file = (args.out / f"rank-{rank}.pickles").open("wb")
    for name, chosen in cases.items():
        if (args.only and name not in args.only) or name in args.skip or (args.no_slow and chosen.is_slow):
            continue
        scratch = args.out / "scratch" / name
        scratch.mkdir(parents=True, exist_ok=True)
        faulthandler.dump_traceback_later(args.case_timeout, exit=True)
        started = time.perf_counter()
        result = run_case(chosen, Context(rank=rank, world_size=world_size, scratch=scratch.absolute()))
        faulthandler.cancel_dump_traceback_later()
        pickle.dump((name, result), file)
        file.flush()
        if rank == 0:
            verdict = result.get("error", "ok")
            print(f"{name} {verdict} {time.perf_counter() - started:.2f}s", flush=True)
    file.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
