"""What every strategy, backend and adapter must hold to, as pytest classes to subclass.

They test the contract of ``prism_sdk.abc`` only; how good the times of a plugin are is its own tests' matter.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import prismtrace
from prism_sdk.abc import AdapterHook, CalibrationResult, CalibrationStrategy, FrameworkAdapter, ReplayBackend
from prism_sdk.adapting.patching import PatchingAdapter, version_in_bounds, version_of
from prism_sdk.adapting.places import MISSING, around_function, find_hook
from prism_sdk.testing.scripted import ScriptedCalibration, ScriptedReplay

__all__ = ["CalibrationStrategyContract", "FrameworkAdapterContract", "NullNamer", "ReplayBackendContract"]


def _check_names(plugin: Any) -> None:
    assert isinstance(plugin.name, str) and plugin.name, "name: what the user types"
    assert plugin.name == plugin.name.strip() and not any(character.isspace() for character in plugin.name)
    assert isinstance(plugin.description, str) and plugin.description, "description: one line for `prism plugins`"
    assert "\n" not in plugin.description


@dataclass(frozen=True)
class Calibrated:
    """A finished calibration: its context, the bytes of the bare graph before it, and its result."""

    context: ScriptedCalibration
    bare: bytes
    result: CalibrationResult


class CalibrationStrategyContract:
    """Subclass as ``Test...`` and give ``make_strategy``."""

    _calibrated: ClassVar[Calibrated]

    def make_strategy(self) -> CalibrationStrategy:
        """A new strategy object."""
        raise NotImplementedError

    def test_it_has_a_name_and_a_description(self) -> None:
        _check_names(self.make_strategy())

    @pytest.fixture
    def calibrated(self, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
        """One calibration of an invented job of five ranks on two slots, made once for all tests of the class."""
        cls = type(self)
        done: Calibrated | None = cls.__dict__.get("_calibrated")
        if done is None:
            context = ScriptedCalibration(tmp_path_factory.mktemp("calibrated"), world_size=5, num_slots=2)
            bare = context.graph_path.read_bytes()
            done = Calibrated(context, bare=bare, result=self.make_strategy().calibrate(context))
            cls._calibrated = done
        return done

    def test_it_writes_a_calibrated_graph_of_all_ranks(self, calibrated: Calibrated) -> None:
        context, result = calibrated.context, calibrated.result
        assert result.output == context.output
        with prismtrace.TraceReader(result.output) as reader, prismtrace.TraceReader(context.graph_path) as bare:
            assert reader.graph_kind is prismtrace.GraphKind.CALIBRATED
            assert reader.world_size == 5
            assert tuple(reader.ranks) == (0, 1, 2, 3, 4)
            assert [reader.num_units(rank) for rank in range(5)] == [bare.num_units(rank) for rank in range(5)]

    def test_its_result_is_consistent(self, calibrated: Calibrated) -> None:
        result = calibrated.result
        assert result.step_low_ns <= result.predicted_step_ns <= result.step_high_ns
        assert result.predicted_step_ns > 0
        assert [one.index for one in result.passes] == list(range(len(result.passes))) and result.passes
        assert result.passes[0].change_percent is None
        assert all(one.step_low_ns <= one.predicted_step_ns <= one.step_high_ns for one in result.passes)

    def test_it_leaves_the_bare_graph_as_it_was(self, calibrated: Calibrated) -> None:
        assert calibrated.context.graph_path.read_bytes() == calibrated.bare

    def test_it_runs_every_rank(self, calibrated: Calibrated) -> None:
        assert {rank for ranks, _ in calibrated.context.slices for rank in ranks} == set(range(5))


class ReplayBackendContract:
    """Subclass as ``Test...`` and give ``make_backend``."""

    def make_backend(self) -> ReplayBackend:
        """A new backend object."""
        raise NotImplementedError

    def test_it_has_a_name_and_a_description(self) -> None:
        _check_names(self.make_backend())

    def test_it_holds_until_the_deadline(self, tmp_path: Path) -> None:
        with self.make_backend().open(ScriptedReplay.create(tmp_path)) as session:
            for wait_ns in (0, 50_000, 2_000_000):
                deadline_ns = time.monotonic_ns() + wait_ns
                lateness_ns = session.hold_until(deadline_ns)
                assert time.monotonic_ns() >= deadline_ns
                assert lateness_ns >= 0

    def test_a_past_deadline_returns_at_once_and_says_how_late(self, tmp_path: Path) -> None:
        with self.make_backend().open(ScriptedReplay.create(tmp_path)) as session:
            took_ns = []
            for _ in range(3):  # the machine may be busy
                begin_ns = time.monotonic_ns()
                assert session.hold_until(begin_ns - 1_000_000_000) >= 1_000_000_000
                took_ns.append(time.monotonic_ns() - begin_ns)
            assert min(took_ns) < 500_000_000

    def test_it_closes_twice(self, tmp_path: Path) -> None:
        session = self.make_backend().open(ScriptedReplay.create(tmp_path))
        session.close()
        session.close()


class NullNamer:
    """A namer that forgets everything but what it was told about fidelity."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        """``options``: what a user would have asked of adapters."""
        self._options = options or {}
        self.reasons: list[str] = []
        """Why names are not complete; each once."""
        self._at_step_ends: list[Callable[[], None]] = []

    def enter(
        self,
        phase: str | None = None,
        *,
        microbatch: int | None = None,
        stage: int | None = None,
        model_chunk: int | None = None,
        label: str | None = None,
        part: str | None = None,
        layer: str | None = None,
        schedule: str | None = None,
    ) -> int:
        """Nothing."""
        return 0

    def leave(self, token: int | None = None) -> None:
        """Nothing."""

    def ends_later(self, token: int) -> None:
        """Nothing."""

    def assume(self, *, microbatch: int | None = None, stage: int | None = None, layer: str | None = None) -> None:
        """Nothing."""

    def next_units(self, names: Sequence[Mapping[str, int | str]]) -> None:
        """Nothing."""

    def note(self, column: str, value: Sequence[int] | Callable[[], Sequence[int]]) -> None:
        """Nothing."""

    @property
    def is_scheduled(self) -> bool:
        """False."""
        return False

    @property
    def num_optimizer_steps(self) -> int:
        """None."""
        return 0

    @property
    def num_backward_passes(self) -> int:
        """None."""
        return 0

    def part_of_group(self, group: str, *, part: str, phase: str) -> None:
        """Nothing."""

    def purposes(self, purposes: Mapping[str, str]) -> None:
        """Nothing."""

    def coordinates(self, coordinates: Mapping[str, int]) -> None:
        """Nothing."""

    def watch(self, *, step_ends: Callable[[], None], group_begins: Callable[[], None]) -> None:
        """Keep what `end_step` calls."""
        self._at_step_ends.append(step_ends)

    def end_step(self) -> None:
        """Call what an adapter wants to be called where a step ends."""
        for call in self._at_step_ends:
            call()

    def option(self, name: str) -> str | None:
        """What was asked of adapters."""
        return self._options.get(name)

    def is_given(self, option: str) -> bool:
        """Whether it was asked."""
        return option in self._options

    def lower(self, reason: str) -> None:
        """Keep the reason."""
        if reason not in self.reasons:
            self.reasons.append(reason)


class FrameworkAdapterContract:
    """Subclass as ``Test...`` and give ``make_adapter``. The framework must be installed."""

    def make_adapter(self) -> FrameworkAdapter:
        """A new adapter object."""
        raise NotImplementedError

    def test_it_has_a_name_and_a_description(self) -> None:
        _check_names(self.make_adapter())

    def test_its_hooks_exist(self) -> None:
        """Those that this version of the framework must have; the framework must be installed."""
        hooks = self.make_adapter().hooks()
        assert hooks
        for hook in hooks:
            if hook.required and self._is_expected(hook):
                assert callable(_find(hook)), f"{hook.module}.{hook.attribute} does not exist"

    def test_what_it_wraps_is_declared(self) -> None:
        """What is not among the hooks is not looked at by tests of versions."""
        adapter = self.make_adapter()
        if not isinstance(adapter, PatchingAdapter):
            pytest.skip("an adapter that wraps by itself has no table of what it wraps")
        around = adapter.around(NullNamer())
        undeclared = [one.hook.attribute for one in around if one.hook not in adapter.hooks()]
        assert not undeclared, f"not in hooks(): {undeclared}"
        idle = [one.hook.attribute for one in around if one.before is None and one.after is None]
        assert not idle, f"neither before nor after: {idle}"

    def test_it_restores_what_it_wraps(self) -> None:
        adapter = self.make_adapter()
        hooks = [hook for hook in adapter.hooks() if self._is_expected(hook) and _exists(hook)]
        before = [_find(hook) for hook in hooks]
        namer = NullNamer()
        with adapter.activate(namer):
            changed = [_find(hook) is not own for hook, own in zip(hooks, before, strict=True)]
        after = [_find(hook) for hook in hooks]
        assert any(changed), "it wrapped nothing"
        assert all(one is other for one, other in zip(before, after, strict=True))
        assert not namer.reasons
        with contextlib.suppress(_ProgramError), adapter.activate(namer):
            raise _ProgramError
        after = [_find(hook) for hook in hooks]
        assert all(one is other for one, other in zip(before, after, strict=True)), "a program that fails leaves hooks"

    def test_a_hook_that_is_replaced_is_reported(self) -> None:
        """Names are lost where another function stands in the place of a wrapped one: the fidelity must say so."""
        adapter = self.make_adapter()
        if not isinstance(adapter, PatchingAdapter):
            pytest.skip("an adapter that wraps by itself has to find this out by itself")
        for hook in adapter.hooks():
            if self._is_expected(hook) and _exists(hook):
                _check_replacing(adapter, hook)

    def test_it_imports_no_framework_by_itself(self) -> None:
        """Hooks are declared, and wrapped only once the program has imported their modules."""
        cls = type(self.make_adapter())
        modules = sorted({hook.module for hook in self.make_adapter().hooks()})
        code = (
            "import sys\n"
            "from prism_sdk.testing.contracts import NullNamer\n"
            "before = set(sys.modules)\n"
            f"from {cls.__module__} import {cls.__qualname__} as Adapter\n"
            "adapter = Adapter()\n"
            "adapter.hooks()\n"
            "with adapter.activate(NullNamer()):\n"
            f"    loaded = [name for name in {modules!r} if name in sys.modules and name not in before]\n"
            "assert not loaded, loaded\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def _is_expected(self, hook: AdapterHook) -> bool:
        distribution = getattr(self.make_adapter(), "distribution", None)
        if distribution is None:
            return True
        with contextlib.suppress(ImportError):  # one that no distribution brought says its version itself
            importlib.import_module(hook.module)
        return version_in_bounds(version_of(distribution), hook)


def _check_replacing(adapter: FrameworkAdapter, hook: AdapterHook) -> None:
    """Put another function in the place of a hook, if the adapter wraps it, and call it in a step."""
    place = find_hook(hook)
    assert place is not None
    own, before = place.own(), place.get()
    namer = NullNamer({} if hook.option is None else {hook.option: "1"})
    with adapter.activate(namer):
        ours = place.get()
        if ours is before:
            return
        namer.reasons.clear()  # of other hooks that are absent: test_its_hooks_exist says that
        place.put(around_function(ours, lambda _: lambda *_, **__: None))
        namer.end_step()
        assert not namer.reasons, f"{hook.attribute} is said to be replaced by what nobody has called"
        other = place.get()
        getattr(other, "__func__", other)()
        namer.end_step()
        namer.end_step()
    place.put(own)
    assert len(namer.reasons) == 1 and hook.attribute in namer.reasons[0], f"{hook.attribute}: {namer.reasons}"


class _ProgramError(Exception):
    """Ends a program in the middle."""


def _exists(hook: AdapterHook) -> bool:
    try:
        _find(hook)
    except (ImportError, AttributeError, KeyError):
        return False
    return True


def _find(hook: AdapterHook) -> Any:
    importlib.import_module(hook.module)
    found = find_hook(hook)
    if found is None:
        raise AttributeError(f"{hook.module} has no {hook.attribute}")
    value = found.get()
    return getattr(found.owner, found.key) if value is MISSING else value
