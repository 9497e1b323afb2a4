"""Runs ``prism`` on training scripts and keeps apart what they write, for tests of adapters. It holds no test."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prism_sdk.testing.workplace import Workplace

__all__ = ["Launched", "Launches", "losses"]


@dataclass(frozen=True)
class Launched:
    """How a command ended; ``trace`` is what it wrote."""

    code: int
    out: str
    err: str
    trace: Path


@dataclass
class Launches:
    """Launches in one folder.

    Args:
        folder: where traces go.
        plugin: module of the adapter's plugin, loaded also where its distribution is not installed.
        environment: variables on top of those of the test; those of Prism are taken away.
        timeout_s: no launch takes longer.
        shared: whether launches share a process, and what it has loaded; else each is started as a user starts it.
        workplace: the process to share, where there is one already; its environment and its time are those of launches.
    """

    folder: Path
    plugin: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 120.0
    shared: bool = True
    workplace: Workplace | None = None
    _serial: int = 0

    def __post_init__(self) -> None:
        self._workplace = self.workplace or Workplace(
            self.folder, environment=self.environment, timeout_s=self.timeout_s
        )

    def run(
        self, verb: str, script: Path | str, arguments: Sequence[str] = (), *, options: Sequence[str | Path] = ()
    ) -> Launched:  # fmt: skip
        """Run ``prism VERB OPTIONS -- SCRIPT ARGUMENTS``, whatever comes of it; a script given as text is a module."""
        self._serial += 1
        trace = self.folder / f"{verb}-{self._serial}.prism"
        plugin = ["--plugin", self.plugin] if self.plugin else []
        target = ["-m", "--", script] if isinstance(script, str) else ["--", script]
        run = self._workplace.run if self.shared else self._workplace.run_apart
        done = run(verb, "-o", trace, *plugin, *options, *target, *arguments)
        return Launched(done.code, done.out, done.err, trace)

    def must(
        self, verb: str, script: Path | str, arguments: Sequence[str] = (), *, options: Sequence[str | Path] = ()
    ) -> Launched:  # fmt: skip
        """As :meth:`run`, and it must end well."""
        done = self.run(verb, script, arguments, options=options)
        assert done.code == 0, f"prism {verb} ended with {done.code}:\n{done.err}"
        return done

    def observe(self, script: Path | str, arguments: Sequence[str] = (), *, num_ranks: int) -> Launched:
        """Every rank for real."""
        return self.must("observe", script, arguments, options=["--nproc-per-node", str(num_ranks)])

    def record(
        self, script: Path | str, arguments: Sequence[str] = (), *, num_ranks: int, num_slots: int = 2,
        options: Sequence[str] = (),
    ) -> Launched:  # fmt: skip
        """All ranks by turns."""
        flags = ["--nproc-per-node", str(num_ranks), "--slots", str(num_slots), *options]
        return self.must("record", script, arguments, options=flags)

    def calibrate(
        self, graph: Path, script: Path | str, arguments: Sequence[str] = (), *, transfers: Path | None = None
    ) -> Launched:  # fmt: skip
        """One pass over the slices: enough to see that ranks follow the graph.

        `transfers` is a trace of the job observed: what no slice does as a whole takes as long as there. Without it
        a further launch measures that.
        """
        options: list[str | Path] = ["--graph", graph, "--slots", "2", "-O", "passes=1"]
        if transfers is not None:
            options += ["-O", f"transfers={transfers}"]
        return self.must("calibrate", script, arguments, options=options)

    def emulate(
        self, graph: Path, script: Path | str, arguments: Sequence[str] = (), *, sandbox: str = "0"
    ) -> Launched:  # fmt: skip
        """Some ranks for real."""
        return self.must("emulate", script, arguments, options=["--graph", graph, "--sandbox", sandbox])


def losses(text: str) -> list[float]:
    """The losses of lines like ``step 3 loss 2.25`` in what a script printed, by step."""
    found = re.findall(r"step (\d+) loss (\S+)", text)
    return [float(value) for _, value in sorted(found, key=lambda one: int(one[0]))]
