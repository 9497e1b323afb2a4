"""The error tree: messages that help, data that survives pickling, exit codes."""

from __future__ import annotations

import inspect
import pickle
import signal

import pytest

from prism_sdk import errors

SAMPLES = [
    errors.PrismError("broken", hint="mend it"),
    errors.UsageError("no"),
    errors.ScriptNotFoundError("train.py", hint="give the path"),
    errors.SettingsError("PRISM_DEBUG", value="maybe", expected="0 or 1"),
    errors.WorldSizeError("3 ranks asked for", world_size=3, required=4, file="x.prism"),
    errors.PortInUseError("127.0.0.1", port=29500),
    errors.UnknownNameError("slice", kind="strategy", known=["slices", "fastest"]),
    errors.PluginError("cannot", plugin="p"),
    errors.BeyondRecordingError(
        0, step=9, repeated_step=3, last_step=4, num_repeated=2, unit_index=7, expected="a", found="b", file="t.prism"
    ),
    errors.BrokenPluginError("p", reason="ImportError: no", distribution="d"),
    errors.DuplicateNameError("slices", kind="strategy", distributions=["a", "b"], plugin="p"),
    errors.UnsupportedError("allreduce_sparse", rank=3),
    errors.RunError("stopped", rank=1, file="x.prism"),
    errors.RankFailedError(2, exit_code=1, traceback_text="Traceback ...\nValueError: lr", file="x.prism"),
    errors.RankKilledError(2, signal_number=signal.SIGKILL),
    errors.DeadlockError([errors.RankPlace(0, "all_reduce", "dp", seq=7, missing=(1,), stack=("train.py:3",))]),
    errors.CollectiveMismatchError("dp", seq=7, field="dtype", values={1: "float16", 0: "float32"}),
    errors.AsymmetryError(5, representative=1, what="all_reduce of step 0: num_elements_in is 5, not 1"),
    errors.TraceMismatchError(0, unit_index=5, expected="all_reduce", found="barrier", file="x.prism"),
    errors.OutputError("x.prism", reason="no space left on device"),
    errors.OutputExistsError("x.prism"),
    errors.CalibrationError("no step", strategy="slices"),
    errors.UnreadableError("x.prism", reason="no such file"),
    errors.UnknownFormatError("no importer recognises x.bin", file="x.bin", known=("kineto",), hint="to install: ..."),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_everything_it_knows(error: errors.PrismError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)


def test_every_error_has_a_sample_is_exported_and_is_drawn() -> None:
    classes = {
        name: cls
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.PrismError) and cls.__module__ == errors.__name__
    }
    assert {type(sample).__name__ for sample in SAMPLES} == set(classes)
    assert errors.__doc__ is not None
    for name in classes:
        assert name in errors.__all__
        assert name in errors.__doc__, f"{name} is missing in the tree"
    assert errors.__all__ == sorted(errors.__all__)


def test_exit_codes() -> None:
    assert [int(code) for code in errors.ExitCode] == [0, 1, 2, 3, 130]
    assert errors.ScriptNotFoundError("x").exit_code == 2
    assert errors.BrokenPluginError("x", reason="y").exit_code == 2
    assert errors.RankFailedError(0, exit_code=7).exit_code == 1
    assert errors.OutputError("x", reason="y").exit_code == 1
    assert errors.OutputExistsError("x").exit_code == 2
    assert errors.UnreadableError("x", reason="y").exit_code == 3


def test_a_killed_rank_names_the_signal_and_the_likely_cause() -> None:
    error = errors.RankKilledError(3, signal_number=signal.SIGKILL)
    assert "rank 3" in str(error) and "SIGKILL" in str(error) and "memory" in str(error)
    assert "memory" not in str(errors.RankKilledError(3, signal_number=signal.SIGSEGV))


def test_a_deadlock_shows_every_place() -> None:
    text = next(str(error) for error in SAMPLES if isinstance(error, errors.DeadlockError))
    for part in ("rank 0", "all_reduce", "group dp", "seq 7", "missing ranks 1", "train.py:3"):
        assert part in text
