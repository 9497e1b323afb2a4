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
from types import ModuleType
from typing import Any

from prism_sdk.abc import AdapterHook, FrameworkAdapter, UnitNamer
from prism_sdk.adapting.compiling import Compiler
from prism_sdk.adapting.imports import AfterImport, is_missing
from prism_sdk.adapting.places import MISSING, Place, around_function, copies_of, find_hook, modules_beside
from prism_sdk.adapting.replaced import Replacements, Wrapped, look_like

__all__ = ["Around", "PatchingAdapter", "version_in_bounds", "version_of"]


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
        around = self.around(namer)
        patches = _Patches(self.distribution, namer, around)
        finder = AfterImport()
        by_module: dict[str, list[Around]] = {}
        for one in around:
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

    def __init__(self, distribution: str, namer: UnitNamer, around: Sequence[Around]) -> None:
        self._distribution = distribution
        self._version: str | None = None
        self._namer = namer
        self._applied: list[tuple[Place, Any, Any]] = []  # what was the place's own, and ours
        self._beside: list[ModuleType] | None = None  # other modules of the package that is at hand
        self._unseen: Sequence[AdapterHook] = [one.hook for one in around]  # whose modules are to be looked for
        self._replacements = Replacements(namer)
        namer.watch(step_ends=self._step_ends, group_begins=self._replacements.look_at_places)

    def apply(self, ones: Sequence[Around]) -> None:
        """Wrap what these say of one module; never raises: it runs inside the framework's import."""
        self._beside = None
        for one in ones:
            try:
                self._apply(one)
            except Exception as error:
                self._namer.lower(f"{one.hook.module}.{one.hook.attribute}: {type(error).__name__}: {error}")

    def _apply(self, one: Around) -> None:
        hook = one.hook
        if not self._is_expected(hook):
            return
        place = find_hook(hook)
        if place is None:
            self._is_absent(hook)
            return
        value = place.get()
        if value is MISSING:  # as a module may have it that makes attributes when they are asked for
            value = getattr(place.owner, place.key)
        wrapped = Wrapped(hook, place)
        self._put(place, around_function(value, lambda function: _wrapped(function, one, self._namer, wrapped)))
        self._replacements.add(wrapped)
        if isinstance(place.owner, ModuleType):
            if self._beside is None:
                self._beside = modules_beside(hook.module)
            for copy in copies_of(value, self._beside):
                self._put(copy, wrapped.wrapper)

    def _is_expected(self, hook: AdapterHook) -> bool:
        if hook.option is not None and not self._namer.is_given(hook.option):
            return False
        if self._version is None:
            self._version = version_of(self._distribution)
        return version_in_bounds(self._version, hook)

    def _is_absent(self, hook: AdapterHook) -> None:
        if hook.required:
            self._namer.lower(f"hook {hook.module}.{hook.attribute} is absent in {self._distribution} {self._version}")

    def _step_ends(self) -> None:
        self._look_for_modules()
        self._replacements.step_ends()

    def _look_for_modules(self) -> None:
        """Report once, where the framework has been loaded, hooks in modules that it does not have."""
        unseen, self._unseen = self._unseen, ()
        for hook in unseen:
            if is_missing(hook.module) and self._is_expected(hook):
                self._is_absent(hook)

    def _put(self, place: Place, ours: Any) -> None:
        self._applied.append((place, place.own(), ours))
        place.put(ours)

    def restore(self) -> None:
        """Put back what is still ours; what somebody else has wrapped since stays, and does nothing."""
        try:
            self._look_for_modules()
            self._replacements.close()
        finally:
            for place, own, ours in reversed(self._applied):
                if place.own() is ours:
                    place.put(own)
            self._applied.clear()


def _wrapped(
    function: Callable[..., Any], one: Around, namer: UnitNamer, wrapped: Wrapped
) -> Callable[..., Any]:  # fmt: skip
    """A new function object each time: dynamo refuses two names of torch that share one."""
    before, after, leave, is_compiled = one.before, one.after, namer.leave, one.is_compiled
    compiler = Compiler()
    follows, looking, look = compiler.follows, compiler.looking, compiler.look

    def fail(error: Exception) -> None:
        nonlocal before, after
        before = after = None
        namer.lower(f"{one.hook.module}.{one.hook.attribute}: {type(error).__name__}: {error}")

    def compiled() -> None:
        wrapped.is_compiled = True
        namer.lower(f"{one.hook.module}.{one.hook.attribute} is inside of what torch.compile compiled: not named there")

    compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # it is called while compiling, once

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if follows():  # no frame of ours, and a graph in one piece stays one
            if is_compiled:
                compiled()
            return function(*args, **kwargs)
        wrapped.num_entered += 1
        if not wrapped.has_met:
            wrapped.meet(args)
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

    look_like(wrapper, function)
    compiler.pass_by(wrapper)
    wrapped.function, wrapped.wrapper = function, wrapper
    return wrapper


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
