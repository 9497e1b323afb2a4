"""Opens the replay backend that a sandbox rank was told to use.

Responsible for finding it among the plugins and handing it its context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prism_sdk.abc import Assistance, ReplaySession
from prism_sdk.runtime.ranks import EmulateSpec, RankSpec


@dataclass(frozen=True)
class SandboxContext:
    """What a backend may see (implements prism_sdk.abc.ReplayContext)."""

    graph_path: Path
    rank: int
    sandbox: tuple[int, ...]
    world_size: int
    options: Mapping[str, str] = field(default_factory=dict)
    assistance: Assistance = field(default_factory=Assistance)


def open_backend(spec: RankSpec, facts: EmulateSpec) -> ReplaySession:
    """Open a session of the backend named in `facts` for this rank."""
    from prism_sdk.plugins import PluginManager

    backend = PluginManager(named=spec.plugins, only=("backend",)).backend(facts.backend)
    return backend.open(
        SandboxContext(facts.graph, spec.rank, facts.sandbox, spec.world_size, facts.options, facts.assistance)
    )
