"""Functions that take the place of wrapped ones: those that leave ours out are reported, all others are not."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from prism_sdk.abc import AdapterHook, UnitNamer
from prism_sdk.adapting import Around, PatchingAdapter
from prism_sdk.testing import NullNamer

MODULE = "replaced_frame"
SOURCE = """
class Layer:
    def forward(self, x):
        return x + 1

    def backward(self, x):
        return x - 1

    @staticmethod
    def helper(x):
        return 2 * x

    @classmethod
    def make(cls):
        return cls()

    TABLE = {"Pass": backward, "Other": forward}

class Fast(Layer):
    def forward(self, x):
        return x + 2

def gate(x):
    return x

def schedule(layer):
    return step(layer, 1)

def step(layer, x):
    return layer.backward(layer.forward(x))
"""
HOOKS = [
    AdapterHook(MODULE, attribute)
    for attribute in (
        "Layer.forward", "Layer.backward", "Layer.helper", "Layer.make", "Layer.TABLE[Pass]", "Layer.TABLE[Other]",
        "schedule", "step",
    )
] + [AdapterHook(MODULE, "gate", option="moe_skew")]  # fmt: skip


class Table(PatchingAdapter):
    name, description, distribution = "table", "for tests", "replaced_frame"

    def __init__(self) -> None:
        self.entered: list[str] = []

    def hooks(self) -> Sequence[AdapterHook]:
        return HOOKS

    def around(self, namer: UnitNamer) -> Sequence[Around]:
        def note(hook: AdapterHook) -> Callable[..., None]:
            return lambda *_, **__: self.entered.append(hook.attribute)

        return [Around(hook, before=note(hook)) for hook in HOOKS]


class Run:
    """The framework, with the adapter at work on it."""

    def __init__(self, module: Any, **options: str) -> None:
        self.module, self.adapter, self.namer = module, Table(), NullNamer(options)

    def step(self, *calls: Callable[[], Any]) -> list[str]:
        """A step in which these are called: what has been reported so far."""
        for call in calls:
            call()
        self.namer.end_step()
        return self.namer.reasons

    def train(self, *calls: Callable[[], Any]) -> list[str]:
        for _ in range(4):
            self.step(*calls)
        return self.namer.reasons


@pytest.fixture
def frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(MODULE)
    del sys.modules[MODULE]


@pytest.fixture
def run(frame: Any) -> Iterator[Run]:
    run = Run(frame)
    with run.adapter.activate(run.namer):
        yield run


def other(layer: Any, x: int = 0) -> int:
    return x + 100


def another(layer: Any, x: int = 0) -> int:
    return x + 200


@pytest.mark.parametrize("options", [{}, {"moe_skew": "1.5"}])
def test_a_hook_of_an_option_counts_only_where_the_option_is_given(frame: Any, options: dict[str, str]) -> None:
    run, own = Run(frame, **options), frame.gate
    with run.adapter.activate(run.namer):
        assert (frame.gate is not own) == bool(options)
        frame.gate = other
        reasons = run.train(lambda: frame.gate(None, 1), lambda: frame.step(frame.Layer(), 1))
    assert len(reasons) == len(options) and all("gate is left out" in one for one in reasons)
    assert all("moe_skew does nothing there" in one for one in reasons)


def test_a_function_that_takes_the_place_is_reported_once_with_its_name(run: Run) -> None:
    run.module.Layer.forward = other
    (reason,) = run.train(lambda: run.module.step(run.module.Layer(), 1))
    assert f"hook {MODULE}.Layer.forward is left out: {__name__}.other is in its place now" in reason
    assert run.module.Layer().forward(1) == 101


def test_before_it_is_called_nothing_is_said(run: Run) -> None:
    run.module.Layer.forward = other
    assert run.train(lambda: run.module.Layer().backward(1)) == []
    assert len(run.train(lambda: run.module.Layer().forward(1))) == 1


def test_what_calls_ours_is_not_reported(run: Run) -> None:
    ours = run.module.Layer.forward

    def wrapper(layer: Any, x: int) -> int:
        return 0 if x < 0 else 2 * int(ours(layer, x))

    run.module.Layer.forward = wrapper
    layer = run.module.Layer()
    assert run.train(lambda: layer.forward(-1), lambda: layer.forward(1)) == []
    assert layer.forward(1) == 4 and "Layer.forward" in run.adapter.entered


@pytest.mark.parametrize("calls", [False, True])
def test_a_decorator_that_keeps_the_name_is_told_by_its_calls_too(run: Run, calls: bool) -> None:
    ours = run.module.step

    @functools.wraps(ours)
    def decorated(layer: Any, x: int) -> Any:
        return ours(layer, x) if calls else 0

    run.module.step = decorated
    reasons = run.train(lambda: run.module.schedule(run.module.Layer()))
    found = f"another function of this name ({__file__}:"
    assert [f"hook {MODULE}.step is left out: {found}" in reason for reason in reasons] == [True] * (not calls)


def test_what_calls_ours_later_is_not_reported(run: Run) -> None:
    ours, due = run.module.schedule, list[Any]()
    run.module.schedule = due.append
    layer = run.module.Layer()
    assert run.train(lambda: run.module.schedule(layer), lambda: ours(due.pop())) == []


@pytest.mark.parametrize("attribute", ["helper", "make"])
def test_static_and_class_methods_stay_such(run: Run, attribute: str) -> None:
    cls = run.module.Layer
    kind = type(vars(cls)[attribute])
    setattr(cls, attribute, kind(lambda one: ("other", one)))
    arguments = (5,) if kind is staticmethod else ()
    (reason,) = run.train(lambda: getattr(cls, attribute)(*arguments))
    assert f"Layer.{attribute} is left out" in reason
    assert getattr(cls, attribute)(*arguments) == ("other", arguments[0] if arguments else cls)


@pytest.mark.parametrize("whole", [False, True])
def test_items_and_whole_tables(run: Run, whole: bool) -> None:
    cls = run.module.Layer
    if whole:
        cls.TABLE = {"Pass": other, "Other": another}
    else:
        cls.TABLE["Pass"] = other
    (reason,) = run.train(lambda: cls.TABLE["Pass"](cls(), 1), lambda: cls.TABLE["Other"](cls(), 1))
    assert ("hooks in replaced_frame.Layer.TABLE are" if whole else "Layer.TABLE[Pass] is") + " left out" in reason


def test_a_subclass_that_overrides_is_reported_though_others_come_to_ours(run: Run) -> None:
    class Mine(run.module.Layer):  # type: ignore[misc, name-defined]
        def forward(self, x: int) -> int:
            return x + 5

    class Kind(run.module.Layer):  # type: ignore[misc, name-defined]
        def forward(self, x: int) -> int:
            return int(super().forward(x))

    assert run.train(lambda: run.module.Layer().forward(1), lambda: Kind().forward(1)) == []
    (reason,) = run.train(lambda: run.module.Layer().forward(1), lambda: Mine().forward(1))
    assert "Mine.forward overrides it and does not call it" in reason and "super().forward" in reason


def test_subclasses_of_the_framework_are_the_adapters_business(run: Run) -> None:
    assert run.train(lambda: run.module.Fast().forward(1), lambda: run.module.Fast().backward(1)) == []


@pytest.mark.parametrize("related", [False, True])
def test_another_class_in_the_place(run: Run, related: bool) -> None:
    bases = (run.module.Layer,) if related else ()
    run.module.Layer = type("Mine", bases, {"forward": other, "__module__": __name__})
    (reason,) = run.train(lambda: run.module.Layer().forward(1))
    assert "Layer.forward is left out" in reason


@pytest.mark.parametrize("is_second", [False, True])
def test_an_attribute_of_the_object(run: Run, is_second: bool) -> None:
    if is_second:  # the one that was met first is gone
        run.step(lambda: run.module.Layer().backward(1))
    layer = run.module.Layer()
    layer.backward(1)
    layer.forward = lambda x: x
    assert run.train(lambda: layer.forward(1)) == []  # nothing of the class is at work: it may be out of use
    (reason,) = run.train(lambda: layer.forward(1), lambda: layer.backward(1))
    assert "Layer.forward is left out" in reason and "an attribute of the object" in reason
    assert "step" not in vars(layer) and layer.forward(7) == 7


@pytest.mark.parametrize("is_judged", [False, True])
def test_an_object_that_the_program_drops_is_gone(run: Run, is_judged: bool) -> None:
    layer = run.module.Layer()
    layer.backward(1)
    layer.forward = lambda x, layer=layer: layer
    known = weakref.ref(layer)
    for _ in range(4):
        layer.forward(1)
        if is_judged:
            layer.backward(1)
        run.step()
    assert len(run.namer.reasons) == is_judged
    del layer
    gc.collect()
    assert known() is None


def test_what_has_a_life_of_its_own_is_not_touched(run: Run) -> None:
    """It may be asked for its attributes, or be copied; a partial is only called."""
    run.module.step = mock.Mock(return_value=3)
    run.module.schedule = functools.partial(other, x=4)
    reasons = run.train(lambda: run.module.step(1, 2), lambda: run.module.schedule(None))
    assert run.module.step.call_count == 4
    (reason,) = reasons  # nobody knows whether the Mock came to what it replaced
    assert "schedule is left out" in reason and f"a partial of {__name__}.other" in reason


def test_a_context_of_mocking_gives_ours_back(run: Run) -> None:
    ours = run.module.step
    with mock.patch.object(run.module, "step", other):
        assert len(run.train(lambda: run.module.schedule(run.module.Layer()))) == 1
    assert run.module.step is ours
    run.adapter.entered.clear()
    assert len(run.train(lambda: run.module.schedule(run.module.Layer()))) == 1
    assert "step" in run.adapter.entered


def test_the_function_from_before(run: Run) -> None:
    run.module.step = run.module.step.__wrapped__
    (reason,) = run.train(lambda: run.module.step(run.module.Layer(), 1))
    assert "the function that Prism has wrapped is in its place now" in reason


def test_a_context_of_mocking_in_each_step(run: Run) -> None:
    layer, ours = run.module.Layer(), run.module.Layer.forward
    for number in range(20):
        with mock.patch.object(run.module.Layer, "forward", lambda self, x, number=number: number):
            assert layer.backward(layer.forward(1)) == number - 1
            run.step()
    assert run.module.Layer.forward is ours
    (reason,) = run.namer.reasons
    assert "Layer.forward is left out" in reason


def test_a_module_that_is_loaded_anew_is_wrapped_anew(frame: Any) -> None:
    first, second = Run(frame), Run(frame)
    with first.adapter.activate(first.namer), second.adapter.activate(second.namer):
        importlib.reload(frame)
        assert first.train(lambda: frame.schedule(frame.Layer())) == []
        assert second.train(lambda: frame.schedule(frame.Layer())) == []
        for one in (first, second):
            assert {"schedule", "step", "Layer.forward", "Layer.backward"} == set(one.adapter.entered)
    assert frame.schedule.__code__.co_name == "schedule" and vars(frame.Layer)["forward"].__code__.co_name == "forward"


def test_two_adapters_wrap_the_same(frame: Any) -> None:
    plain = vars(frame.Layer)["forward"]
    first, second = Run(frame), Run(frame)
    with first.adapter.activate(first.namer):
        with second.adapter.activate(second.namer):
            layer = frame.Layer()
            for run in (first, second):
                assert run.train(lambda: layer.forward(1)) == []
                assert "Layer.forward" in run.adapter.entered
            frame.Layer.forward = other
            for run in (first, second):
                run.step()
            for run in (first, second):
                (reason,) = run.train(lambda: layer.forward(1))
                assert f"{__name__}.other" in reason
        assert vars(frame.Layer)["backward"].__wrapped__.__code__.co_name == "backward"
    assert vars(frame.Layer)["forward"] is other
    frame.Layer.forward = plain


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_put_back_also_when_the_program_fails(frame: Any, fails: bool) -> None:
    before = dict(vars(frame.Layer)), dict(vars(frame)), dict(frame.Layer.TABLE)
    run = Run(frame)
    with contextlib.suppress(ZeroDivisionError), run.adapter.activate(run.namer):
        frame.step = other
        run.step()
        assert frame.step is not other  # watched
        if fails:
            raise ZeroDivisionError
    assert frame.step is other
    frame.step = before[1]["step"]
    after = dict(vars(frame.Layer)), dict(vars(frame)), dict(frame.Layer.TABLE)
    assert all(one.get(key) is value for one, kept in zip(after, before, strict=True) for key, value in kept.items())


def test_copies_that_the_package_has_by_name_are_wrapped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: int) -> int:
        return x

    names = ("package", "package.a", "package.b", "packages")
    modules: list[Any] = [types.ModuleType(name) for name in names]
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
        module.function = function
    modules[2].kept = function

    class One(Table):
        def around(self, namer: UnitNamer) -> Sequence[Around]:
            return [Around(AdapterHook("package.a", "function"), before=self.entered.append)]

    adapter = One()
    with adapter.activate(NullNamer()):
        assert [modules[at].function(at) for at in range(4)] == [0, 1, 2, 3] and modules[2].kept(4) == 4
        assert adapter.entered == [0, 1, 2, 4]  # what another package has is its own
    assert all(module.function is function for module in modules) and modules[2].kept is function
