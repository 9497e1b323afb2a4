"""Puts framework adapters to work in a rank, or before ranks are forked. What their names become is in adapters.py."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from prism_sdk.abc import FrameworkAdapter
from prism_sdk.adapting import PatchingAdapter
from prism_sdk.runtime.adapters import Naming, TracerNamer
from prism_sdk.runtime.tracer import Tracer

_loaded: Mapping[str, FrameworkAdapter] | None = None  # by the fork server, for all ranks


def load_adapters(plugins: Sequence[str] = ()) -> Mapping[str, FrameworkAdapter]:
    """All adapters, also of the plugins named; those of installed ones are there in forked processes too."""
    global _loaded
    from prism_sdk.plugins import PluginManager

    if plugins:
        return PluginManager(named=plugins, only=("adapter",)).adapters()
    if _loaded is None:
        _loaded = PluginManager(only=("adapter",)).adapters()
    return _loaded


def activate_adapters(
    names: Sequence[str], plugins: Sequence[str], tracer: Tracer, until: contextlib.ExitStack,
    options: Mapping[str, str] | None = None,
) -> Naming:  # fmt: skip
    """Activate the adapters called `names` until `until` closes. One that fails is reported and left out."""
    naming = Naming(tracer, options)
    release_adapters(() if plugins else names)
    if not names:
        return naming
    until.callback(naming.close)  # wrappers may outlive the activation: torch has kept some as bound methods
    for name in names:
        if name in _prepared:
            prepared = _prepared.pop(name)
            until.enter_context(prepared.until)
            naming.lowered.update(prepared.naming.lowered)
            prepared.namer.bind(naming)
            continue
        try:
            until.enter_context(load_adapters(plugins)[name].activate(TracerNamer(naming, name)))
        except KeyError:
            naming.lowered[name] = ["not installed"]
        except Exception as error:  # a plugin's fault must not reach the training
            naming.lowered[name] = [f"left out: {type(error).__name__}: {error}"]
    return naming


class _Prepared:
    """An adapter whose wrappers are in place before there is a rank."""

    def __init__(self, name: str) -> None:
        no_tracer: Any = None
        self.naming = Naming(no_tracer)
        self.naming.close()
        self.namer = TracerNamer(self.naming, name)
        self.until = contextlib.ExitStack()

    @property
    def has_asked(self) -> bool:
        """Whether the adapter wanted to know or to say something that only a rank can answer or keep."""
        naming = self.naming
        return bool(naming.taken or naming.purposes or naming.coordinates)


_prepared: dict[str, _Prepared] = {}  # by the fork server; a rank takes them over


def adapters_before_fork(names: Sequence[str]) -> list[str]:
    """Those that are nothing but a table of wrappers: what others do when they are activated may not survive a fork."""
    adapters = load_adapters()
    return [
        name for name in names if name in adapters and type(adapters[name]).activate is PatchingAdapter.activate
    ]  # fmt: skip


def prepare_adapters(names: Sequence[str]) -> None:
    """Put wrappers in place before ranks are forked, which then share the pages that this writes.

    Adapters that want something of their rank at once, and those that fail, are left to the ranks.
    """
    for name in names:
        prepared = _Prepared(name)
        try:
            prepared.until.enter_context(load_adapters()[name].activate(prepared.namer))
        except Exception:  # the rank meets it again, and says so
            continue
        if prepared.has_asked:
            prepared.until.close()
        else:
            _prepared[name] = prepared


def release_adapters(spared: Sequence[str] = ()) -> None:
    """Put back what the wrappers of prepared adapters have replaced, without those of `spared`."""
    for name in [name for name in _prepared if name not in spared]:
        _prepared.pop(name).until.close()
