"""Prism's SDK: the extension points, the runtime and the command line. It is not the file format (``prismtrace``).

Where to look:

- ``prism_sdk.abc``         the classes a plugin implements
- ``prism_sdk.hookspecs``   the hooks through which a plugin registers them
- ``prism_sdk.plugins``     finding and loading plugins
- ``prism_sdk.errors``      every error, and the exit codes
- ``prism_sdk.settings``    every environment variable
- ``prism_sdk.graph``       algorithms on execution graphs (no torch)
- ``prism_sdk.runtime``     what runs a job (torch is imported inside ranks only)
- ``prism_sdk.cli``         the ``prism`` command
- ``prism_sdk.testing``     contract tests for plugin authors

Importing ``prism_sdk`` imports nothing else: it also happens inside every process that imports torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes longer than all else here, and Ctrl-C is not listened for before

if TYPE_CHECKING:
    from prism_sdk.hookspecs import hookimpl as hookimpl
    from prismtrace._version import __version__ as __version__

__all__ = ["__version__", "hookimpl"]


def __getattr__(name: str) -> object:
    if name == "__version__":  # the one distribution has one version
        from prismtrace._version import __version__ as version

        return version
    if name == "hookimpl":
        from prism_sdk.hookspecs import hookimpl

        return hookimpl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
