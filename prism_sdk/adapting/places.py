"""Where the functions of hooks stand: in modules, classes, objects, mappings. What is put there is not known here."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from prism_sdk.abc import AdapterHook

__all__ = [
    "INSIDE",
    "MISSING",
    "Place",
    "around_function",
    "copies_of",
    "find_hook",
    "innermost",
    "is_around",
    "mark",
    "modules_beside",
]

MISSING: Any = object()
_ITEM = re.compile(r"(?P<name>[^\[]+)\[(?P<key>[^\]]+)\]")
INSIDE = "_prism_inside"  # attribute of our wrappers: themselves, since functools.wraps copies it, and what is inside


@dataclass(frozen=True, eq=False)
class Place:
    """A key of a mapping, or an attribute that an owner may have of its own or inherit."""

    owner: Any
    key: Any
    is_item: bool = False

    @property
    def is_of_object(self) -> bool:
        """Whether it is an attribute of an object, and not of a module or class."""
        return not self.is_item and not isinstance(self.owner, ModuleType | type)

    def own(self) -> Any:
        """What the owner has there itself; MISSING if it has nothing, or inherits it."""
        values = self.owner if self.is_item else vars(self.owner)
        return values.get(self.key, MISSING)

    def get(self) -> Any:
        """What stands there, inherited or not, as it was put there: a static method is no function."""
        own = self.own()
        if own is MISSING and isinstance(self.owner, type):
            return next((vars(base)[self.key] for base in self.owner.__mro__ if self.key in vars(base)), MISSING)
        return own

    def put(self, value: Any) -> None:
        """Put something there; MISSING takes away what the owner has itself."""
        if self.is_item:
            self.owner[self.key] = value
        elif value is MISSING:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, value)


def find_hook(hook: AdapterHook) -> Place | None:
    """Where a hook of a module that is loaded is now; None if there is none."""
    owner: Any = sys.modules.get(hook.module)
    *owners, last = hook.attribute.split(".")
    for part in owners:
        owner = getattr(owner, part, None)
    if owner is None:
        return None
    item = _ITEM.fullmatch(last) if "[" in last else None
    if item is None:
        return Place(owner, last) if hasattr(owner, last) else None
    mapping = getattr(owner, item["name"], None) or {}
    for key in mapping:
        if key == item["key"] or getattr(key, "__name__", None) == item["key"]:
            return Place(mapping, key, is_item=True)
    return None


def modules_beside(module: str) -> list[ModuleType]:
    """The other modules of its package that are loaded."""
    package = module.rpartition(".")[0] or module
    loaded = [(name, one) for name, one in list(sys.modules.items()) if name.startswith(package) and name != module]
    return [one for name, one in loaded if f"{name}.".startswith(f"{package}.") and isinstance(one, ModuleType)]


def copies_of(function: Any, modules: Iterable[ModuleType]) -> Iterator[Place]:
    """Where modules have a function under names of their own, as by `from module import function`."""
    for module in modules:
        yield from (Place(module, key) for key, value in list(vars(module).items()) if value is function)


def around_function(value: Any, make: Callable[[Any], Any]) -> Any:
    """What `make` makes of a function; a static or class method stays one."""
    if isinstance(value, staticmethod | classmethod):
        return type(value)(make(value.__func__))
    return make(value)


def mark(wrapper: Any, function: Any) -> None:
    """Note that a function is a wrapper of ours, and around what."""
    setattr(wrapper, INSIDE, (wrapper, function))


def innermost(value: Any) -> Any:
    """The function inside all wrappers of ours."""
    return list(_inside(value))[-1]


def is_around(value: Any, wrapper: Any) -> bool:
    """Whether it is this wrapper of ours, or others of ours around it: adapters may wrap the same function."""
    return any(one is wrapper for one in _inside(value))


def _inside(value: Any) -> Iterator[Any]:
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    while True:
        yield function
        if type(function) is not FunctionType:
            return
        marked, inside = vars(function).get(INSIDE, (None, None))
        if marked is not function:
            return
        function = inside
