"""The plugin manager: isolation of what is broken, errors where the user named it, and nothing global."""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from prism_sdk import hookimpl
from prism_sdk.abc import CalibrationContext, CalibrationResult, CalibrationStrategy
from prism_sdk.errors import BrokenPluginError, DuplicateNameError, UnknownNameError
from prism_sdk.plugins import PluginManager, PluginRecord
from prism_sdk.runtime.config import LaunchConfig, LaunchMode, LaunchResult
from prism_sdk.settings import Settings
from prism_sdk.testing import isolated_manager

GOOD = """
    from prism_sdk import hookimpl
    from prism_sdk.abc import CalibrationStrategy

    class Strategy(CalibrationStrategy):
        name = "NAME"
        description = "a strategy"

        def calibrate(self, context):
            raise NotImplementedError

    @hookimpl
    def prism_register_strategies():
        return [Strategy()]
"""

BROKEN = {
    "raises at import": ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
    "exits at import": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "syntax error": ("def broken(:\n    pass", "SyntaxError"),
    "missing dependency": ("import not_there_at_all", "ModuleNotFoundError"),
    "wrong hook argument": (
        "from prism_sdk import hookimpl\n@hookimpl\ndef prism_observe_run_start(configuration): pass",
        "configuration",
    ),
    "misspelt hook": (
        "from prism_sdk import hookimpl\n@hookimpl\ndef prism_register_strategy(): return []",
        "prism_register_strategy",
    ),
    "no marker": ("def prism_register_strategies(): return []", "not marked with @prism_sdk.hookimpl"),
    "hook raises": (
        "from prism_sdk import hookimpl\n@hookimpl\ndef prism_register_backends(): raise OSError('no device')",
        "OSError: no device",
    ),
    "not a list": (
        "from prism_sdk import hookimpl\n@hookimpl\ndef prism_register_backends(): return 'local'",
        "must return a list of ReplayBackend",
    ),
    "wrong class": (
        "from prism_sdk import hookimpl\n@hookimpl\ndef prism_register_backends(): return [object()]",
        "must return ReplayBackend objects",
    ),
    "the same name twice": (
        textwrap.dedent(GOOD).replace("NAME", "twice").replace("[Strategy()]", "[Strategy(), Strategy()]"),
        "'twice' twice",
    ),
}

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with one entry point on the path, as pip would."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, source: str, *, distribution: str | None = None) -> None:
        module = f"plugin_under_test_{name.replace('-', '_')}"
        monkeypatch.delitem(sys.modules, module, raising=False)
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        distribution = distribution or f"dist-{name}"
        info = tmp_path / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[prism_sdk.plugins]\n{name} = {module}\n")

    return put


def record(manager: PluginManager, name: str) -> PluginRecord:
    return next(record for record in manager.records() if record.name == name)


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_one_line_and_disturbs_no_other(install: Install, source: str, reason: str) -> None:
    install("bad", source)
    install("good", GOOD.replace("NAME", "fine"))
    manager = PluginManager(Settings())
    bad, good = record(manager, "bad"), record(manager, "good")
    assert bad.status == "broken" and bad.reason is not None and reason in bad.reason and "\n" not in bad.reason
    assert (bad.distribution, bad.version, bad.origin) == ("dist-bad", "1.2", "installed")
    assert (good.status, good.reason, good.strategies) == ("ok", None, ("fine",))
    assert manager.strategy("fine").name == "fine"
    manager.check_named()


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_an_error_when_named(tmp_path: Path, install: Install, source: str, reason: str) -> None:
    install("bad", source)
    for manager in (
        PluginManager(Settings(), named=["bad"]),
        PluginManager(Settings(load_plugins=("bad",))),
        PluginManager(Settings(), named=[str(tmp_path / "plugin_under_test_bad.py")], installed=False),
        PluginManager(Settings(), named=["plugin_under_test_bad"], installed=False),
    ):
        with pytest.raises(BrokenPluginError) as caught:
            manager.check_named()
        assert reason in str(caught.value) and reason in caught.value.reason
    with pytest.raises(BrokenPluginError, match="the strategy 'bad' cannot be used"):
        PluginManager(Settings()).strategy("bad")


def test_two_distributions_with_one_name_are_both_named(install: Install) -> None:
    install("one", GOOD.replace("NAME", "mine"))
    install("two", GOOD.replace("NAME", "mine"))
    manager = PluginManager(Settings())
    with pytest.raises(DuplicateNameError) as caught:
        manager.strategy("mine")
    assert "dist-one" in str(caught.value) and "dist-two" in str(caught.value)
    assert [error.name for error in manager.duplicates()] == ["mine"]
    assert "mine" in manager.strategies()
    only = PluginManager(Settings(disable_plugins=("two",)))
    assert only.strategy("mine").name == "mine"
    assert record(only, "two").status == "disabled"


def test_two_plugins_of_one_name(install: Install) -> None:
    install("same", GOOD.replace("NAME", "a"), distribution="first")
    install("same", GOOD.replace("NAME", "b"), distribution="second")
    found = [record for record in PluginManager(Settings()).records() if record.name == "same"]
    assert [one.status for one in found] == ["ok", "broken"]
    assert found[1].reason is not None and "first" in found[1].reason


def test_load_and_disable(install: Install) -> None:
    install("one", GOOD.replace("NAME", "a"))
    install("two", GOOD.replace("NAME", "b"))
    assert {"a", "b"} <= set(PluginManager(Settings()).strategies())
    only = PluginManager(Settings(load_plugins=("one",)), builtin=False)
    assert list(only.strategies()) == ["a"]
    assert record(only, "two").reason == "not in PRISM_LOAD_PLUGINS"
    by_distribution = PluginManager(Settings(disable_plugins=("dist-one",)), builtin=False)
    found = set(by_distribution.strategies())  # other plugins may be installed beside these
    assert "b" in found and "a" not in found
    with pytest.raises(UnknownNameError, match="three"):
        PluginManager(Settings(load_plugins=("three",))).check_named()
    named_wins = PluginManager(Settings(load_plugins=("one",)), named=["two"], builtin=False)
    assert set(named_wins.strategies()) == {"a", "b"}


def test_a_module_or_a_file_can_be_named(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_plugin_file.py"
    file.write_text(textwrap.dedent(GOOD).replace("NAME", "mine"))
    by_path = PluginManager(Settings(), named=[str(file)], installed=False)
    by_path.check_named()
    assert by_path.strategy("mine").name == "mine"
    assert (by_path.records()[-1].origin, by_path.records()[-1].name) == ("named", "my_plugin_file")
    monkeypatch.chdir(tmp_path)
    by_module = PluginManager(Settings(), named=["my_plugin_file"], installed=False)
    by_module.check_named()
    assert by_module.strategy("mine").name == "mine"
    missing = PluginManager(Settings(), named=[str(tmp_path / "none.py")])
    with pytest.raises(BrokenPluginError, match="there is no file"):
        missing.check_named()


def test_an_unknown_name_lists_what_is_known_and_what_did_not_load(install: Install) -> None:
    install("bad", "raise RuntimeError('no licence')")
    install("good", GOOD.replace("NAME", "fine"))
    with pytest.raises(UnknownNameError) as caught:
        PluginManager(Settings()).strategy("fien")
    text = str(caught.value)
    assert "'fien'" in text and "fine" in text and "no licence" in text
    assert "fine" in caught.value.known


class _Object(CalibrationStrategy):
    name = "object"
    description = "registered from memory"

    def calibrate(self, context: CalibrationContext) -> CalibrationResult:
        raise NotImplementedError


class _Follower:
    """A plugin object that follows runs."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    @hookimpl
    def prism_observe_run_start(self, config: LaunchConfig) -> None:
        self.seen.append(config)

    @hookimpl
    def prism_observe_run_end(self, config: LaunchConfig, result: LaunchResult) -> None:
        self.seen.append((config, result))
        raise RuntimeError("the disk of the dashboard is full")

    @hookimpl
    def prism_register_strategies(self) -> list[CalibrationStrategy]:
        return [_Object()]


def test_a_run_is_followed_and_a_failing_follower_costs_one_warning() -> None:
    lines: list[str] = []
    follower = _Follower()
    quiet = ModuleType("quiet_plugin")
    manager = isolated_manager(follower, quiet, report=lines.append)
    config = LaunchConfig(mode=LaunchMode.OBSERVE, target="train.py", output=Path("x.prism"))
    result = LaunchResult(exit_code=0, output=None, world_size=1, wall_ns=1)
    manager.notify_run_start(config)
    manager.notify_run_end(config, result=result)
    assert follower.seen == [config, (config, result)]
    assert len(lines) == 1 and "the disk of the dashboard is full" in lines[0] and "prism_observe_run_end" in lines[0]


def test_hook_calls_are_traced_when_asked() -> None:
    lines: list[str] = []
    manager = isolated_manager(_Follower(), settings=Settings(trace_hooks=True), report=lines.append)
    assert list(manager.strategies()) == ["object"]
    assert any("prism_register_strategies" in line and "_Follower-0" in line for line in lines)
    assert any("returned" in line for line in lines)


def test_managers_share_nothing() -> None:
    one, other = isolated_manager(_Follower()), isolated_manager()
    assert list(one.strategies()) == ["object"]
    assert list(other.strategies()) == []


def test_broken_metadata_of_one_distribution_hides_no_other(install: Install, tmp_path: Path) -> None:
    install("good", GOOD.replace("NAME", "fine"))
    info = tmp_path / "mangled-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_bytes(b"Name: mangled\n\xff\xfe")
    (info / "entry_points.txt").write_text("[prism_sdk.plugins]\n= = =\n[[\n")
    assert "fine" in PluginManager(Settings()).strategies()


def test_only_the_metadata_of_plugins_are_parsed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank of a slice looks for plugins; metadata of some hundred distributions would take it 0.15 s."""
    install("good", GOOD.replace("NAME", "fine"))
    parsed: list[object] = []
    parse = importlib.metadata.Distribution.metadata.fget
    assert parse is not None

    def read(distribution: importlib.metadata.Distribution) -> object:
        parsed.append(distribution)
        return parse(distribution)

    monkeypatch.setattr(importlib.metadata.Distribution, "metadata", property(read))
    manager = PluginManager(Settings())
    brought = [one for one in manager.records() if one.origin == "installed"]
    assert "fine" in manager.strategies() and parsed
    assert {one.metadata["Name"] for one in list(parsed)} == {one.distribution for one in brought}
