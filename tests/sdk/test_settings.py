"""Settings: parsing, precedence, and the rule that this is the one module that reads the environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prism_sdk.settings
from prism_sdk.errors import SettingsError
from prism_sdk.settings import Settings


def test_nothing_set_is_all_absent() -> None:
    assert Settings.from_environ({}) == Settings()


def test_everything_set() -> None:
    environ = {
        "PRISM_LOAD_PLUGINS": "a, b,",
        "PRISM_DISABLE_PLUGINS": "c",
        "PRISM_TRACE_HOOKS": "1",
        "PRISM_DEBUG": "yes",
        "PRISM_MODE": "observe",
        "PRISM_OUTPUT": "x.prism",
        "PRISM_STEPS": "2:4",
        "RANK": "3",
        "WORLD_SIZE": "8",
    }
    settings = Settings.from_environ(environ)
    assert settings == Settings(
        load_plugins=("a", "b"),
        disable_plugins=("c",),
        trace_hooks=True,
        debug=True,
        mode="observe",
        output=Path("x.prism"),
        steps="2:4",
        rank=3,
        world_size=8,
    )
    assert Settings.from_environ(settings.to_environ()) == settings


def test_an_empty_list_of_plugins_is_not_an_absent_one() -> None:
    assert Settings.from_environ({"PRISM_LOAD_PLUGINS": ""}).load_plugins == ()


def test_rank_precedence() -> None:
    assert Settings.from_environ({"PRISM_RANK": "1", "RANK": "2", "SLURM_PROCID": "3"}).rank == 1
    assert Settings.from_environ({"RANK": "2", "SLURM_PROCID": "3"}).rank == 2
    assert Settings.from_environ({"SLURM_PROCID": "3"}).rank == 3


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PRISM_MODE", "watch"), ("PRISM_TRACE_HOOKS", "2"), ("PRISM_RANK", "-1"), ("WORLD_SIZE", "0"), ("RANK", "x")],
)
def test_a_bad_value_is_named(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=variable) as caught:
        Settings.from_environ({variable: value})
    assert (caught.value.variable, caught.value.value) == (variable, value)


@given(st.dictionaries(st.sampled_from(["PRISM_MODE", "PRISM_DEBUG", "RANK", "PRISM_LOAD_PLUGINS"]), st.text()))
def test_any_text_parses_or_is_a_settings_error(environ: dict[str, str]) -> None:
    try:
        Settings.from_environ(environ)
    except SettingsError as error:
        assert error.variable in environ


def test_every_variable_is_in_the_table() -> None:
    assert prism_sdk.settings.__doc__ is not None
    source = Path(prism_sdk.settings.__file__).read_text()
    for variable in set(re.findall(r'"(PRISM_[A-Z_]+)"', source)):
        assert f"\n{variable}" in prism_sdk.settings.__doc__
