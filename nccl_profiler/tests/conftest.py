"""Builds of the library and of the program that plays NCCL, made once, and runs of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from host_runs import Build, Played, make_build, run_host


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Build]:
    done: dict[str, Build] = {}

    def make(kind: str) -> Build:
        if kind not in done:
            done[kind] = make_build(kind, tmp_path_factory.mktemp(kind))
        return done[kind]

    return make


@pytest.fixture
def play(build: Callable[[str], Build], tmp_path: Path) -> Callable[..., Played]:
    def run(
        version: int, scenario: str, num: int, *more: object, kind: str = "plain",
        environ: Mapping[str, str] | None = None,
    ) -> Played:  # fmt: skip
        return run_host(build(kind), tmp_path, version, scenario, num, *more, environ=environ)

    return run
