"""The one place that reads environment variables; everything else is handed a ``Settings``.

It does not decide anything: it parses, names what is wrong, and keeps the values.

To add a variable: a field here, a line in ``Settings.from_environ``, a line in ``Settings.to_environ`` when
child processes must see it, and a row in the table of the module docstring.

=====================  ============================================================================
PRISM_LOAD_PLUGINS     comma separated; only these plugins are loaded (built-in ones always are)
PRISM_DISABLE_PLUGINS  comma separated; these plugins, built-in or not, are not loaded
PRISM_TRACE_HOOKS      1 prints every hook call to stderr
PRISM_DEBUG            1 shows the Python traceback of an error of Prism's own
PRISM_MODE             observe: what the rank agent does under a foreign launcher; absent: nothing
PRISM_OUTPUT           the trace that a foreign launcher's ranks write
PRISM_STEPS            the steps to keep, A:B
PRISM_RANK             global rank; else RANK, else SLURM_PROCID
PRISM_WORLD_SIZE       number of ranks; else WORLD_SIZE, else SLURM_NTASKS
=====================  ============================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prism_sdk.errors import SettingsError

__all__ = ["Settings"]

_MODES = ("observe", "record", "calibrate", "emulate")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def _names(environ: Mapping[str, str], variable: str) -> tuple[str, ...] | None:
    text = environ.get(variable)
    if text is None:
        return None
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _flag(environ: Mapping[str, str], variable: str) -> bool:
    text = environ.get(variable, "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise SettingsError(variable, value=environ[variable], expected="0 or 1")


def _integer(environ: Mapping[str, str], *variables: str, minimum: int) -> int | None:
    for variable in variables:
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if not text.isascii() or not text.isdigit() or int(text) < minimum:
            raise SettingsError(variable, value=environ[variable], expected=f"a whole number of at least {minimum}")
        return int(text)
    return None


@dataclass(frozen=True)
class Settings:
    """Everything that Prism takes from the environment, parsed. Absent is ``None``, never a made-up value."""

    load_plugins: tuple[str, ...] | None = None
    disable_plugins: tuple[str, ...] = ()
    trace_hooks: bool = False
    debug: bool = False
    mode: str | None = None
    output: Path | None = None
    steps: str | None = None
    rank: int | None = None
    world_size: int | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Parse ``environ`` (the process environment when absent).

        Raises:
            SettingsError: a variable has a value that cannot be used.
        """
        env: Mapping[str, str] = os.environ if environ is None else environ
        mode = env.get("PRISM_MODE", "").strip() or None
        if mode is not None and mode not in _MODES:
            raise SettingsError("PRISM_MODE", value=mode, expected=f"one of {', '.join(_MODES)}")
        output = env.get("PRISM_OUTPUT", "").strip()
        return cls(
            load_plugins=_names(env, "PRISM_LOAD_PLUGINS"),
            disable_plugins=_names(env, "PRISM_DISABLE_PLUGINS") or (),
            trace_hooks=_flag(env, "PRISM_TRACE_HOOKS"),
            debug=_flag(env, "PRISM_DEBUG"),
            mode=mode,
            output=Path(output) if output else None,
            steps=env.get("PRISM_STEPS", "").strip() or None,
            rank=_integer(env, "PRISM_RANK", "RANK", "SLURM_PROCID", minimum=0),
            world_size=_integer(env, "PRISM_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS", minimum=1),
        )

    @staticmethod
    def environ_without_prism() -> dict[str, str]:
        """The process environment with every ``PRISM_*`` variable left out, for children that must not take part."""
        return {variable: value for variable, value in os.environ.items() if not variable.startswith("PRISM_")}

    def to_environ(self) -> dict[str, str]:
        """The ``PRISM_*`` variables that give a child process these settings."""
        pairs = {
            "PRISM_LOAD_PLUGINS": None if self.load_plugins is None else ",".join(self.load_plugins),
            "PRISM_DISABLE_PLUGINS": ",".join(self.disable_plugins) or None,
            "PRISM_TRACE_HOOKS": "1" if self.trace_hooks else None,
            "PRISM_DEBUG": "1" if self.debug else None,
            "PRISM_MODE": self.mode,
            "PRISM_OUTPUT": None if self.output is None else str(self.output),
            "PRISM_STEPS": self.steps,
            "PRISM_RANK": None if self.rank is None else str(self.rank),
            "PRISM_WORLD_SIZE": None if self.world_size is None else str(self.world_size),
        }
        return {variable: value for variable, value in pairs.items() if value is not None}
