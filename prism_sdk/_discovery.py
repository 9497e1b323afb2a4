"""Where plugins come from: the list of what ships in the box, installed entry points, modules and files.

It finds and describes them; calling ``Candidate.load`` imports one. Isolation is the work of ``prism_sdk.plugins``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prism_sdk.hookspecs import PROJECT_NAME

__all__ = [
    "BUILTIN_MODULES",
    "Candidate",
    "builtin_candidates",
    "check_markers",
    "installed_candidates",
    "named_candidate",
    "one_line",
]

BUILTIN_MODULES = (
    "prism_sdk.builtin.slices", "prism_sdk.builtin.local", "prism_sdk.builtin.gloo", "prism_sdk.builtin.nccl",
    "prism_sdk.builtin.primus",
)  # fmt: skip
"""The plugins in the box, in order of loading; the last part of the name is the plugin's name."""

_OWN_DISTRIBUTION = "prismtrace"


@dataclass(frozen=True)
class Candidate:
    """A plugin that was found but not imported yet."""

    name: str
    origin: str
    module: str
    load: Callable[[], object]
    distribution: str | None = None
    version: str | None = None

    @property
    def aliases(self) -> frozenset[str]:
        """The names by which the user may mean this plugin."""
        names = {self.name, self.module}
        if self.distribution is not None and self.origin != "built-in":
            names |= {self.distribution, _normalized(self.distribution)}
        return frozenset(names)

    @property
    def described(self) -> str:
        """The plugin and where it comes from, for messages."""
        if self.origin == "built-in":
            return f"{self.name} (built in)"
        origin = f"distribution {self.distribution}" if self.distribution else self.module
        return f"{self.name} ({origin})"


def one_line(error: BaseException) -> str:
    """What went wrong, in one line, with the place when the error is in a file of its own."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    where = ""
    for frame in reversed(frames):
        if "importlib" not in frame.filename and "pluggy" not in frame.filename and "prism_sdk" not in frame.filename:
            where = f" ({frame.filename}:{frame.lineno})"
            break
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def builtin_candidates() -> Iterator[Candidate]:
    """What ships in the box."""
    if importlib.util.find_spec("prism_sdk.builtin") is None:
        return
    for module in BUILTIN_MODULES:
        if importlib.util.find_spec(module) is None:
            continue
        yield Candidate(
            name=module.rpartition(".")[2],
            origin="built-in",
            module=module,
            load=_importer(module),
            distribution=_OWN_DISTRIBUTION,
        )


def installed_candidates(group: str) -> Iterator[Candidate]:
    """The entry points of ``group``, by name of distribution; a distribution with broken metadata comes out too."""
    seen: set[str] = set()
    found: list[Candidate] = []
    for distribution in importlib.metadata.distributions():
        # one unreadable dist-info must not hide the plugins of all others
        label = "an unreadable distribution"
        try:
            # where importlib tells the name of its folder: metadata of all take a tenth of a second, in every rank
            label = getattr(distribution, "_normalized_name", None) or distribution.metadata["Name"] or ""
            if not label or _normalized(label) in seen:
                continue
            seen.add(_normalized(label))
            for entry_point in distribution.entry_points.select(group=group):
                name = label = distribution.metadata["Name"] or label
                found.append(
                    Candidate(
                        name=entry_point.name,
                        origin="installed",
                        module=entry_point.value,
                        load=entry_point.load,
                        distribution=name,
                        version=distribution.version,
                    )
                )
        except Exception as error:
            found.append(Candidate(name=label, origin="installed", module="", load=_raiser(error), distribution=label))
    yield from sorted(found, key=lambda candidate: (_normalized(candidate.distribution or ""), candidate.name))


def named_candidate(text: str) -> Candidate:
    """What the user gave to ``--plugin``: a file when it looks like one, else a module."""
    path = Path(text)
    if text.endswith(".py") or path.name != text:
        return Candidate(name=path.stem, origin="named", module=text, load=lambda: _load_file(path))
    return Candidate(name=text, origin="named", module=text, load=_importer(text, here=True))


def _importer(module: str, *, here: bool = False) -> Callable[[], object]:
    def load() -> object:
        if not here or "" in sys.path or str(Path.cwd()) in sys.path:
            return importlib.import_module(module)
        sys.path.append(str(Path.cwd()))  # a module beside the script, as `python -m` would find it
        try:
            return importlib.import_module(module)
        finally:
            sys.path.remove(str(Path.cwd()))

    return load


def _raiser(error: BaseException) -> Callable[[], object]:
    def load() -> object:
        raise error

    return load


def _load_file(path: Path) -> object:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"prism_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # ranks are forked and may unpickle objects of this module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def check_markers(plugin: object) -> None:
    """A hook function without its marker would silently never be called."""
    for name in dir(plugin):
        if not name.startswith("prism_"):
            continue
        function = getattr(plugin, name, None)
        if not callable(function) or getattr(function, "__module__", None) == "prism_sdk.hookspecs":
            continue
        if not hasattr(function, f"{PROJECT_NAME}_impl"):
            raise ValueError(f"{name} is not marked with @prism_sdk.hookimpl")
