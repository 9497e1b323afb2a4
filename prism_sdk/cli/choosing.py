"""Loads the plugins that a launch uses, and refuses what the user named of them and that cannot be used.

Everything is refused before a process starts; it starts none itself, and knows no option of any plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from prism_sdk.errors import UsageError
from prism_sdk.interop.options import at_least
from prism_sdk.runtime.config import DEFAULT_BACKEND, DEFAULT_STRATEGY, RUNTIME_OPTIONS, LaunchConfig, LaunchMode
from prism_sdk.settings import Settings

if TYPE_CHECKING:
    from prism_sdk.abc import CalibrationStrategy, ReplayBackend
    from prism_sdk.plugins import PluginManager

__all__ = ["checked_plugins"]


def checked_plugins(config: LaunchConfig, settings: Settings) -> PluginManager:
    """Load plugins, and raise for everything that the user named and that cannot be used."""
    from prism_sdk.plugins import PluginManager

    is_replayed = config.mode in (LaunchMode.CALIBRATE, LaunchMode.EMULATE)
    kinds = (["adapter"] if config.adapters else []) + (["strategy", "backend"] if is_replayed else [])
    manager = PluginManager(
        settings, named=config.plugins, only=kinds, report=lambda line: click.echo(line, err=True)
    )  # fmt: skip
    manager.check_named()
    users: list[CalibrationStrategy | ReplayBackend] = []
    if config.mode is LaunchMode.CALIBRATE:
        users.append(manager.strategy(config.strategy or DEFAULT_STRATEGY))
    if is_replayed:
        users.append(manager.backend(config.backend or DEFAULT_BACKEND))
    for name in config.adapters or ():
        manager.adapter(name)
    _check_options(config, users)
    for user in users:
        user.check_options(config.options)
    at_least(config.options, "prefetch_bytes", default=0, low=0)  # the one that the runtime itself reads
    return manager


def _check_options(config: LaunchConfig, users: Sequence[CalibrationStrategy | ReplayBackend]) -> None:
    """Refuse keys of -O that nobody reads; a plugin that does not say which it reads may read any."""
    names = [user.option_names for user in users] + ([RUNTIME_OPTIONS] if users else [])
    if any(known is None for known in names):
        return
    known = sorted({name for one in names for name in one or ()})
    for name in config.options:
        if name not in known:
            of = " and ".join(f"{user.name!r}" for user in users)
            hint = f"with {of} there are: {', '.join(known)}" if known else f"prism {config.mode} has none"
            raise UsageError(f"there is no -O option {name!r}", hint=hint)
