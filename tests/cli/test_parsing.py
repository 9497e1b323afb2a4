"""What users type: every accepted form, and errors that show the offending part."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_sdk.cli.parsing import Target, parse_ranks, parse_size, parse_target
from prism_sdk.errors import ScriptNotFoundError
from prism_sdk.runtime.config import StepRange


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0", (0,)), ("0,5-7", (0, 5, 6, 7)), ("7,1", (1, 7)), (" 1 , 2-3 ", (1, 2, 3)), ("4-4", (4,))],
)
def test_ranks(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing"),
        ("1,,2", "missing"),
        ("a", "'a' is not a rank number"),
        ("0,x-3", "'x' in '0,x-3'"),
        ("5-2", "runs backwards; write 2-5"),
        ("1,1", "rank 1 is named twice"),
        ("0-3,2", "rank 2 is named twice"),
        ("-1", "missing"),
        ("1-", "missing"),
        ("1.5", "not a rank number"),
        ("0-9999999999", "largest possible"),
        ("²", "not a rank number"),
    ],
)
def test_bad_ranks(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        parse_ranks(text)


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=50))
def test_any_set_of_ranks_comes_back(ranks: set[int]) -> None:
    assert parse_ranks(",".join(map(str, ranks))) == tuple(sorted(ranks))


@given(st.text())
def test_any_text_is_ranks_or_a_value_error(text: str) -> None:
    try:
        ranks = parse_ranks(text)
    except ValueError:
        return
    assert list(ranks) == sorted(set(ranks))


@pytest.mark.parametrize(
    ("text", "steps"),
    [("2:10", StepRange(2, 10)), (":10", StepRange(0, 10)), ("2:", StepRange(2)), (":", StepRange())],
)
def test_steps(text: str, steps: StepRange) -> None:
    assert StepRange.parse(text) == steps
    assert StepRange.parse(str(steps)) == steps


@pytest.mark.parametrize("text", ["", "3", "5:5", "6:2", "a:b", "-1:3", "1:2:3"])
def test_bad_steps(text: str) -> None:
    with pytest.raises(ValueError):
        StepRange.parse(text)


def test_a_step_range_holds_its_first_and_not_its_stop() -> None:
    assert [step for step in range(8) if step in StepRange(2, 5)] == [2, 3, 4]
    assert 10**9 in StepRange(2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    package = tmp_path / "lab_under_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_targets(folder: Path) -> None:
    script = Target("train.py", False, ("--lr", "1", "--", "-m"))
    assert parse_target(["train.py", "--lr", "1", "--", "-m"], is_module=False) == script
    module = Target("lab_under_test.train", True, ("-x",))
    assert parse_target(["lab_under_test.train", "-x"], is_module=True) == module
    assert parse_target(["-m", "lab_under_test.train", "-x"], is_module=False) == module


@pytest.mark.parametrize(
    ("words", "is_module", "hint"),
    [
        (["none.py"], False, "path of the training script"),
        (["train"], False, "did you mean train.py"),
        (["python3", "train.py"], False, "leave the interpreter out"),
        (["torchrun", "train.py"], False, "takes the place of torchrun"),
        (["lab_under_test"], False, "this is a folder"),
        (["lab_under_test.train"], False, "write -m lab_under_test.train"),
        (["--wordl-size", "2"], False, "options of Prism come before"),
        (["lab_under_test.none"], True, "must be installed"),
        (["lab_under_test.train.deeper"], True, "must be installed"),
        (["train.py"], True, "leave out -m"),
        (["a b"], True, "must be installed"),
    ],
)
def test_missing_targets_say_what_to_do(folder: Path, words: list[str], is_module: bool, hint: str) -> None:
    with pytest.raises(ScriptNotFoundError) as caught:
        parse_target(words, is_module=is_module)
    assert hint in str(caught.value)
    assert caught.value.script == words[0]


@pytest.mark.parametrize("words", [[], ["-m"]])
def test_nothing_to_run(words: list[str]) -> None:
    with pytest.raises(click.UsageError, match="which"):
        parse_target(words, is_module=False)


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 << 30), ("1.5 gb", 1_500_000_000), ("512MiB", 512 << 20), ("0", 0), ("7B", 7)]
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80 gigabytes", "-1", "1e9", "80GiBs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)
