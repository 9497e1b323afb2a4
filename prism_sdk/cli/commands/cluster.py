"""``prism cluster``: makes, fits and checks cluster profiles. The work is done by ``prism_sdk.cluster``."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prism_sdk.cli.output import echo_json, echo_table, format_bytes, format_ns
from prism_sdk.cli.outputs import check_output, overwrite_option
from prism_sdk.errors import ExitCode, UsageError
from prism_sdk.wording import counted
from prism_sdk.writing import write_whole

if TYPE_CHECKING:
    from prism_sdk.cluster import Cluster
    from prism_sdk.cluster.measurements import Sample


@click.group("cluster")
def command() -> None:
    """Make, fit and check cluster profiles: what `prism simulate --cluster` takes transfers from.

    \b
    Example:
        prism cluster init h100-sxm --nodes 64 -o mine.toml
        prism cluster fit mine.toml --nccl-tests all_reduce.log --trace real.prism -o mine.toml --overwrite
        prism cluster check mine.toml
    """


@command.command("init")
@click.argument("profile", default="h100-sxm")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes.")
@click.option("--name", help="Name of the cluster.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file (without it: stdout).")
@overwrite_option
def init(profile: str, nodes: int | None, name: str | None, output: Path | None, overwrite: bool) -> int:
    """Write a profile to start from: h100-sxm, h200-sxm or a100-sxm, with the public source of each figure."""
    from prism_sdk.cluster import format_cluster, load_cluster

    if output is not None:
        check_output(output, overwrite=overwrite)
    cluster = load_cluster(profile)
    cluster = replace(cluster, num_nodes=nodes or cluster.num_nodes, name=name or cluster.name)
    _write(format_cluster(cluster), output)
    return ExitCode.OK


@command.command("fit")
@click.argument("profile")
@click.option("--nccl-tests", "logs", type=click.Path(path_type=Path), multiple=True, help="A log of nccl-tests.")
@click.option("--op", help="The operation of the logs, where they do not name it (all_reduce, alltoall, sendrecv ...).")
@click.option("--measurements", type=click.Path(path_type=Path), multiple=True,
              help="CSV or JSON: op, algo, proto, size, ranks, nodes, time_us.")  # fmt: skip
@click.option("--nccl", "records", type=click.Path(path_type=Path), multiple=True,
              help="Record files of NCCL's profiler, a folder of them, or `prism nccl report --json`.")  # fmt: skip
@click.option("--trace", "traces", type=click.Path(path_type=Path), multiple=True, help="An observed trace.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file (without it: stdout).")
@overwrite_option
def fit(
    profile: str, logs: tuple[Path, ...], op: str | None, measurements: tuple[Path, ...], records: tuple[Path, ...],
    traces: tuple[Path, ...], output: Path | None, overwrite: bool,
) -> int:  # fmt: skip
    """Put measured transfers into a profile; tables of the same operation, shape and algorithm are replaced.

    The output may be the profile itself, with --overwrite.
    """
    from prism_sdk.cluster import (
        format_cluster,
        joined_tables,
        load_cluster,
        read_measurements,
        read_nccl,
        read_nccl_tests,
        read_trace,
    )

    if not (logs or measurements or records or traces):
        raise UsageError("there is nothing to fit", hint="give --nccl-tests, --measurements, --nccl or --trace")
    if output is not None:
        check_output(output, overwrite=overwrite, sources=[*logs, *measurements, *records, *traces])
    cluster = load_cluster(profile)
    sources: list[tuple[str, Sequence[Sample]]] = []
    for path in logs:
        sources.append((f"nccl-tests, {_shown(path)}", read_nccl_tests(path, op=op, report=_finding)))
    for path in measurements:
        sources.append((_shown(path), read_measurements(path)))
    if records:
        source = f"NCCL profiler, {_shown(records[0])}" + (f" and {len(records) - 1} more" if records[1:] else "")
        sources.append((source, read_nccl(records, report=_finding)))
    for path in traces:
        sources.append((f"trace {_shown(path)}", read_trace(path, cluster)))
    tables = joined_tables(sources, cluster=cluster)
    keys = {(table.op, table.shape, table.algo, table.proto) for table in tables}
    kept = [table for table in cluster.tables if (table.op, table.shape, table.algo, table.proto) not in keys]
    cluster = replace(cluster, tables=(*kept, *tables))
    _write(format_cluster(cluster), output)
    if output is not None:
        _show(cluster)
    return ExitCode.OK


@command.command("check")
@click.argument("profile")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def check(profile: str, as_json: bool) -> int:
    """Check a profile, and say what its tables hold, how well interpolation fits them, and how far the model is off."""
    from prism_sdk.cluster import load_cluster

    cluster = load_cluster(profile)
    if as_json:
        echo_json(cluster)
    else:
        _show(cluster)
    return ExitCode.OK


def _shown(path: Path) -> str:
    """The name of a file as it stands in a profile: names may hold anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in path.name)


def _finding(text: str) -> None:
    click.echo(f"prism cluster: {text}", err=True)


def _write(text: str, output: Path | None) -> None:
    from prism_sdk.cluster import parse_cluster

    parse_cluster(tomllib.loads(text), file=str(output or "the profile"))  # what is written can be read
    if output is None:
        click.echo(text, nl=False)
    else:
        write_whole(text.encode(), output)


def _show(cluster: Cluster) -> None:
    from prism_sdk.cluster.estimate import interpolation_error_percent, model_ns

    nodes = counted(cluster.num_nodes, "node", separator=",")
    click.echo(f"{cluster.name}: {nodes} of {counted(cluster.gpus_per_node, 'GPU')}, {cluster.num_gpus:,} in all")
    nvlink, network = cluster.nvlink, cluster.network
    inside = f"NVLink {nvlink.bandwidth_gb_per_s:g} GB/s a GPU and direction"
    inside += f", {counted(cluster.domain_gpus, 'GPU')} a domain"
    click.echo(f"{inside}; {counted(network.nics_per_node, 'NIC')} of {network.bandwidth_gb_per_s:g} GB/s a node")
    if not cluster.tables:
        click.echo("no measured tables: every transfer is modelled (`prism cluster fit` adds them)")
        return
    rows = []
    for table in cluster.tables:
        off = []
        for size, time in zip(table.size_bytes, table.time_ns, strict=True):
            off.append(100.0 * (model_ns(cluster, table.op, num_bytes=size, shape=table.shape)[0] / time - 1.0))
        rows.append([
            table.op.name.lower(), table.shape.ranks, table.shape.nodes, table.algo or "-", len(table.size_bytes),
            f"{format_bytes(table.size_bytes[0])} to {format_bytes(table.size_bytes[-1])}",
            f"{format_ns(table.time_ns[0])} to {format_ns(table.time_ns[-1])}",
            f"{interpolation_error_percent(table):.1f} %", f"{min(off):+.0f} to {max(off):+.0f} %", table.source,
        ])  # fmt: skip
    headers = ["operation", "ranks", "nodes", "algo", "points", "sizes", "times", "interpolation", "model is off by"]
    echo_table([*headers, "source"], rows, right=(1, 2, 4))
