"""``prism simulate``: predicts a job from its graph alone, also with changes, and says where the time goes.

Simulating is the work of ``prism_sdk.simulate``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from prism_sdk.cli.output import Ticker, echo_json
from prism_sdk.cli.outputs import check_output, overwrite_option
from prism_sdk.cli.parsing import STEPS, once
from prism_sdk.cli.simulated import echo_report
from prism_sdk.cli.whatif import scenario_of, what_if_options
from prism_sdk.errors import ExitCode
from prism_sdk.runtime.config import StepRange


@click.command("simulate")
@click.argument("file", type=click.Path(path_type=Path))
@once("--steps", type=STEPS, metavar="A:B", help="Only steps from A up to, not including, B.")
@what_if_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the timeline of all ranks as a trace.")
@overwrite_option
@click.option("-q", "--quiet", is_flag=True, help="Do not say how far it is.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    file: Path, steps: StepRange | None, output: Path | None, overwrite: bool, quiet: bool, as_json: bool,
    **changes: Any,
) -> int:  # fmt: skip
    """Predict step time, bubbles and exposed communication of a job from its execution graph; no program runs.

    FILE is a calibrated graph, or a trace of real times (observed, emulated, imported). With nothing changed, a real
    trace gives its own step time again. Changes can be combined; WHERE is KEY=VALUE&KEY=VALUE of rank, stage, kind
    (compute, collective, message, communication, wait), phase, op, group, step, label.

    \b
    Example:
        prism simulate graph.prism
        prism simulate graph.prism --slow rank=17:1.3 --scale op=all_reduce:0.5
        prism simulate graph.prism --cluster h100-sxm --link network.bandwidth_gb_per_s=x0.5
        prism simulate graph.prism --dp 64 --microbatches 32 --cluster mine.toml -o timeline.prism
    """
    from prism_sdk.simulate import summarise, write_timeline

    if output is not None:
        check_output(output, overwrite=overwrite, sources=[file])
    chosen = None if steps is None else steps.as_range()
    scenario = scenario_of(changes)
    before = None
    if not scenario.is_empty:
        progress = None if quiet else Ticker(f"reading {file}, unchanged", of="ranks")
        before = summarise(scenario.unchanged.run(file, steps=chosen, progress=progress))
    progress = None if quiet else Ticker(f"reading {file}", of="ranks")
    timeline = scenario.run(file, steps=chosen, progress=progress)
    report = summarise(timeline, base_step_ns=None if before is None else before.step_time_ns)
    if output is not None:
        facts = {f"simulate.{key}": repr(value) for key, value in changes.items() if value not in ((), None)}
        progress = None if quiet else Ticker(f"writing {output}", of="ranks")
        write_timeline(timeline, output, metadata=facts, progress=progress)
    if as_json:
        echo_json({"report": report, "unchanged": before} if before is not None else {"report": report})
    else:
        echo_report(report, before=before)
    return ExitCode.OK
