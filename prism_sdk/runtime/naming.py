"""Puts the names that framework adapters give onto the units of a trace.

Responsible for activating adapters in a rank; what a framework's schedule looks like is the adapters' knowledge.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from prism_sdk.runtime.tracer import Names, Tracer
from prismtrace import Phase

_PHASES = {phase.name.lower(): phase for phase in Phase if phase}


class TracerNamer:
    """Where adapters say what the rank is doing (implements prism_sdk.abc.UnitNamer). Stretches nest."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._outer: list[tuple[Phase, Names | None]] = []

    def enter(
        self, phase: str, *, microbatch: int | None = None, stage: int | None = None, model_chunk: int | None = None,
        label: str | None = None,
    ) -> None:  # fmt: skip
        """From now on the rank's units belong to `phase`; an unknown phase counts as other."""
        names = Names(label, microbatch, stage, model_chunk)
        self._outer.append(self._tracer.name(_PHASES.get(phase, Phase.OTHER), names))

    def leave(self) -> None:
        """End the innermost stretch."""
        if self._outer:
            self._tracer.name(*self._outer.pop())


def activate_adapters(
    names: Sequence[str], plugins: Sequence[str], tracer: Tracer, until: contextlib.ExitStack
) -> None:
    """Activate the adapters called `names` until `until` closes. One that fails is reported and left out."""
    if not names:
        return
    from prism_sdk.plugins import PluginManager

    adapters = PluginManager(named=plugins).adapters()
    for name in names:
        try:
            until.enter_context(adapters[name].activate(TracerNamer(tracer)))
        except Exception as error:  # a plugin's fault must not reach the training
            sys.stderr.write(f"prism: adapter {name} is left out: {type(error).__name__}: {error}" + "\n")
