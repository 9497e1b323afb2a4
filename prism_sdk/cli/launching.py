"""What observe, record, calibrate and emulate share: their options, and handing a ``LaunchConfig`` to the launcher.

It checks everything that can be checked before a process starts; it starts none itself.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from prism_sdk.cli.choosing import checked_plugins
from prism_sdk.cli.output import echo_json
from prism_sdk.cli.outputs import check_folder
from prism_sdk.cli.parsing import NNODES, NPROC, RANKS, STEPS, Number, key_values, parse_target
from prism_sdk.errors import ExitCode, UsageError, WorldSizeError
from prism_sdk.runtime.config import (
    DEFAULT_MAX_ROLES,
    DEFAULT_SAMPLES,
    LaunchConfig,
    LaunchMode,
    LaunchResult,
    PayloadMode,
    StepRange,
)
from prism_sdk.settings import Settings
from prism_sdk.wording import counted

__all__ = ["CONTEXT_SETTINGS", "launch_command", "option", "run_launch"]

_F = TypeVar("_F", bound=Callable[..., Any])

# prism's options end at the script, as torchrun's do; both --nproc-per-node and --nproc_per_node are understood
CONTEXT_SETTINGS: dict[str, Any] = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}

# flags of torchrun that have no meaning here, accepted so that a launch line works as it is: names -> why ignored
_IGNORED = {
    ("--max-restarts",): "Prism does not restart ranks",
    ("--monitor-interval",): "Prism sees at once when a rank ends",
    ("--start-method",): "ranks are always forked",
    ("--role",): "Prism gives ranks no role",
    ("--rdzv-conf",): "the rendezvous needs none",
    ("--log-dir",): "output goes to the console",
    ("--redirects", "-r"): "output goes to the console",
    ("--tee", "-t"): "output goes to the console",
}

option = click.option

_LAUNCH_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    option(
        "--nproc-per-node",
        type=NPROC,
        metavar="N",
        help="Ranks on this machine: a number, or auto, cpu, gpu.  [default: 1]",
    ),
    option("--nnodes", type=NNODES, metavar="N", default=1, help="Machines in the job.  [default: 1]"),
    option(
        "--node-rank",
        type=click.IntRange(min=0),
        metavar="N",
        default=0,
        help="Which of them this is, from 0.  [default: 0]",
    ),
    option("--master-addr", metavar="HOST", help="Address of machine 0."),
    option(
        "--master-port", type=click.IntRange(0, 65535), metavar="PORT", help="Port on machine 0.  [default: a free one]"
    ),
    option("--rdzv-backend", metavar="KIND", help="Rendezvous kind, as torchrun's: static or c10d."),
    option("--rdzv-endpoint", metavar="HOST:PORT", help="Rendezvous address."),
    option("--rdzv-id", metavar="NAME", help="Name of the job at the rendezvous."),
    option("--standalone", is_flag=True, help="One machine, any free port."),
    option("--local-ranks-filter", type=RANKS, help="Show the output of these local ranks only, e.g. 0,2-3."),
    option("-m", "--module", "is_module", is_flag=True, help="What follows is a module, as with python -m."),
)

_COMMON_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    option("--steps", type=STEPS, help="Keep steps A up to, not including, B (record: their values).  [default: all]"),
    option(
        "--adapter", "adapters", metavar="NAME", multiple=True, help="Use this framework adapter only (repeatable)."
    ),
    option(
        "--plugin",
        "plugins",
        metavar="PLUGIN",
        multiple=True,
        help="Load this plugin too: a module or a .py file (repeatable).",
    ),
    key_values(help="Option of a plugin, key=value (repeatable)."),
    option(
        "--device",
        type=click.Choice(["cpu"]),
        help="Run a script that says cuda and nccl on CPUs, for structure and numbers, not for times.  "
        "[default: as recorded; else as the script says]",
    ),
    option(
        "--moe-skew",
        type=Number(min=0),
        metavar="S",
        help="Give expert e (e+1)^-S times its share in the router.  [default: as recorded; else as routed]",
    ),
    option("--pin/--no-pin", default=True, help="Bind each running rank to cores of its own.  [default: --pin]"),
    option("--quiet", "-q", is_flag=True, help="Say nothing but errors."),
    option("--json", "as_json", is_flag=True, help="Print the result as JSON, the last line on stdout."),
)


def launch_command(
    mode: LaunchMode, *, output: str, extra: Sequence[Callable[[Any], Any]], graph: str | None = None
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make the subcommand of ``mode`` from a function whose docstring is its help; the function itself is not run.

    Args:
        mode: the verb.
        output: the file written when the user gives no ``--output``.
        extra: the options that only this verb has.
        graph: help of ``--graph``, for the verbs that start from a graph.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        def callback(**values: Any) -> int:
            return run_launch(mode, values)

        own: list[Callable[[Any], Any]] = [
            option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", default=Path(output),
                   help=f"The trace to write.  [default: {output}]"),
        ]  # fmt: skip
        if graph is not None:
            own.insert(0, option("--graph", type=click.Path(path_type=Path), metavar="FILE", required=True, help=graph))
        ignored = [option(*names, hidden=True) for names in _IGNORED]
        decorated: Any = click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...")(
            callback
        )
        for decorator in reversed([*own, *extra, *_COMMON_OPTIONS, *_LAUNCH_OPTIONS, *ignored]):
            decorated = decorator(decorated)
        make = click.command(mode.value, help=function.__doc__, context_settings=CONTEXT_SETTINGS)
        command: click.Command = make(decorated)
        return command

    return decorate


def run_launch(mode: LaunchMode, values: Mapping[str, Any]) -> int:
    """Check, launch, report; returns the exit code."""
    settings = Settings.from_environ()
    config = _config(mode, values)
    if not config.quiet:
        for (name, *_), reason in _IGNORED.items():
            if values[name.lstrip("-").replace("-", "_")] is not None:
                click.echo(f"prism: {name} is ignored: {reason}", err=True)
    manager = checked_plugins(config, settings)
    if importlib.util.find_spec("torch") is None:
        hint = "install PyTorch into this environment; `prism doctor` checks the rest"
        raise UsageError(f"prism {mode.value} needs torch, which is not installed", hint=hint)
    from prism_sdk.runtime.launcher import launch

    manager.notify_run_start(config)
    result = launch(config)
    manager.notify_run_end(config, result=result)
    _report(config, result)
    is_empty = result.exit_code == 0 and _holds_nothing(config)
    if is_empty:
        click.echo(f"prism {mode.value}: finding: no rank had steps {config.steps}: the trace is empty", err=True)
    elif result.exit_code == 0 and not config.quiet and _saw_nothing(config):
        click.echo(f"prism {mode}: warning: the program ran, and nothing of it was seen: no process group", err=True)
    return ExitCode.OK if result.exit_code == 0 and not is_empty else ExitCode.FINDING


def _holds_nothing(config: LaunchConfig) -> bool:
    """Whether `--steps` left nothing of a run; a recording keeps the units of all steps."""
    from prismtrace import TraceReader

    steps = config.steps
    if steps is None or steps.is_all or config.mode is LaunchMode.RECORD or not config.output.is_file():
        return False
    with TraceReader(config.output) as reader:
        return not reader.ranks


def _saw_nothing(config: LaunchConfig) -> bool:
    """Whether the ranks of a job had no group, and no more than one stretch of computing from start to end."""
    from prismtrace import TraceReader

    if config.mode not in (LaunchMode.OBSERVE, LaunchMode.RECORD) or not config.output.is_file():
        return False
    with TraceReader(config.output) as reader:
        return not reader.groups and max(map(reader.num_units, reader.ranks), default=0) <= 1


def _config(mode: LaunchMode, values: Mapping[str, Any]) -> LaunchConfig:
    target = parse_target(values["words"], is_module=values["is_module"])
    output: Path = values["output"]
    graph: Path | None = values.get("graph")
    _check_output(output, graph=graph)
    nproc, nodes = _world(mode, values, graph=graph)
    sandbox: tuple[int, ...] = values.get("sandbox") or ()
    sample_ranks: tuple[int, ...] = values.get("sample_ranks") or ()
    if sample_ranks and sample_ranks[-1] >= nproc * nodes:
        raise click.BadParameter(
            f"rank {sample_ranks[-1]} does not exist: the job has ranks 0 to {nproc * nodes - 1}.",
            param_hint="'--sample-ranks'",
        )
    if sandbox and sandbox[-1] >= nproc * nodes:
        raise click.BadParameter(
            f"rank {sandbox[-1]} does not exist: the job has ranks 0 to {nproc * nodes - 1}.", param_hint="'--sandbox'"
        )
    shown = values["local_ranks_filter"]
    if shown and shown[-1] >= nproc:
        message = f"this machine has the local ranks 0 to {nproc - 1}, and not {shown[-1]}."
        raise click.BadParameter(message, param_hint="'--local-ranks-filter'")
    if not 0 <= values["node_rank"] < nodes:
        message = f"{values['node_rank']} is not below --nnodes {nodes}."
        raise click.BadParameter(message, param_hint="'--node-rank'")
    kernels: StepRange | None = values.get("kernels")
    if kernels is not None and kernels.first < 1:
        raise click.BadParameter("step 0 has no beginning that Prism sees; begin with 1.", param_hint="'--kernels'")
    if kernels is not None and values["device"] == "cpu":
        raise click.UsageError("--kernels records kernels of GPUs, and --device cpu uses none: leave one of them out.")
    if values.get("address") is not None and values.get("engine") is None:
        raise click.UsageError("--address is that of an engine's cluster: give --engine ray too.")
    payloads = values.get("payloads")
    if mode is LaunchMode.OBSERVE and payloads not in (None, "none"):
        raise click.UsageError("--payloads: `prism observe` keeps no values, which `prism record` does.")
    return LaunchConfig(
        mode=mode,
        target=target.name,
        is_module=target.is_module,
        arguments=target.arguments,
        output=output,
        graph=graph,
        nproc_per_node=nproc,
        num_nodes=nodes,
        node_rank=values["node_rank"],
        master_addr=values["master_addr"],
        master_port=values["master_port"],
        rdzv_backend=values["rdzv_backend"],
        rdzv_endpoint=values["rdzv_endpoint"],
        rdzv_id=values["rdzv_id"],
        standalone=values["standalone"],
        local_ranks_filter=values["local_ranks_filter"],
        steps=values["steps"],
        num_slots=values.get("slots"),
        roles=values.get("roles"),
        num_samples=_num_samples(values),
        max_roles=values.get("max_roles") or DEFAULT_MAX_ROLES,
        sample_ranks=sample_ranks,
        sandbox=sandbox,
        strategy=values.get("strategy"),
        backend=values.get("backend"),
        engine=values.get("engine"),
        address=values.get("address"),
        adapters=tuple(values["adapters"]) or None,
        plugins=tuple(values["plugins"]),
        payloads=None if payloads is None else PayloadMode(payloads),
        device=values["device"],
        moe_skew=values["moe_skew"],
        pin=values["pin"],
        device_memory_bytes=values.get("device_memory"),
        parked_memory_bytes=values.get("parked_memory"),
        parked_ahead_bytes=values.get("parked_ahead"),
        parked_disk=values.get("parked_disk"),
        nccl_profiler=bool(values.get("nccl_profiler")),
        kernels=kernels,
        options=dict(values["options"]),
        quiet=values["quiet"],
        json=values["as_json"],
    )


def _num_samples(values: Mapping[str, Any]) -> int:
    """Ranks that are named with their neighbours show as much as ranks chosen by number; both only if asked for."""
    if values.get("num_samples") is not None:
        return int(values["num_samples"])
    return 0 if values.get("sample_ranks") else DEFAULT_SAMPLES


def _world(mode: LaunchMode, values: Mapping[str, Any], *, graph: Path | None) -> tuple[int, int]:
    """Ranks per node, and nodes. A graph decides where there is one; what the user said must agree with it."""
    nproc: int | None = values["nproc_per_node"]
    nodes: int = values["nnodes"]
    if graph is not None:
        world_size = _graph_world_size(graph, mode=mode)
        asked = None if nproc is None and nodes == 1 else (nproc or 1) * nodes
        if asked is not None and asked != world_size:
            raise WorldSizeError(
                f"--nproc-per-node and --nnodes give {counted(asked, 'rank')}, and the job in {graph} has {world_size}",
                world_size=asked, required=world_size, file=str(graph),
                hint="leave them out: the number of ranks comes from the graph",
            )  # fmt: skip
        return world_size, 1
    alias: int | None = values.get("world_size")
    if values.get("roles") is not None and alias is None and nproc is None:
        raise click.UsageError("--roles needs the size of the job: give --world-size.")
    if values.get("roles") is not None and nodes > 1:
        raise click.UsageError("--roles records the whole job on this machine: leave --nnodes out.")
    if values.get("roles") is None and values.get("num_samples") is not None:
        raise click.UsageError("--samples says how many ranks --roles verifies: give --roles too.")
    if values.get("roles") is None and values.get("sample_ranks") is not None:
        raise click.UsageError("--sample-ranks says which ranks run beside those of --roles: give --roles too.")
    if values.get("max_roles") is not None and (values.get("roles") or "").strip() != "auto":
        raise click.UsageError(
            "--max-roles bounds the roles that are found, and has no say over stated ones: give --roles auto."
        )
    if alias is not None and nproc is not None and alias != nproc * nodes:
        raise click.UsageError(f"--world-size {alias} and --nproc-per-node {nproc} contradict each other; give one.")
    if alias is not None:
        return alias, 1
    return nproc or 1, nodes


def _graph_world_size(graph: Path, *, mode: LaunchMode) -> int:
    from prismtrace import GraphKind, TraceReader

    with TraceReader(graph) as reader:
        kind, world_size = reader.graph_kind, reader.world_size
    if kind == GraphKind.EMULATED:
        raise UsageError(f"{graph} is the result of an emulation, not a graph to start from")
    if mode is LaunchMode.EMULATE and kind == GraphKind.BARE:
        hint = f"find them first: prism calibrate --graph {graph} -o calibrated.prism -- SCRIPT"
        raise UsageError(f"{graph} is a bare graph: it holds no times to replay", hint=hint)
    return int(world_size)


def _check_output(output: Path, *, graph: Path | None) -> None:
    check_folder(output)
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise click.BadParameter(f"{output} cannot be written: permission denied.", param_hint="'--output'")
    if graph is not None and output.exists() and graph.exists() and output.samefile(graph):
        raise click.BadParameter("the output is the graph itself; give another name.", param_hint="'--output'")


def _report(config: LaunchConfig, result: LaunchResult) -> None:
    if config.json:
        values = {
            "mode": config.mode,
            "exit_code": result.exit_code,
            "output": result.output,
            "world_size": result.world_size,
            "wall_ns": result.wall_ns,
            "summary": result.summary,
        }
        echo_json(values, indent=None)
    elif not config.quiet:
        # the launcher reports progress and the file; tables a rank are for --json
        for key, value in result.summary.items():
            if isinstance(value, str | int | float):
                click.echo(f"  {key}: {value}", err=True)
        if result.exit_code != 0:
            click.echo(f"prism {config.mode}: failed with exit code {result.exit_code}", err=True)
