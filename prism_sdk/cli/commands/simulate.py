"""``prism simulate``: predicts a job from its graph alone, and says where the time goes.

Simulating is the work of ``prism_sdk.simulate``.
"""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.output import echo_json
from prism_sdk.cli.parsing import STEPS
from prism_sdk.cli.simulated import echo_report
from prism_sdk.errors import ExitCode
from prism_sdk.runtime.config import StepRange


@click.command("simulate")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--steps", type=STEPS, metavar="A:B", help="Only steps from A up to, not including, B.")
@click.option("--cluster", "cluster_name", metavar="PROFILE", help="Take transfers from this cluster profile.")
@click.option("--transfers", type=click.Choice(["all", "missing"]), default="all",
              help="With --cluster: replace all transfers (default), or only those that the graph lacks.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the timeline of all ranks as a trace.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    file: Path, steps: StepRange | None, cluster_name: str | None, transfers: str, output: Path | None, as_json: bool
) -> int:
    """Predict step time, bubbles and exposed communication of a job from its execution graph; no program runs.

    FILE is a calibrated graph, or a trace of real times (observed, emulated, imported). With nothing changed, a real
    trace gives its own step time again.

    \b
    Example:
        prism simulate graph.prism
        prism simulate graph.prism -o timeline.prism --json
    """
    from prism_sdk.simulate import load, simulate, summarise, write_timeline

    chosen = None if steps is None else range(steps.first, 2**31 - 1 if steps.stop is None else steps.stop)
    has_cluster = cluster_name is not None
    job = load(file, steps=chosen, with_sizes=has_cluster, transfers_needed=not has_cluster)
    if cluster_name is not None:
        from prism_sdk.cluster import load_cluster
        from prism_sdk.simulate.transfers import with_cluster

        job = with_cluster(job, load_cluster(cluster_name), which="all" if transfers == "all" else "missing")
    timeline = simulate(job)
    report = summarise(timeline)
    if output is not None:
        write_timeline(timeline, output)
    if as_json:
        echo_json(report)
    else:
        echo_report(report)
    return ExitCode.OK
