"""Rules that hold for all commands alike: empty selections, names of outputs, exit codes, Ctrl-C."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import prismtrace
from prism_sdk.cli.main import cli, run
from prism_sdk.testing.scripted import write_trace
from prismtrace import GraphKind
from prismtrace.errors import already_exists


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "job.prism"
    return write_trace(
        path, kind=GraphKind.OBSERVED, world_size=4, ranks=list(range(4)), num_steps=3, step_ns=2_000_000
    )


@pytest.mark.parametrize(
    "command",
    ["analyze", "cat", "cat --json --rank 1", "cat --table steps", "report -o OUT", "simulate", "slice -o OUT",
     "slice --ranks 1 -o OUT", "sweep --variant=--no-gaps"],
)  # fmt: skip
def test_a_selection_that_holds_nothing_is_wrong_usage(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command.split()]
    assert run([*words, str(trace), "--steps", "90:95"]) == 2
    shown = capsys.readouterr()
    assert "steps 90:95" in shown.err and not shown.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("window", [":-1", "5s:"])
def test_a_time_window_beside_the_trace_holds_nothing(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], window: str
) -> None:
    assert run(["slice", str(trace), "-o", str(tmp_path / "part.prism"), f"--time={window}"]) == 2
    assert "has nothing in the time" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_times_from_the_start_of_a_trace_are_not_negative(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["slice", str(trace), "-o", str(tmp_path / "x"), "--time=-5ms:2ms"]) == 2
    assert "'-5ms' in '-5ms:2ms' is before the trace" in capsys.readouterr().err


def test_tables_without_steps_refuse_steps(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cat", str(trace), "--table", "events", "--steps", "1"]) == 2
    assert "events have no steps" in capsys.readouterr().err
    assert run(["cat", str(trace), "--table", "events"]) == 0, "a table may be empty"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it says no change"),
        ("x=", "it says no change"),
        ("{}", "it says no change"),
        ("x", "unexpected extra argument (x)"),
        ("--equal rank=99", "no unit of"),
        ("--equal all:but:rank=99", "no unit of"),
        ("--slow rank=99:2@1s-2s", "no rank of"),
        ("--straggle normal:0.1:rank=99", "no rank of"),
        ("--straggle normal:0.1:per=unit:rank=99", "no unit of"),
        ("--remove op=all_to_all", "no unit of"),
        ("--remove label=x", "labels do not say"),
    ],
)
def test_a_variant_that_changes_nothing_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert run(["sweep", str(trace), "--variant", text]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("simulate --transfers missing", "--transfers says"),
        ("simulate --no-link-sharing", "--link-sharing needs"),
        ("simulate --dp-groups dp", "--dp-groups says"),
        ("simulate --moe-seed 3", "--moe-seed says"),
        ("simulate --moe-skew nan", "nan is not a number"),
        ("analyze --max-gap-us nan", "nan is not a number"),
        ("compare FILE --max-error nan", "nan is not a number"),
        ("cat --columns ,", "names no column"),
        ("analyze --by phase --by kind", "'--by': it is given 2 times"),
        ("cat --rank 0 --step 1 --ranks 1", "'--rank' / '--ranks': it is given 2 times"),
        ("simulate --steps 0:1 --steps 1:2 --steps 2:3", "'--steps': it is given 3 times"),
        ("diff FILE --ignore times --ignore memory", "'--ignore': it is given 2 times"),
        ("convert -o out.prism -O steps=1 -O steps=2", "'--option': 'steps' is given 2 times"),
    ],
)
def test_an_option_without_an_effect_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    words = [str(trace) if word == "FILE" else word for word in command.split()]
    assert run([*words, str(trace)]) == 2
    assert message in capsys.readouterr().err


WRITERS = ("slice --ranks 0", "compact", "merge", "redact", "recover", "report", "simulate", "expand --dp 2")


@pytest.mark.parametrize("command", WRITERS)
def test_errors_of_writers_name_the_file_that_was_asked_for(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    output = tmp_path / ("y" * 250)  # a possible name, whose temporary neighbour is too long
    assert run([*command.split(), str(trace), "-o", str(output)]) == 1
    text = capsys.readouterr().err
    assert "File name too long" in text and f"{output}: " in text and ".tmp" not in text
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_appears_after_the_check_is_wrong_usage_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(**_: object) -> None:
        raise already_exists("out.prism")

    monkeypatch.setattr(cli, "main", late)
    assert run([]) == 2
    assert "out.prism: exists already" in capsys.readouterr().err


def test_what_does_not_exist_is_not_called_invalid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", str(tmp_path / "none")]) == 3
    shown = capsys.readouterr()
    assert "No such file" in shown.err and "not valid" not in shown.out + shown.err


def test_merge_says_what_was_replaced(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, out = tmp_path / "one.prism", tmp_path / "two.prism", tmp_path / "out.prism"
    assert run(["slice", str(trace), "-o", str(one), "--ranks", "0-2", "--steps", "1:"]) == 0
    assert run(["slice", str(trace), "-o", str(two), "--ranks", "2-3"]) == 0
    capsys.readouterr()
    assert run(["merge", str(one), str(two), "-o", str(out)]) == 0
    assert f"note: rank 2: units, steps of {two} replace those of {one}" in capsys.readouterr().out
    with prismtrace.TraceReader(out) as reader:
        assert reader.num_units(2) > reader.num_units(1)
        assert not [key for key in reader.metadata if key.startswith("slice.")], "it has all ranks, and two lengths"
    assert run(["merge", str(one), str(two), "-o", str(out), "--overwrite", "--json"]) == 0
    replaced = json.loads(capsys.readouterr().out)["replaced"]
    assert replaced[0] == {"table": "units", "ranks": [2], "kept": str(two), "replaced": str(one)}
    assert prismtrace.overlaps([one]) == ()


def test_merged_slices_of_the_same_steps_keep_what_is_true(trace: Path, tmp_path: Path) -> None:
    parts = [tmp_path / f"{rank}.prism" for rank in range(2)]
    for rank, part in enumerate(parts):
        prismtrace.slice_trace(trace, part, ranks=[rank], steps=range(1, 3))
    prismtrace.merge(parts, tmp_path / "both.prism")
    with prismtrace.TraceReader(tmp_path / "both.prism") as reader:
        assert (reader.metadata["slice.ranks"], reader.metadata["slice.steps"]) == ("0-1", "1:3")


PRESSED = {
    "while it imports": (
        "class Finder:\n    def find_spec(self, name, *_):\n        if name == 'click':\n            press()\n",
        130,
    ),
    "in a library that swallows it": (
        "class Finder:\n    def find_spec(self, name, *_):\n        if name == 'prismtrace':\n            try:\n"
        "                press()\n            except KeyboardInterrupt:\n                raise ImportError('broken')\n",
        130,
    ),
    "after its last line": ("class Finder:\n    find_spec = None\nimport atexit\natexit.register(press)\n", 0),
}


@pytest.mark.parametrize("when", PRESSED)
def test_ctrl_c_ends_with_one_line_whenever_it_is_pressed(trace: Path, when: str) -> None:
    code, expected = PRESSED[when]
    program = (
        "import os, signal, sys\ndef press():\n    os.kill(os.getpid(), signal.SIGINT)\n"
        f"{code}\nif Finder.find_spec:\n    sys.meta_path.insert(0, Finder())\n"
        f"sys.argv = ['prism', 'info', {str(trace)!r}]\nfrom prism_sdk.cli.entry import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == expected != -signal.SIGINT
    assert done.stderr.strip() == ("prism: interrupted" if expected else "")


@pytest.mark.parametrize("packer", ["gzip", "bz2", "lzma", "zstandard"])
def test_a_packed_trace_is_called_by_its_name(
    trace: Path, packer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "packed.prism"
    packed.write_bytes(importlib.import_module(packer).compress(trace.read_bytes()))
    for words in (["info"], ["recover", "-o", str(tmp_path / "out.prism")]):
        assert run([words[0], str(packed), *words[1:]]) == 3
        assert ": unpack it first (" in capsys.readouterr().err
    assert run(["convert", str(packed), "-o", str(tmp_path / "out.prism")]) in (2, 3)
    assert "unpack it first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("contents", "words"),
    [(b"", "the file is empty"), (b"\x04\x22\x4d\x18rest", "lz4 -d"), (b'{"traceEvents": []}', "`prism convert`")],
)
def test_a_file_that_is_no_trace_says_what_to_do(
    contents: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.prism").write_bytes(contents)
    assert run(["info", str(tmp_path / "x.prism")]) == 3
    assert words in capsys.readouterr().err


def test_little_is_imported_before_somebody_listens_for_ctrl_c() -> None:
    program = "import sys\nbefore = set(sys.modules)\nimport prism_sdk.cli.entry\nprint(*set(sys.modules) - before)"
    words = [sys.executable, "-S", "-c", program]  # site may have imported more already
    root = str(Path(__file__).parents[2])
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={"PYTHONPATH": root})
    assert "prism_sdk.cli.entry" in done.stdout.split()
    assert "typing" not in done.stdout.split()


@pytest.mark.parametrize("name", ["", ".", "-"])
@pytest.mark.parametrize("words", [["report"], ["slice", "--ranks", "0"], ["redact"], ["compact"], ["simulate"]])
def test_outputs_that_are_no_names_are_refused(
    trace: Path, name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([words[0], str(trace), *words[1:], "-o", name]) == 2
    assert "give" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_no_defect(trace: Path) -> None:
    command = [sys.executable, "-m", "prism_sdk.cli.main", "info", str(trace)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "prism: error: standard output cannot be written: No space left on device",
    )
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
