"""Calls back when modules have been loaded, also if they are loaded anew. It changes nothing about imports."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["AfterImport", "is_missing"]


def is_missing(module: str) -> bool:
    """Whether a loaded package lacks this module. Nothing is imported: what is not loaded is not looked into."""
    names = module.split(".")
    if names[0] not in sys.modules:
        return False
    for depth in range(1, len(names)):
        parent, name = ".".join(names[:depth]), ".".join(names[: depth + 1])
        if name not in sys.modules:
            path = getattr(sys.modules[parent], "__path__", None)
            return path is None or not any(_finds(finder, name, path) for finder in sys.meta_path)
    return False


def _finds(finder: Any, name: str, path: Any) -> bool:
    try:
        return finder.find_spec(name, path) is not None
    except Exception:  # somebody else's finder: who knows what it would have found
        return True


class _Loader(importlib.abc.Loader):
    """The module's own loader, with a call after it."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # runpy, for one, asks for the code without importing

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # the module keeps its own loader: it may ask for data files or its source through it
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the other finders find, and puts a call behind the loader of the named modules."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Callable[[], None]]] = {}
        self._busy: set[str] = set()

    def call(self, module: str, then: Callable[[], None]) -> None:
        """Call `then` now if `module` is there, and each time it is loaded from now on."""
        if module in sys.modules and module not in self._busy:
            then()
        if not self._calls and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._calls.setdefault(module, []).append(then)

    def close(self) -> None:
        """Forget everything that is waited for."""
        self._calls.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of the protocol of finders."""
        if fullname not in self._calls or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            others = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
            found = (one.find_spec(fullname, path, target) for one in others)
            spec = next((one for one in found if one is not None), None)
        finally:
            self._busy.discard(fullname)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return None

        def then() -> None:
            for call in self._calls.get(fullname, ()):
                call()

        spec.loader = _Loader(spec.loader, then)
        return spec
