"""A plugin manager that loads no built-in and no installed plugin. It is for tests, not for runs."""

from __future__ import annotations

from collections.abc import Callable

from prism_sdk.plugins import PluginManager
from prism_sdk.settings import Settings

__all__ = ["isolated_manager"]


def isolated_manager(
    *plugins: object, settings: Settings | None = None, report: Callable[[str], None] | None = None
) -> PluginManager:
    """A manager with these plugin objects (modules, or objects with hook methods) and no other.

    Environment variables are not read.
    """
    manager = PluginManager(settings or Settings(), builtin=False, installed=False, report=report)
    for index, plugin in enumerate(plugins):
        name = getattr(plugin, "__name__", None) or f"{type(plugin).__name__}-{index}"
        manager.register(plugin, name=str(name))
    return manager
