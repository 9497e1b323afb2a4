"""Finds functions that have taken the place of a wrapped one, and tells whether they leave it out.

What stands there now may well call ours: a wrapper, or a method of a subclass. So it is watched: only if it is called
and ours is never entered, names are lost. Who wraps what in the first place is in patching.py.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting.compiling import Compiler
from prism_sdk.adapting.places import INSIDE, MISSING, Place, around_function, find_hook, innermost, is_around, mark

__all__ = ["Replacements", "Wrapped", "look_like"]

_MOST_AT_A_PLACE = 4  # of one after the other


class Wrapped:
    """A function that is wrapped for an adapter: where, and how often it was entered."""

    __slots__ = (
        "beside", "first", "function", "has_met", "hook", "is_compiled", "num_entered", "place", "standing", "wrapper",
    )  # fmt: skip

    def __init__(self, hook: AdapterHook, place: Place) -> None:
        self.hook = hook
        self.place = place
        self.num_entered = 0
        self.beside: list[Wrapped] = [self]  # all of the same class or module
        self.has_met = False
        self.first: Callable[[], Any] = _nothing  # gives the first argument of a call, as long as it lives
        self.is_compiled = False  # somebody's graph has it, which is said already
        self.function: Any = None
        self.wrapper: Any = None
        self.standing: Any = MISSING  # what was found in the place

    def meet(self, arguments: tuple[Any, ...]) -> None:
        """A call begins, with an object to remember if it is that of a class."""
        self.has_met = True
        if arguments and isinstance(self.place.owner, type):
            self.first = _weakly(arguments[0])

    def num_beside(self) -> int:
        """How often those beside it were entered."""
        return sum(one.num_entered for one in self.beside if one is not self)


class _Replacement:
    """What stands in the place of a wrapped function, or before it.

    An object, and what it has, it lets go of: a model that the program drops takes its memory along.
    """

    def __init__(self, wrapped: Wrapped, place: Place, value: Any) -> None:
        inside = innermost(value)
        hold = _weakly if place.is_of_object else _firmly
        self.wrapped, self.key = wrapped, place.key
        self._owner, self._inside = hold(place.owner), hold(inside)
        self._code = inside.__code__ if type(inside) is FunctionType else None
        self.overrides = _is_below(place.owner, wrapped.place.owner)
        self.described = _described(wrapped, place, inside, overrides=self.overrides)
        """What has happened, and what to do."""
        self.restore: Callable[[], None] = _nothing
        self.witness: Any = None
        self.is_watched = False
        self.num_calls = self.num_passed_on = 0
        self.entered_before, self.beside_before = wrapped.num_entered, wrapped.num_beside()
        self.is_judged = False

    def watch(self, place: Place, value: Any) -> None:
        """Count its calls, and those that come to ours."""

        def restore() -> None:
            if place.own() is self.witness:
                place.put(value)

        self.witness, self.restore = around_function(value, self._witness), restore
        place.put(self.witness)
        self.is_watched = True

    def _witness(self, function: Any) -> Any:
        wrapped, compiler = self.wrapped, Compiler()
        follows = compiler.follows

        def witness(*args: Any, **kwargs: Any) -> Any:
            if follows():
                return function(*args, **kwargs)
            before = wrapped.num_entered
            result = function(*args, **kwargs)
            self.num_calls += 1
            self.num_passed_on += wrapped.num_entered != before
            return result

        look_like(witness, function)
        compiler.pass_by(witness)
        return witness

    def is_at(self, place: Place) -> bool:
        return self._owner() is place.owner and self.key == place.key

    def is_known(self, value: Any) -> bool:
        """Whether it is this that stands there; a closure that is made anew each time is the same."""
        inside = innermost(value)
        return inside is self._inside() or (type(inside) is FunctionType and inside.__code__ is self._code)

    def passes_on(self) -> bool:
        """Whether ours was entered, through it if there are others of its kind."""
        return self.num_passed_on > 0 if self.overrides else self.wrapped.num_entered > self.entered_before

    def is_used(self) -> bool:
        """Whether it was called; where nothing counts its calls, whether functions beside ours were."""
        if self.is_watched:
            return self.num_calls > 0
        return self.wrapped.num_beside() > self.beside_before


def _described(wrapped: Wrapped, place: Place, inside: Any, *, overrides: bool) -> str:
    hook, key = wrapped.hook, place.key
    what, lost = f"hook {hook.module}.{hook.attribute} is", "what it does has no names"
    if hook.option is not None:
        lost = f"{hook.option} does nothing there"
    if place.is_item and place.owner is not wrapped.place.owner:
        what = f"hooks in {hook.module}.{hook.attribute.partition('[')[0]} are"  # said once for all of them
        found, advice = "another mapping is in its place now", "put into it what the mapping before has"
    elif overrides:
        owner = place.owner
        found = f"{owner.__module__}.{owner.__qualname__}.{key} overrides it and does not call it"
        advice = f"let it call super().{key}"
    else:
        found = _name_of(inside)
        if inside is wrapped.function:
            found = "the function that Prism has wrapped"
        elif found == f"{hook.module}.{hook.attribute}":
            code = getattr(inside, "__code__", None)
            at = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
            found = f"another function of this name{at}"
        where = "an attribute of the object" if place.is_of_object else "in its place"
        found = f"{found} is {where} now and does not call it"
        advice = "call the function that stood there before"
    return (
        f"{what} left out: {found}, so that {lost}. "
        f"To have it, {advice}, or write an adapter that names the new one"
    )


class Replacements:
    """Looks after the wrapped functions of one activation."""

    def __init__(self, namer: UnitNamer) -> None:
        self._namer = namer
        self._groups: list[list[Wrapped]] = []  # those of one class, module or mapping
        self._found: list[_Replacement] = []
        self._num_steps = 0

    def add(self, wrapped: Wrapped) -> None:
        """Look after this one; one of the same hook is forgotten, whose module was loaded anew."""
        for group in self._groups:
            group[:] = [one for one in group if one.hook != wrapped.hook]
        self._groups = [group for group in self._groups if group]
        owner = wrapped.place.owner
        wrapped.beside = next((group for group in self._groups if group[0].place.owner is owner), [])
        if not wrapped.beside:
            self._groups.append(wrapped.beside)
        wrapped.beside.append(wrapped)
        wrapped.standing = wrapped.place.own()

    def step_ends(self) -> None:
        """Judge what was found before, and find more.

        All is looked through after 1, 2, 4, 8 and so on steps, which takes some 100 us; the places themselves always.
        """
        self._num_steps += 1
        self._judge()
        if self._num_steps & (self._num_steps - 1):
            self.look_at_places()
        else:
            self._look()

    def look_at_places(self) -> None:
        """Find what has taken the place of ours where we put it."""
        if any(one.place.own() is not one.standing for group in self._groups for one in group):
            self._look()

    def _look(self) -> None:
        for group in self._groups:
            before = _places_before(group)
            for wrapped in group:
                now = find_hook(wrapped.hook)
                for owner in before:
                    if wrapped.place.key in vars(owner):
                        self._see(wrapped, Place(owner, wrapped.place.key))
                if now is not None and not _is_below(now.owner, wrapped.place.owner):
                    self._see(wrapped, now)
                wrapped.standing = wrapped.place.own()

    def _see(self, wrapped: Wrapped, place: Place) -> None:
        """Remember what stands there unless it is ours, or known."""
        value = place.own()
        if value is MISSING or wrapped.is_compiled or is_around(value, wrapped.wrapper):
            return
        known = [one for one in self._found if one.wrapped is wrapped and one.is_at(place)]
        again = next((one for one in known if one.is_known(value)), None)
        if again is not None and not is_around(value, again.witness):
            again.is_watched = False  # comes and goes, as by a context manager: nothing of ours lasts there
        if again is None and len(known) < _MOST_AT_A_PLACE:
            found = _Replacement(wrapped, place, value)
            if _can_be_watched(value, place):
                found.watch(place, value)
            self._found.append(found)

    def close(self) -> None:
        """The run is over: judge if no step ever ended, and take away what watches."""
        if not self._num_steps:
            self._judge()
        for one in reversed(self._found):
            one.restore()

    def _judge(self) -> None:
        for one in self._found:
            if one.is_judged or one.wrapped.is_compiled:
                continue
            if one.passes_on():
                one.is_judged = True
            elif one.is_used():
                one.is_judged = True
                self._namer.lower(one.described)


def look_like(wrapper: Any, function: Any) -> None:
    """Give a wrapper the name and the text of what is inside, and mark it as ours."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        try:
            setattr(wrapper, name, getattr(function, name))
        except (AttributeError, TypeError):
            continue
    wrapper.__wrapped__ = function
    mark(wrapper, function)


def _can_be_watched(value: Any, place: Place) -> bool:
    """Whether a function of ours around it can be told from it by nothing but its identity."""
    if isinstance(place.owner, type):
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        return _is_plain(function)
    if place.is_of_object:  # which may be copied or pickled
        return False
    return _is_plain(value) or isinstance(value, MethodType | BuiltinFunctionType | functools.partial)


def _is_plain(function: Any) -> bool:
    return type(function) is FunctionType and vars(function).keys() <= {"__wrapped__", "__isabstractmethod__", INSIDE}


def _places_before(group: Sequence[Wrapped]) -> list[Any]:
    """Who may have an attribute that comes before that of a class: subclasses of it, and an object of it.

    Subclasses of the framework's own are the adapter's business.
    """
    owner, framework = group[0].place.owner, _package(group[0].hook.module)
    if not isinstance(owner, type):
        return []
    found: list[Any] = [one for one in _subclasses(owner) if _package(str(one.__module__)) != framework]
    met = None
    for wrapped in group:
        one = wrapped.first()
        wrapped.has_met = one is not None  # else it is that of the next call
        met = one if met is None else met
    return [*found, met] if hasattr(met, "__dict__") else found


def _is_below(one: Any, owner: Any) -> bool:
    return isinstance(one, type) and isinstance(owner, type) and one is not owner and issubclass(one, owner)


def _subclasses(owner: type) -> list[type]:
    direct: list[type] = type.__subclasses__(owner)
    return list(dict.fromkeys(more for one in direct for more in (one, *_subclasses(one)))) if direct else direct


def _package(module: str) -> str:
    return module.partition(".")[0]


def _name_of(value: Any) -> str:
    if isinstance(value, functools.partial):
        return f"a partial of {_name_of(value.func)}"
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType | staticmethod | classmethod):
        return f"{value.__module__ or '(no module)'}.{value.__qualname__}"
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"


def _nothing() -> None:
    return None


def _firmly(value: Any) -> Callable[[], Any]:
    return lambda: value


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return _nothing
