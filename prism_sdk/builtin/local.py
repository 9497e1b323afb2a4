"""The replay backend `local`: no peer at all, the rank is held until the graph's time.

Responsible for holding a CPU rank exactly; when a communication is due is the boundary engine's knowledge. Streams of a
GPU are held by the runtime (prism_sdk/runtime/oncuda/holding.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from prism_sdk.abc import ReplayBackend, ReplayContext, ReplaySession
from prism_sdk.hookspecs import hookimpl
from prism_sdk.interop.options import at_least, integer

_SPIN_NS = 150_000  # the last stretch is spun: a sleep may end that much late
_MOST_BLOCKS = 1024  # more than any GPU runs at once


class LocalSession(ReplaySession):
    """Sleeps towards a deadline and spins over the last stretch."""

    holds_streams = True

    def hold_until(self, deadline_ns: int) -> int:
        now = time.monotonic_ns()
        while now < deadline_ns:
            left = deadline_ns - now
            if left > _SPIN_NS:
                time.sleep((left - _SPIN_NS) / 1e9)
            now = time.monotonic_ns()
        return now - deadline_ns

    def close(self) -> None:
        return None


def check_occupy(options: Mapping[str, str]) -> None:
    """Refuse what is no number of thread blocks, and not `off`; what it means is oncuda/occupying.py's."""
    if options.get("occupy") != "off":
        integer(options, "occupy", default=None, low=0, high=_MOST_BLOCKS)


class LocalBackend(ReplayBackend):
    """Holds the rank itself; needs neither peers nor a network."""

    name = "local"
    option_names = ("device_pool_bytes", "occupy")
    description = "hold each communication until the graph's time; no peers"

    def check_options(self, options: Mapping[str, str]) -> None:
        at_least(options, "device_pool_bytes", default=0, low=0)
        check_occupy(options)

    def open(self, context: ReplayContext) -> ReplaySession:
        return LocalSession()


@hookimpl
def prism_register_backends() -> list[ReplayBackend]:
    return [LocalBackend()]
