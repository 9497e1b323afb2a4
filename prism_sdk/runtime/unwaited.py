"""Puts results in place that the program has not waited for, where a backend's thread would have written them.

Responsible for when that is, by a rule that gives the same in every recording; the results themselves are the mode's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.futures import run_due
from prism_sdk.runtime.work import PrismWork, place_results, span_of, unwaited_works
from prismtrace.model import Op


def prepare(call: Call) -> None:
    """Before a call is handed on by a mode that stands for the backend: refuse what every backend refuses, see to what
    is due, and put in place what the call takes of its group's earlier results: a backend goes in order.

    Raises RuntimeError.
    """
    call.check()
    run_due()
    if not call.is_p2p and (works := unwaited_works(call.group.group_id)):
        spans = [*map(span_of, (*call.contribution, *call.outputs))]
        touched = [seq for seq, work in works.items() if work.writes_into(spans)]
        if touched:
            place_results(call.group.group_id, before=max(touched) + 1, wait=True)


def place_before(call: Call, seq: int, *, wait: bool) -> None:
    """All members have called the collectives before one that needed them all: those are complete as well.

    With `wait` one whose result a member is just computing is waited for; else it is left for later.
    """
    if call.needs == "all" and not call.is_p2p:
        place_results(call.group.group_id, before=seq, wait=wait)


def install_destroying(groups: Callable[[], Iterable[GroupState]], forget: Callable[[int], None]) -> None:
    """A group that is destroyed completes what was begun in it, as gloo does; then `forget(group_id)` is called."""
    original = distributed_c10d.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if sys.exc_info()[0] is None:  # a program that fails waits for nobody
            name = None if group in (None, dist.GroupMember.WORLD) else getattr(group, "group_name", "")
            for state in groups():
                if name is None or state.name == name:
                    place_results(state.group_id, wait=True)
                    forget(state.group_id)
        original(group)

    distributed_c10d.destroy_process_group = destroy_process_group
    dist.destroy_process_group = destroy_process_group


class Receives:
    """Receives of this rank that nobody has waited for yet, in the order of their posting.

    Once a collective is over that needed every member, what its members sent before they took part is here.  Receives
    from any source are left to the program: who is matched depends on what else it does.
    """

    def __init__(self) -> None:
        self._open: dict[Any, tuple[int, PrismWork]] = {}  # key -> global rank of the sender, and the handle

    def add(self, call: Call, key: Any, work: PrismWork) -> None:
        """Note a call, if it is a receive of a message from a rank that the program named."""
        if call.op is Op.RECV and call.peer is not None:
            self._open[key] = (call.group.ranks[call.peer], work)

    def forget(self, key: Any) -> None:
        """Its result is being put in place."""
        self._open.pop(key, None)

    def place(self, after: Call, is_here: Callable[[Any], bool], *, wait: bool) -> None:
        """The rank has waited for `after`: put in place what its members have sent, where `is_here(key)`."""
        if after.needs != "all" or after.is_p2p or not self._open:
            return
        members = frozenset(after.group.ranks)
        for key, (source, work) in list(self._open.items()):
            if source in members and is_here(key):
                work.place(wait=wait)
