"""Calls back once a module has been imported, or at once if it has been already. It changes nothing about imports."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["AfterImport"]


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
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._busy: set[str] = set()

    def call(self, module: str, then: Callable[[], None]) -> None:
        """Call `then` after `module` was imported; now if it is there."""
        if module in sys.modules and module not in self._busy:
            then()
            return
        if not self._waiting and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._waiting.setdefault(module, []).append(then)

    def close(self) -> None:
        """Forget everything that is still waited for."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of the protocol of finders."""
        if fullname not in self._waiting or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return None
        calls = self._waiting

        def then() -> None:
            for call in calls.pop(fullname, ()):
                call()

        spec.loader = _Loader(spec.loader, then)
        return spec
