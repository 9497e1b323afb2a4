"""What ships in the box registers through the same hooks as a stranger's plugin, and keeps the same contracts."""

from __future__ import annotations

from prism_sdk.abc import CalibrationStrategy, ReplayBackend
from prism_sdk.builtin.gloo import GlooBackend
from prism_sdk.builtin.local import LocalBackend
from prism_sdk.builtin.nccl import NcclBackend
from prism_sdk.builtin.slices import Slices
from prism_sdk.plugins import PluginManager
from prism_sdk.settings import Settings
from prism_sdk.testing import CalibrationStrategyContract, ReplayBackendContract


def test_the_box_is_not_empty_and_not_broken() -> None:
    manager = PluginManager(Settings(), installed=False)
    assert [(record.name, record.status, record.origin) for record in manager.records()] == [
        ("slices", "ok", "built-in"),
        ("local", "ok", "built-in"),
        ("gloo", "ok", "built-in"),
        ("nccl", "ok", "built-in"),
        ("primus", "ok", "built-in"),
    ]
    assert isinstance(manager.strategy("slices"), Slices)
    assert isinstance(manager.backend("local"), LocalBackend)


def test_what_is_built_in_can_be_disabled() -> None:
    manager = PluginManager(Settings(disable_plugins=("local",)), installed=False)
    assert "local" not in manager.backends()


class TestSlices(CalibrationStrategyContract):
    def make_strategy(self) -> CalibrationStrategy:
        return Slices()


class TestLocal(ReplayBackendContract):
    def make_backend(self) -> ReplayBackend:
        return LocalBackend()


class TestGloo(ReplayBackendContract):
    def make_backend(self) -> ReplayBackend:
        return GlooBackend()


class TestNccl(ReplayBackendContract):
    def make_backend(self) -> ReplayBackend:
        return NcclBackend()
