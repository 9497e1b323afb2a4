"""The replay backend `nccl`: NCCL's own collectives between the sandbox ranks and an assistant on another GPU.

Responsible for starting the assistant and connecting a sandbox rank with it; sizes are prism_sdk.pruning's, what the
two ends do is in prism_sdk.runtime.oncuda (joining.py, neighbours.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism_sdk.abc import Assistance, AssistContext, ReplayBackend, ReplayContext, ReplaySession
from prism_sdk.builtin.assistants import assistant, connections
from prism_sdk.builtin.local import LocalSession
from prism_sdk.errors import UsageError
from prism_sdk.hookspecs import hookimpl
from prism_sdk.interop.options import at_least, integer

if TYPE_CHECKING:
    from prism_sdk.runtime.manifest import Script

_LIMIT_BYTES = 256 << 20
_LAST_DEVICE = 1023


class NcclSession(LocalSession):
    """Makes reduced calls on the rank's streams; what is not on a GPU it holds as `local` does."""

    def __init__(self, rank: int, facts: Mapping[str, Any], sandbox: Sequence[int]) -> None:
        """Without `facts` (no assistant was started) it only holds."""
        self._rank, self._facts, self._sandbox = rank, facts, tuple(sandbox)

    def open_streams(self, device: Any, script: Script) -> Any:
        if not self._facts:
            return None
        from prism_sdk.runtime.oncuda.joining import Joining, JoiningFacts

        facts = JoiningFacts(
            folder=self._facts["folder"], sandbox=self._sandbox, has_values=self._facts["has_values"],
            control_fd=self._facts["control_fds"][self._sandbox.index(self._rank)],
        )  # fmt: skip
        return Joining(self._rank, script, facts, device)


class NcclBackend(ReplayBackend):
    """Runs NCCL between the sandbox and virtual neighbours, on calls as large as the whole group's."""

    name = "nccl"
    description = "NCCL with virtual neighbours on a second GPU, in calls that weigh what the whole group's do"
    option_names = ("assistant", "device_pool_bytes")
    program: Sequence[str] = ("-m", "prism_sdk.runtime.oncuda.neighbours")
    """What the assistant runs."""

    def check_options(self, options: Mapping[str, str]) -> None:
        integer(options, "assistant", default=None, low=0, high=_LAST_DEVICE)
        at_least(options, "device_pool_bytes", default=0, low=0)

    def num_devices(self) -> int:
        """GPUs that a launch may use."""
        from prism_sdk.runtime.gpus import num_gpus

        return num_gpus()

    def assist(self, context: AssistContext) -> AbstractContextManager[Assistance]:
        _check(self.num_devices(), context)
        return _assistant(self, context)

    def open(self, context: ReplayContext) -> ReplaySession:
        return NcclSession(context.rank, context.assistance.facts, context.sandbox)


def _check(num_devices: int, context: AssistContext) -> None:
    """Raise UsageError where the assistant has no GPU."""
    device = integer(context.options, "assistant", default=None, low=0, high=_LAST_DEVICE)
    needed = len(context.sandbox) + 1
    hint = "`--backend local` holds the streams of a lone GPU; a smaller --sandbox needs fewer"
    if not context.hold_fds:
        raise UsageError("backend nccl needs ranks on GPUs, and here they run on CPUs",
                         hint="`--backend local`, or `--backend gloo` for real messages between CPU ranks")  # fmt: skip
    if device is None and num_devices < needed:
        raise UsageError(
            f"backend nccl needs a GPU beside those of the sandbox ranks, {needed} in all, and here are {num_devices}",
            hint=f"{hint}; -O assistant=0 shares GPU 0 with a sandbox rank, for values and bytes but not for times",
        )
    if device is not None and device >= num_devices:
        raise UsageError(f"-O assistant={device}: this machine has {num_devices} GPUs, numbered from 0", hint=hint)


@contextlib.contextmanager
def _assistant(backend: NcclBackend, context: AssistContext) -> Iterator[Assistance]:
    from prism_sdk.runtime.manifest import Script
    from prism_sdk.runtime.oncuda.holdtable import ENVIRONMENT
    from prism_sdk.runtime.oncuda.neighbours import NeighbourFacts

    sandbox = tuple(context.sandbox)
    scripts = [Script.load(context.work_dir / f"script-{rank}") for rank in sandbox]
    has_values = _can_carry_values(context.graph_path, scripts, sandbox)
    with connections(len(sandbox)) as (ours, theirs):
        facts = NeighbourFacts(
            graph=context.graph_path, folder=context.work_dir, sandbox=sandbox, hold_fds=tuple(context.hold_fds),
            control_fds=theirs, cpus=tuple(context.cpus),
            limit_bytes=at_least(context.options, "prefetch_bytes", default=_LIMIT_BYTES, low=0),
            device=integer(context.options, "assistant", default=None, low=0, high=_LAST_DEVICE),
            has_values=has_values,
        )  # fmt: skip
        with assistant(
            context, backend.program, facts, name="the assistant with the virtual neighbours",
            descriptors=[*context.hold_fds, *theirs], describe=_describe, environment=ENVIRONMENT,
        ):  # fmt: skip
            yield Assistance(
                facts={"folder": context.work_dir, "control_fds": ours, "has_values": has_values},
                descriptors=tuple(ours),
            )


def _can_carry_values(graph: Path, scripts: Sequence[Script], sandbox: Sequence[int]) -> bool:
    """Whether all that virtual members contribute to calls that must carry values was recorded."""
    from prism_sdk.runtime.manifest import RecordedValues
    from prism_sdk.runtime.oncuda.communicators import carries_values
    from prismtrace import Op, TraceReader

    wanted = [one for script in scripts for one in script.expected if carries_values(one, sandbox)]
    if not wanted:
        return False
    with TraceReader(graph) as reader:
        values = RecordedValues(reader, reader.ranks, {one.group_id for one in wanted})
    for one in wanted:
        givers = [rank for rank in one.group_ranks if rank not in sandbox]
        if one.op in (Op.BROADCAST, Op.SCATTER):
            givers = [rank for rank in givers if rank == one.peer]
        elif one.op in (Op.GATHER, Op.REDUCE) and one.peer not in sandbox:
            givers = []
        if any(values.collective.get((one.group_id, one.seq, rank), (None, None))[0] is None for rank in givers):
            return False
    return True


def _describe(facts: Mapping[str, Any]) -> str:
    sharing = " (ranks share GPUs and talk by sockets: times mean nothing)" if facts["sharing"] else ""
    return (
        f"virtual neighbours on GPU {facts['device']}{sharing}: {facts['num_calls']} calls in "
        f"{facts['num_communicators']} reduced communicators ({facts['communicator_bytes'] / 1e6:.0f} MB there), "
        f"{facts['num_live']} with values"
    )


@hookimpl
def prism_register_backends() -> list[ReplayBackend]:
    return [NcclBackend()]
