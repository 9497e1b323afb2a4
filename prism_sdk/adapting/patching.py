"""Wraps the functions that an adapter names, when their modules are imported, and puts them back.

Responsible for hooks, versions and the rule that no fault of an adapter reaches the training; what a call means is the
adapter's knowledge.
"""

from __future__ import annotations

import abc
import contextlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prism_sdk.abc import AdapterHook, FrameworkAdapter, UnitNamer
from prism_sdk.adapting.compiling import Compiler
from prism_sdk.adapting.imports import AfterImport

__all__ = ["Around", "PatchingAdapter", "find_hook", "version_in_bounds", "version_of"]

_ITEM = re.compile(r"(?P<name>[^\[]+)\[(?P<key>[^\]]+)\]")
_MISSING = object()


@dataclass(frozen=True)
class Around:
    """What to do around the calls of one hook.

    ``before`` gets the arguments of the call and returns the token of the stretch that it entered, or None. The stretch
    ends with the call. ``after`` gets what the call returned, then its arguments; not when the call raises.
    Both may raise: the hook is then left alone for the rest of the run and the fidelity is lowered.

    What torch.compile compiles calls neither, and the fidelity is lowered. Not so with ``is_compiled=False``: this says
    that the compiler never follows the function, so that a graph breaks there and Python calls it.
    """

    hook: AdapterHook
    before: Callable[..., int | None] | None = None
    after: Callable[..., None] | None = None
    is_compiled: bool = True


class PatchingAdapter(FrameworkAdapter):
    """An adapter that is a table of :class:`Around`. Subclasses give ``hooks`` and ``around``."""

    distribution: str
    """The distribution whose version counts for the hooks, such as ``deepspeed``."""

    @abc.abstractmethod
    def around(self, namer: UnitNamer) -> Sequence[Around]:
        """What to do at the hooks. Called once for each activation; must not import the framework."""

    @contextlib.contextmanager
    def activate(self, namer: UnitNamer) -> Iterator[None]:
        """Wrap each hook once its module is imported; on exit put everything back."""
        patches = _Patches(self.distribution, namer)
        finder = AfterImport()
        by_module: dict[str, list[Around]] = {}
        for one in self.around(namer):
            by_module.setdefault(one.hook.module, []).append(one)
        try:
            for module, ones in by_module.items():
                finder.call(module, lambda ones=ones: patches.apply(ones))  # type: ignore[misc]
            yield
        finally:
            finder.close()
            patches.restore()


class _Patches:
    """The wrappers of one activation."""

    def __init__(self, distribution: str, namer: UnitNamer) -> None:
        self._distribution = distribution
        self._version: str | None = None
        self._namer = namer
        self._applied: list[tuple[Any, Any, bool, Any, Any]] = []  # owner, key, is item, what was its own, ours

    def apply(self, ones: Sequence[Around]) -> None:
        """Wrap what these say; never raises: it runs inside the framework's import."""
        for one in ones:
            try:
                self._apply(one)
            except Exception as error:
                self._namer.lower(f"{one.hook.module}.{one.hook.attribute}: {type(error).__name__}: {error}")

    def _apply(self, one: Around) -> None:
        hook = one.hook
        if self._version is None:
            self._version = version_of(self._distribution)
        if not version_in_bounds(self._version, hook):
            return
        found = find_hook(hook)
        if found is None:
            if hook.required:
                self._namer.lower(
                    f"hook {hook.module}.{hook.attribute} is absent in {self._distribution} {self._version}"
                )
            return
        owner, key, is_item = found
        own: Any
        if is_item:
            own = target = owner[key]
        else:
            own = vars(owner).get(key, _MISSING)
            target = own if own is not _MISSING else getattr(owner, key)
        kind = type(target) if isinstance(target, staticmethod | classmethod) else None
        function = target.__func__ if kind is not None else target
        ours: Any = _wrapped(function, one, self._namer)
        if kind is not None:
            ours = kind(ours)
        if is_item:
            owner[key] = ours
        else:
            setattr(owner, key, ours)
        self._applied.append((owner, key, is_item, own, ours))

    def restore(self) -> None:
        """Put back what is still ours; what somebody else has wrapped since stays, and does nothing."""
        for owner, key, is_item, own, ours in reversed(self._applied):
            if is_item:
                if owner.get(key) is ours:
                    owner[key] = own
            elif vars(owner).get(key) is ours:
                if own is _MISSING:
                    delattr(owner, key)
                else:
                    setattr(owner, key, own)
        self._applied.clear()


def _wrapped(function: Callable[..., Any], one: Around, namer: UnitNamer) -> Callable[..., Any]:
    """A new function object each time: dynamo refuses two names of torch that share one."""
    before, after, leave, is_compiled = one.before, one.after, namer.leave, one.is_compiled
    compiler = Compiler()
    follows, looking, look = compiler.follows, compiler.looking, compiler.look

    def fail(error: Exception) -> None:
        nonlocal before, after
        before = after = None
        namer.lower(f"{one.hook.module}.{one.hook.attribute}: {type(error).__name__}: {error}")

    def compiled() -> None:
        namer.lower(f"{one.hook.module}.{one.hook.attribute} is inside of what torch.compile compiled: not named there")

    compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # it is called while compiling, once

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if follows():  # no frame of ours, and a graph in one piece stays one
            if is_compiled:
                compiled()
            return function(*args, **kwargs)
        frames = looking()
        token = None
        if before is not None:
            if frames is not None:
                look(None)
            try:
                token = before(*args, **kwargs)
            except Exception as error:
                fail(error)
            if frames is not None:
                look(frames)
        try:
            result = function(*args, **kwargs)
            if after is not None:
                if frames is not None:
                    look(None)
                try:
                    after(result, *args, **kwargs)
                except Exception as error:
                    fail(error)
                if frames is not None:
                    look(frames)
        finally:
            if token is not None:
                if frames is not None:
                    look(None)
                try:
                    leave(token)
                except Exception as error:
                    is_token = isinstance(token, int)
                    fail(error if is_token else TypeError(f"before returned {token!r:.60}, which is no token of enter"))
                if frames is not None:
                    look(frames)
        return result

    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__wrapped__"):
        with contextlib.suppress(AttributeError, TypeError):
            setattr(wrapper, name, function if name == "__wrapped__" else getattr(function, name))
    compiler.pass_by(wrapper)
    return wrapper


def find_hook(hook: AdapterHook) -> tuple[Any, Any, bool] | None:
    """Where a hook of a module that is loaded is: its owner, its key there, and whether the owner is a mapping."""
    owner: Any = sys.modules.get(hook.module)
    if owner is None:
        return None
    *owners, last = hook.attribute.split(".")
    for part in owners:
        owner = getattr(owner, part, None)
    item = _ITEM.fullmatch(last)
    if item is None:
        return (owner, last, False) if hasattr(owner, last) else None
    mapping = getattr(owner, item["name"], None) or {}
    for key in mapping:
        if key == item["key"] or getattr(key, "__name__", None) == item["key"]:
            return mapping, key, True
    return None


def version_of(distribution: str) -> str:
    """The version of a distribution, or of the module of that name where none is installed; a text without numbers."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return str(getattr(sys.modules.get(distribution), "__version__", "of unknown version"))


def version_in_bounds(version: str, hook: AdapterHook) -> bool:
    """Whether a hook is to be expected in this version; one that has no numbers is taken for the newest."""
    numbers = _numbers(version)
    if not numbers:
        return hook.max_version is None
    low, high = _numbers(hook.min_version or "0"), _numbers(hook.max_version or "")
    return numbers >= low and (not high or numbers[: len(high)] <= high)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
