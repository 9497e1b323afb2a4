"""The replay backend `gloo`: real messages between the sandbox ranks and an assistant that plays their neighbours.

Responsible for starting the assistant and connecting a sandbox rank with it; schedules are prism_sdk.pruning's, what
the two ends do is in prism_sdk.runtime (carry.py, virtual.py). A backend for other devices differs in the transport.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from prism_sdk.abc import (
    Assistance,
    AssistContext,
    Carriage,
    CarriedOperation,
    ReplayBackend,
    ReplayContext,
    ReplaySession,
)
from prism_sdk.builtin.assistants import assistant, connections
from prism_sdk.builtin.local import LocalSession
from prism_sdk.hookspecs import hookimpl
from prism_sdk.interop.options import at_least

if TYPE_CHECKING:
    from prism_sdk.runtime.carry import Carrier

_LIMIT_BYTES = 256 << 20
_LEAD_US = 1000  # what a message may take: threads wake up late on a busy machine


class GlooSession(LocalSession):
    """Carries operations, and holds the rank for what is left of their time."""

    holds_streams = False  # what it carries is on the CPU

    def __init__(self, carrier: Carrier | None) -> None:
        """Without a carrier (no assistant was started) it only holds."""
        self._carrier = carrier

    def carry(self, operation: CarriedOperation) -> Carriage | None:
        return None if self._carrier is None else self._carrier.carry(operation)

    def summary(self) -> Mapping[str, object]:
        return {} if self._carrier is None else self._carrier.summary()


class GlooBackend(ReplayBackend):
    """Moves the bytes of the whole group's algorithm between the sandbox and few virtual neighbours."""

    name = "gloo"
    description = "real messages over gloo with virtual neighbours, pruned to what touches the sandbox"
    option_names = ("lead_us",)
    needs_board = True

    def check_options(self, options: Mapping[str, str]) -> None:
        at_least(options, "lead_us", default=_LEAD_US, low=0)

    def assist(self, context: AssistContext) -> AbstractContextManager[Assistance]:
        return _assistant(context)

    def open(self, context: ReplayContext) -> ReplaySession:
        facts = context.assistance.facts
        if not facts:
            return GlooSession(None)
        from prism_sdk.runtime.announce import SameBoard
        from prism_sdk.runtime.carry import Carrier
        from prism_sdk.runtime.virtual import connect_groups

        sandbox = tuple(context.sandbox)
        communicators = connect_groups(facts["groups"], sandbox, facts["folder"], rank=context.rank)
        board = SameBoard(facts["same_fd"], len(sandbox), facts["num_operations"])
        control = socket.socket(fileno=facts["control_fds"][sandbox.index(context.rank)])
        carrier = Carrier(context.rank, sandbox, communicators=communicators, control=control, board=board)
        return GlooSession(carrier)


@contextlib.contextmanager
def _assistant(context: AssistContext) -> Iterator[Assistance]:
    """The assistant process, from before the sandbox ranks start to after they have ended."""
    from prism_sdk.graph.plan import BoundaryPlan
    from prism_sdk.runtime.manifest import Script
    from prism_sdk.runtime.virtual import VirtualFacts

    sandbox = tuple(context.sandbox)
    lead_ns = at_least(context.options, "lead_us", default=_LEAD_US, low=0) * 1000
    groups = {
        one.group_id: one.group_ranks
        for rank in sandbox
        for one in Script.load(context.work_dir / f"script-{rank}").expected
        if one.stream is not None
    }
    same_fd = os.memfd_create("prism-same", 0)
    os.ftruncate(same_fd, 1 << 42)
    try:
        with connections(len(sandbox)) as (ours, theirs):
            facts = VirtualFacts(
                graph=context.graph_path, folder=context.work_dir, sandbox=sandbox, groups=groups,
                board_fd=context.board_fd, same_fd=same_fd, control_fds=theirs, cpus=tuple(context.cpus),
                limit_bytes=at_least(context.options, "prefetch_bytes", default=_LIMIT_BYTES, low=0), lead_ns=lead_ns,
            )  # fmt: skip
            with assistant(
                context, ("-m", "prism_sdk.runtime.virtual"), facts, name="the assistant that plays the virtual ranks",
                descriptors=[same_fd, context.board_fd, *theirs], describe=_describe,
            ):  # fmt: skip
                yield Assistance(
                    facts={
                        "groups": groups, "folder": context.work_dir, "same_fd": same_fd, "control_fds": ours,
                        "num_operations": len(BoundaryPlan.load(context.work_dir / "plan")),
                    },
                    descriptors=(same_fd, *ours),
                )  # fmt: skip
    finally:
        os.close(same_fd)


def _describe(facts: Mapping[str, Any]) -> str:
    return (
        f"virtual neighbours: {facts['num_operations']} operations in {facts['num_communicators']} reduced "
        f"communicators, {facts['sent_bytes']} bytes sent, {facts['received_bytes']} received, values ready "
        f"{facts['supply_hits']} of {facts['supply_hits'] + facts['supply_misses']} times"
    )


@hookimpl
def prism_register_backends() -> list[ReplayBackend]:
    return [GlooBackend()]
