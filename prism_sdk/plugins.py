"""Finding, loading and asking plugins: built-in modules, installed entry points, and what ``--plugin`` names.

It does not know what strategies, backends or adapters do, and it keeps no global: a manager is made where needed.

Every plugin loads in isolation. One that fails becomes a record with ``status == "broken"`` and one line that says
why; it is an error only when the user named it. The constructor never raises for a plugin; ``check_named`` and the
look-ups by name do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from prism_sdk import _discovery as discovery
from prism_sdk import hookspecs
from prism_sdk.abc import CalibrationStrategy, FrameworkAdapter, ReplayBackend, TraceExporter, TraceImporter
from prism_sdk.errors import BrokenPluginError, DuplicateNameError, UnknownNameError
from prism_sdk.settings import Settings

if TYPE_CHECKING:
    from prism_sdk.runtime.config import LaunchConfig, LaunchResult

__all__ = ["ENTRY_POINT_GROUP", "PluginManager", "PluginRecord"]

ENTRY_POINT_GROUP = "prism_sdk.plugins"

# kind -> (hook that registers it, class that its objects must be of)
_KINDS: dict[str, tuple[str, type[Any]]] = {
    "adapter": ("prism_register_adapters", FrameworkAdapter),
    "strategy": ("prism_register_strategies", CalibrationStrategy),
    "backend": ("prism_register_backends", ReplayBackend),
    "importer": ("prism_register_importers", TraceImporter),
    "exporter": ("prism_register_exporters", TraceExporter),
}


def _plural(kind: str) -> str:
    return "strategies" if kind == "strategy" else kind + "s"


@dataclass(frozen=True)
class PluginRecord:
    """One line of ``prism plugins``. ``status`` is ok, broken or disabled; ``reason`` says why when not ok."""

    name: str
    origin: str
    module: str
    distribution: str | None
    version: str | None
    status: str
    reason: str | None = None
    adapters: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    importers: tuple[str, ...] = ()
    exporters: tuple[str, ...] = ()
    observes: bool = False  # whether it is told when a run starts or ends

    @property
    def brings(self) -> dict[str, tuple[str, ...]]:
        """What the plugin registered: kind of object (``strategy``) -> names, kinds without any left out."""
        named = {kind: getattr(self, _plural(kind)) for kind in _KINDS}
        return {kind: names for kind, names in named.items() if names}

    def to_dict(self) -> dict[str, object]:
        """The record as JSON-ready values."""
        values: dict[str, object] = dict(self.__dict__)
        for kind in _KINDS:
            values[_plural(kind)] = list(getattr(self, _plural(kind)))
        return values


@dataclass
class _Entry:
    candidate: discovery.Candidate
    status: str = "ok"
    reason: str | None = None
    asked_for: bool = False
    objects: dict[str, list[Any]] | None = None

    def break_(self, reason: str) -> None:
        self.status, self.reason, self.objects = "broken", reason, None


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


class PluginManager:
    """The plugins of one command. Make one, ask it, drop it.

    Args:
        settings: parsed environment; read from the process when absent.
        named: what the user gave to ``--plugin``: module names, files, or names of installed plugins.
        builtin: load what ships in the box.
        installed: load the entry points of group ``prism_sdk.plugins``.
        only: kinds to ask plugins for; a rank needs adapters, and pays for what importers would import.
        report: where warnings and the hook trace go, one line a call; stderr when absent.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        named: Sequence[str] = (),
        builtin: bool = True,
        installed: bool = True,
        only: Sequence[str] = tuple(_KINDS),
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._settings = Settings.from_environ() if settings is None else settings
        self._report = report or _to_stderr
        self._entries: list[_Entry] = []
        self._collected, self._kinds = False, only
        self._pm = pluggy.PluginManager(hookspecs.PROJECT_NAME)
        self._pm.add_hookspecs(hookspecs)
        if self._settings.trace_hooks:
            self._pm.add_hookcall_monitoring(self._trace_before, self._trace_after)
        if builtin:
            for candidate in discovery.builtin_candidates():
                self._add(candidate)
        if installed:
            self._add_installed()
        for text in named:
            self._add_named(text)

    # --- asking ----------------------------------------------------------------------------------------------------

    def adapters(self) -> dict[str, FrameworkAdapter]:
        """Every usable adapter by name. A name taken twice gives the first: built in, then installed, then named."""
        return {name: found[0][1] for name, found in self._by_name("adapter").items()}

    def strategies(self) -> dict[str, CalibrationStrategy]:
        """Every usable calibration strategy by name; the first where a name is taken twice."""
        return {name: found[0][1] for name, found in self._by_name("strategy").items()}

    def backends(self) -> dict[str, ReplayBackend]:
        """Every usable replay backend by name; the first where a name is taken twice."""
        return {name: found[0][1] for name, found in self._by_name("backend").items()}

    def importers(self) -> dict[str, TraceImporter]:
        """Every usable importer by name; the first where a name is taken twice."""
        return {name: found[0][1] for name, found in self._by_name("importer").items()}

    def exporters(self) -> dict[str, TraceExporter]:
        """Every usable exporter by name; the first where a name is taken twice."""
        return {name: found[0][1] for name, found in self._by_name("exporter").items()}

    def adapter(self, name: str) -> FrameworkAdapter:
        """The adapter that the user named.

        Raises:
            UnknownNameError: nobody registered it.
            DuplicateNameError: more than one plugin did.
            BrokenPluginError: the plugin of that name is broken.
        """
        found: FrameworkAdapter = self._one("adapter", name)
        return found

    def strategy(self, name: str) -> CalibrationStrategy:
        """The calibration strategy that the user named. Raises as :meth:`adapter` does."""
        found: CalibrationStrategy = self._one("strategy", name)
        return found

    def backend(self, name: str) -> ReplayBackend:
        """The replay backend that the user named. Raises as :meth:`adapter` does."""
        found: ReplayBackend = self._one("backend", name)
        return found

    def importer(self, name: str) -> TraceImporter:
        """The importer that the user named. Raises as :meth:`adapter` does."""
        found: TraceImporter = self._one("importer", name)
        return found

    def exporter(self, name: str) -> TraceExporter:
        """The exporter that the user named. Raises as :meth:`adapter` does."""
        found: TraceExporter = self._one("exporter", name)
        return found

    def records(self) -> tuple[PluginRecord, ...]:
        """Every plugin that was found, broken and disabled ones included, in order of loading."""
        self._collect()
        return tuple(self._record(entry) for entry in self._entries)

    def duplicates(self) -> tuple[DuplicateNameError, ...]:
        """Every name that more than one plugin registered, as the error that naming it would raise."""
        found = []
        for kind in _KINDS:
            for name, owners in self._by_name(kind).items():
                if len(owners) > 1:
                    found.append(self._duplicate(kind, name, [entry for entry, _ in owners]))
        return tuple(found)

    def check_named(self) -> None:
        """Raise the first problem of a plugin that the user named (``--plugin``, ``PRISM_LOAD_PLUGINS``).

        Raises:
            BrokenPluginError: it does not load or register.
            UnknownNameError: ``PRISM_LOAD_PLUGINS`` names a plugin that is not installed.
        """
        for entry in self._entries:
            if entry.asked_for:  # of what the user named all kinds count
                self._ask(entry, tuple(_KINDS))
            if entry.asked_for and entry.status == "broken":
                raise self._broken(entry)
        for name in self._settings.load_plugins or ():
            if not any(name in entry.candidate.aliases for entry in self._entries):
                known = [entry.candidate.name for entry in self._entries]
                raise UnknownNameError(name, kind="plugin", known=known)

    # --- following a run ---------------------------------------------------------------------------------------------

    def notify_run_start(self, config: LaunchConfig) -> None:
        """Tell every plugin that a run starts. A plugin that raises costs one warning, nothing else."""
        self._notify("prism_observe_run_start", {"config": config})

    def notify_run_end(self, config: LaunchConfig, *, result: LaunchResult) -> None:
        """Tell every plugin that a run ended. A plugin that raises costs one warning, nothing else."""
        self._notify("prism_observe_run_end", {"config": config, "result": result})

    # --- loading -----------------------------------------------------------------------------------------------------

    def register(self, plugin: object, *, name: str) -> None:
        """Add a plugin object that is already in memory. A problem with it shows in its record."""
        module = getattr(plugin, "__module__", None) or getattr(plugin, "__name__", type(plugin).__name__)
        candidate = discovery.Candidate(name=name, origin="registered", module=str(module), load=lambda: plugin)
        self._add(candidate, asked_for=True)

    def _add_installed(self) -> None:
        load = self._settings.load_plugins
        for candidate in discovery.installed_candidates(ENTRY_POINT_GROUP):
            if load is not None and not candidate.aliases & set(load):
                self._skip(candidate, reason="not in PRISM_LOAD_PLUGINS")
            else:
                self._add(candidate, asked_for=load is not None)

    def _add_named(self, text: str) -> None:
        for entry in self._entries:
            if text in entry.candidate.aliases:
                entry.asked_for = True
                if entry.status == "disabled":
                    entry.status, entry.reason = "ok", None
                    self._load(entry)
                return
        self._add(discovery.named_candidate(text), asked_for=True)

    def _skip(self, candidate: discovery.Candidate, *, reason: str) -> None:
        self._entries.append(_Entry(candidate, status="disabled", reason=reason))

    def _add(self, candidate: discovery.Candidate, *, asked_for: bool = False) -> None:
        self._collected = False
        if candidate.aliases & set(self._settings.disable_plugins):
            self._skip(candidate, reason="in PRISM_DISABLE_PLUGINS")
            return
        entry = _Entry(candidate, asked_for=asked_for)
        self._entries.append(entry)
        self._load(entry)

    def _load(self, entry: _Entry) -> None:
        name = entry.candidate.name
        if self._pm.has_plugin(name):
            entry.break_(f"the plugin name {name!r} is already taken by {self._owner_of(name)}")
            return
        plugin: object = None
        try:
            plugin = entry.candidate.load()
            discovery.check_markers(plugin)
            self._pm.register(plugin, name=name)
            self._pm.check_pending()
        except (Exception, SystemExit) as error:
            if plugin is not None and self._pm.has_plugin(name):
                self._pm.unregister(plugin)
            entry.break_(discovery.one_line(error))

    # --- collecting --------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        if self._collected:
            return
        self._collected = True
        for entry in self._entries:
            self._ask(entry, self._kinds)

    def _ask(self, entry: _Entry, kinds: Sequence[str]) -> None:
        if entry.status != "ok" or entry.objects is not None:
            return
        try:
            entry.objects = {kind: self._register_kind(entry, kind) for kind in kinds}
        except (Exception, SystemExit) as error:
            entry.break_(discovery.one_line(error))
            self._pm.unregister(name=entry.candidate.name)

    def _register_kind(self, entry: _Entry, kind: str) -> list[Any]:
        hook_name, cls = _KINDS[kind]
        objects: list[Any] = []
        for returned in self._call_one(entry, hook_name, {}):
            if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
                raise TypeError(f"{hook_name} must return a list of {cls.__name__} objects, not {returned!r}")
            objects.extend(returned)
        seen: set[str] = set()
        for item in objects:
            if not isinstance(item, cls):
                raise TypeError(f"{hook_name} must return {cls.__name__} objects, not {item!r}")
            for attribute in ("name", "description"):
                value = getattr(item, attribute, None)
                if not isinstance(value, str) or not value:
                    raise TypeError(f"{type(item).__name__}.{attribute} must be a string that is not empty")
            if item.name in seen:
                raise ValueError(f"{hook_name} returns the name {item.name!r} twice")
            seen.add(item.name)
        return objects

    def _call_one(self, entry: _Entry, hook_name: str, kwargs: Mapping[str, object]) -> Iterable[Any]:
        own = self._pm.get_plugin(entry.candidate.name)
        others = [plugin for plugin in self._pm.get_plugins() if plugin is not own]
        result: list[Any] = self._pm.subset_hook_caller(hook_name, remove_plugins=others)(**kwargs)
        return result

    def _notify(self, hook_name: str, kwargs: Mapping[str, object]) -> None:
        self._collect()
        for entry in self._entries:
            if entry.status != "ok":
                continue
            try:
                self._call_one(entry, hook_name, kwargs)
            except Exception as error:
                why = discovery.one_line(error)
                self._report(f"prism: warning: plugin {entry.candidate.name!r}, {hook_name}: {why}")

    # --- looking up --------------------------------------------------------------------------------------------------

    def _by_name(self, kind: str) -> dict[str, list[tuple[_Entry, Any]]]:
        self._collect()
        found: dict[str, list[tuple[_Entry, Any]]] = {}
        for entry in self._entries:
            for item in (entry.objects or {}).get(kind, ()):
                found.setdefault(item.name, []).append((entry, item))
        return found

    def _one(self, kind: str, name: str) -> Any:
        known = self._by_name(kind)
        owners = known.get(name, [])
        if len(owners) == 1:
            return owners[0][1]
        if owners:
            raise self._duplicate(kind, name, [entry for entry, _ in owners])
        for entry in self._entries:
            if entry.status == "broken" and name in entry.candidate.aliases:
                raise self._broken(entry, context=f"the {kind} {name!r} cannot be used: ")
        error = UnknownNameError(name, kind=kind, known=list(known))
        out = [f"{e.candidate.name} ({e.status}: {e.reason})" for e in self._entries if e.status != "ok"]
        if out:
            error.hint = f"{error.hint}; not loaded: {', '.join(out)}"
        raise error

    def _duplicate(self, kind: str, name: str, owners: Sequence[_Entry]) -> DuplicateNameError:
        return DuplicateNameError(
            name,
            kind=kind,
            plugin=owners[-1].candidate.name,
            distributions=[entry.candidate.described for entry in owners],
        )

    def _broken(self, entry: _Entry, *, context: str = "") -> BrokenPluginError:
        candidate = entry.candidate
        return BrokenPluginError(
            candidate.name, reason=entry.reason or "unknown", distribution=candidate.distribution, context=context,
            source=candidate.module if candidate.origin == "named" else None,
        )  # fmt: skip

    def _owner_of(self, name: str) -> str:
        return next(e.candidate.described for e in self._entries if e.candidate.name == name and e.status == "ok")

    def _record(self, entry: _Entry) -> PluginRecord:
        candidate, objects = entry.candidate, entry.objects or {}
        names = {_plural(kind): tuple(item.name for item in objects.get(kind, ())) for kind in _KINDS}
        callers = self._pm.get_hookcallers(self._pm.get_plugin(candidate.name)) or ()
        return PluginRecord(
            name=candidate.name, origin=candidate.origin, module=candidate.module, distribution=candidate.distribution,
            version=candidate.version, status=entry.status, reason=entry.reason, **names,
            observes=any(caller.name.startswith("prism_observe_") for caller in callers),
        )  # fmt: skip

    # --- tracing -----------------------------------------------------------------------------------------------------

    def _trace_before(self, hook_name: str, impls: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for impl in impls:
            arguments = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
            self._report(f"prism: hook {hook_name}({arguments}) -> plugin {impl.plugin_name}")

    def _trace_after(self, outcome: Any, hook_name: str, impls: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if impls:
            error = outcome.exception
            shown = f"raised {discovery.one_line(error)}" if error is not None else f"returned {outcome.get_result()!r}"
            self._report(f"prism: hook {hook_name} {shown}")
