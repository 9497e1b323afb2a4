"""Variants of a sweep that run on other machines, each as one task whose report is a file.

Responsible for what a task is and where its report lies; spreading tasks is ``prism_sdk.runtime.engines``'s.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prism_sdk.cli.output import Ticker, json_ready
from prism_sdk.errors import ExitCode, PrismError
from prism_sdk.runtime.engines import RayEngine, kept_folder
from prism_sdk.simulate import Scenario, summarise
from prism_sdk.writing import write_whole

_REFUSED = "refused"


@dataclass(frozen=True)
class VariantTask:
    """One variant of the job in `file`."""

    file: Path
    name: str
    scenario: Scenario
    steps: range | None
    base_step_ns: float | None
    folder: Path

    @property
    def label(self) -> str:
        return f"the variant {self.name!r}"

    @property
    def output(self) -> Path:
        """One for each scenario, whatever its name and its place in the sweep."""
        return self.folder / f"{hashlib.blake2b(repr(self.scenario).encode(), digest_size=16).hexdigest()}.json"

    @property
    def is_finished(self) -> bool:
        try:
            return isinstance(json.loads(self.output.read_text()), dict)
        except (OSError, ValueError):
            return False

    def run(self, make_host: Callable[..., Any]) -> None:
        del make_host  # no rank runs
        try:
            found = report_of(self.file, self.scenario, self.steps, self.base_step_ns)
        except PrismError as error:  # a result, too: the others go on
            found = {_REFUSED: {"message": error.message, "hint": error.hint, "exit_code": int(error.exit_code)}}
        write_whole(json.dumps(found).encode(), self.output)

    def report(self) -> dict[str, Any] | PrismError:
        """What it found, as JSON, or why it cannot be."""
        found: dict[str, Any] = json.loads(self.output.read_text())
        if _REFUSED not in found:
            return found
        error = PrismError(found[_REFUSED]["message"], hint=found[_REFUSED]["hint"])
        error.exit_code = ExitCode(found[_REFUSED]["exit_code"])
        return error


def report_of(
    file: Path, scenario: Scenario, steps: range | None, base_step_ns: float | None, *,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The report of one variant, as JSON; ``progress`` is told how many ranks of how many are read."""
    timeline = scenario.run(file, steps=steps, progress=progress)
    report: dict[str, Any] = json_ready(summarise(timeline, base_step_ns=base_step_ns))
    return report


def sweep_on_cluster(
    file: Path, named: Sequence[tuple[str, Scenario]], steps: range | None, *, address: str | None
) -> list[dict[str, Any] | PrismError]:  # fmt: skip
    """What each of `named` gives, or why it cannot be; each runs on one CPU of a Ray cluster.

    The first is the job as it is, which must be: its error is raised.

    What is finished is kept beside the file until all of them are, so the same command goes on after an interruption.
    """
    clusters = {Path(scenario.cluster) for _, scenario in named if scenario.cluster is not None}
    facts = (steps, version("prismtrace"), *(_state(path) for path in (file, *sorted(clusters)) if path.is_file()))
    folder = kept_folder(file.absolute().with_name(f"{file.name}.sweep"), facts, label="sweep")
    ticker = Ticker("sweep", of="variants")
    with RayEngine(address, num_slots=1) as engine:
        (name, scenario), *others = named
        base = VariantTask(file, name, scenario, steps, None, folder)
        engine.run([base], lambda done: ticker(done, len(named)))
        as_it_is = base.report()
        if isinstance(as_it_is, PrismError):
            shutil.rmtree(folder, ignore_errors=True)
            raise as_it_is
        step_ns = as_it_is["step_time_ns"]
        tasks = [VariantTask(file, name, scenario, steps, step_ns, folder) for name, scenario in others]
        distinct = list({task.output: task for task in tasks}.values())
        engine.run(distinct, lambda done: ticker(done + 1, len(distinct) + 1))
    reports = [task.report() for task in (base, *tasks)]
    shutil.rmtree(folder, ignore_errors=True)
    return reports


def _state(path: Path) -> tuple[str, int, int]:
    state = path.stat()
    return str(path.absolute()), state.st_size, state.st_mtime_ns
