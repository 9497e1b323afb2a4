"""Which imports of a program are made ahead when it runs again, and which are left to its ranks."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from prism_sdk.runtime import imports as subject
from prism_sdk.runtime.imports import made_ahead, settings_of, slow_imports

COMPILER = "torch._inductor.compile_fx"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, COMPILER, types.ModuleType(COMPILER))


@pytest.mark.usefixtures("loaded")
def test_what_is_loaded_at_the_end_counts() -> None:
    assert slow_imports({}, {}) == (COMPILER,)


def test_what_is_not_loaded_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)
    assert slow_imports({}, {}) == ()


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("name", ["TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_LOGS", "TRITON_DEBUG"])
def test_not_where_the_program_has_set_what_such_an_import_reads(name: str) -> None:
    before = settings_of({"HOME": "/"})
    assert slow_imports(before, settings_of({"HOME": "/", name: "1"})) == ()


@pytest.mark.usefixtures("loaded")
def test_what_the_compiler_itself_sets_does_no_harm() -> None:
    now = {"TORCHINDUCTOR_CACHE_DIR": "/x", "TRITON_CACHE_DIR": "/y", "HOME": "/z"}
    assert slow_imports(settings_of({}), settings_of(now)) == (COMPILER,)


def test_only_modules_that_we_know_are_imported_for_a_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subject, "_GPUS", (tmp_path / "gpu",))
    assert made_ahead({"rank.0.imports": "antigravity", "rank.3.imports": f"this,{COMPILER}"}) == (COMPILER,)
    assert made_ahead({"rank.0.adapters": COMPILER}) == ()
    (tmp_path / "gpu").touch()
    assert made_ahead({"rank.0.imports": COMPILER}) == ()
