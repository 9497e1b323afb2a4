"""Measures what one wrapped call costs: a hook that enters a stretch and leaves it, in CPU time of this thread.

    python benchmarks/adapter_cost.py

It takes the median of several rounds, and measures no framework: the wrapped function does nothing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prism_sdk.abc import AdapterHook
from prism_sdk.adapting import Around
from prism_sdk.adapting.patching import _wrapped
from prism_sdk.adapting.places import Place
from prism_sdk.adapting.replaced import Wrapped
from prism_sdk.runtime.adapters import Naming, TracerNamer
from prism_sdk.runtime.tracer import Tracer
from prismtrace import TraceWriter

CALLS, ROUNDS = 2_000, 15


def cost_ns(call: Callable[[], Any], after: Callable[[], None] = lambda: None) -> float:
    """Median over rounds of the CPU time of one call."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        rounds.append((time.thread_time_ns() - begin) / CALLS)
        after()
    return statistics.median(rounds)


def main() -> None:
    """Write one line a case."""
    with tempfile.TemporaryDirectory() as folder, TraceWriter(Path(folder) / "cost.prism", world_size=1) as writer:
        tracer = Tracer(0, writer)
        namer = TracerNamer(Naming(tracer), "cost")
        hook = AdapterHook("none", "none")
        wrapped = Wrapped(hook, Place(None, "none"))
        state = types.SimpleNamespace(at=0)

        def function() -> None:
            pass

        def part() -> int:
            return namer.enter(part="grad_sync")

        def numbered() -> int:
            state.at = (state.at + 1) % 64
            return namer.enter("forward", microbatch=state.at, stage=1, part="forward", schedule="steady")

        bare = cost_ns(function)
        cases = {
            "a hook that says nothing": _wrapped(function, Around(hook, before=lambda: None), namer, wrapped),
            "a part": _wrapped(function, Around(hook, before=part), namer, wrapped),
            "a pass of a microbatch": _wrapped(function, Around(hook, before=numbered), namer, wrapped),
        }
        for name, call in cases.items():
            total = cost_ns(call, tracer._rows.clear) - bare
            print(f"{name}: {total:.0f} ns a call, {total / 2:.0f} ns an event (begin or end)")


if __name__ == "__main__":
    main()
