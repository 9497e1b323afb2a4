"""The hooks of Prism: how a plugin registers its objects, and how it may follow a run.

It does not call them: ``prism_sdk.plugins`` does. No hook fires per event of a trace; what must be fast is an
object behind an abstract class (``prism_sdk.abc``), registered once.

Each docstring keeps one order: one line; when it is called; Args; Returns; Raises; versionadded.
A plugin implements a hook by a function of the same name, marked ``@prism_sdk.hookimpl``; it may leave out
arguments that it does not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prism_sdk.abc import CalibrationStrategy, FrameworkAdapter, ReplayBackend, TraceExporter, TraceImporter
    from prism_sdk.runtime.config import LaunchConfig, LaunchResult

__all__ = [
    "PROJECT_NAME",
    "hookimpl",
    "hookspec",
    "prism_observe_run_end",
    "prism_observe_run_start",
    "prism_register_adapters",
    "prism_register_backends",
    "prism_register_exporters",
    "prism_register_importers",
    "prism_register_strategies",
]

PROJECT_NAME = "prism"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


# --- registering (collect): called once when plugins are loaded ----------------------------------------------------


@hookspec
def prism_register_adapters() -> Sequence[FrameworkAdapter]:  # type: ignore[empty-body]
    """Register framework adapters.

    Called once for each plugin manager, before the first registered object is handed out. Must not import a framework.

    Args:
        None.

    Returns:
        A list of :class:`prism_sdk.abc.FrameworkAdapter` objects; names must be unique over all plugins.

    Raises:
        Anything: the plugin is then marked broken and its other objects are not used.

    .. versionadded:: 0.1
    """


@hookspec
def prism_register_strategies() -> Sequence[CalibrationStrategy]:  # type: ignore[empty-body]
    """Register calibration strategies.

    Called once for each plugin manager, before the first registered object is handed out.

    Args:
        None.

    Returns:
        A list of :class:`prism_sdk.abc.CalibrationStrategy` objects; names must be unique over all plugins.

    Raises:
        Anything: the plugin is then marked broken and its other objects are not used.

    .. versionadded:: 0.1
    """


@hookspec
def prism_register_backends() -> Sequence[ReplayBackend]:  # type: ignore[empty-body]
    """Register replay backends.

    Called once for each plugin manager, before the first registered object is handed out. Must not import torch.

    Args:
        None.

    Returns:
        A list of :class:`prism_sdk.abc.ReplayBackend` objects; names must be unique over all plugins.

    Raises:
        Anything: the plugin is then marked broken and its other objects are not used.

    .. versionadded:: 0.1
    """


@hookspec
def prism_register_importers() -> Sequence[TraceImporter]:  # type: ignore[empty-body]
    """Register importers of other trace formats.

    Called once for each plugin manager, before the first registered object is handed out.
    Must not load what reads the format.

    Args:
        None.

    Returns:
        A list of :class:`prism_sdk.abc.TraceImporter` objects; names must be unique over all plugins.

    Raises:
        Anything: the plugin is then marked broken and its other objects are not used.

    .. versionadded:: 0.2
    """


@hookspec
def prism_register_exporters() -> Sequence[TraceExporter]:  # type: ignore[empty-body]
    """Register exporters of other trace formats.

    Called once for each plugin manager, before the first registered object is handed out.
    Must not load what writes the format.

    Args:
        None.

    Returns:
        A list of :class:`prism_sdk.abc.TraceExporter` objects; names must be unique over all plugins.

    Raises:
        Anything: the plugin is then marked broken and its other objects are not used.

    .. versionadded:: 0.2
    """


# --- following a run (coarse lifecycle): called in the parent process, never in a rank -----------------------------


@hookspec
def prism_observe_run_start(config: LaunchConfig) -> None:
    """Learn that a run is about to start.

    Called in the parent process after the command line was checked and before the first rank starts.

    Args:
        config: what the run was asked to do; frozen.

    Returns:
        Nothing.

    Raises:
        Anything: reported as one warning on stderr; the run goes on.

    .. versionadded:: 0.1
    """


@hookspec
def prism_observe_run_end(config: LaunchConfig, result: LaunchResult) -> None:
    """Learn that a run ended.

    Called in the parent process after the last rank ended and the output was closed. Not called for a run that
    raised an error of Prism's own.

    Args:
        config: what the run was asked to do; frozen.
        result: how it ended; frozen.

    Returns:
        Nothing.

    Raises:
        Anything: reported as one warning on stderr; the run's exit code stays.

    .. versionadded:: 0.1
    """
