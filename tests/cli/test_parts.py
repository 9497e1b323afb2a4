"""What commands say of files that are damaged, cut off, or hold a part of a job, and of numbers beyond all bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prismtrace
from prism_sdk.cli.main import run
from prism_sdk.testing.scripted import write_trace
from prismtrace import GraphKind, container
from prismtrace.container import RecordKind


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts") / "job.prism"
    return write_trace(
        path, kind=GraphKind.OBSERVED, world_size=4, ranks=list(range(4)), num_steps=3, step_ns=2_000_000
    )


def _records(path: Path) -> list[tuple[int, container.Frame]]:
    raw, offset, found = path.read_bytes(), 8, []
    while offset < len(raw) - container.TRAILER_BYTES:
        frame = container.parse_frame(raw[offset:], path=str(path), offset=offset)
        found.append((offset, frame))
        offset += frame.length
    return found


@pytest.fixture(scope="module")
def cut(trace: Path) -> Path:
    """The trace up to the first chunk of rank 2."""
    with prismtrace.TraceReader(trace) as reader:
        first = min(int(e["offset"]) for e in reader._index.chunk_entries if e["rank"] == 2)
    path = trace.with_name("cut.prism")
    path.write_bytes(trace.read_bytes()[:first])
    with prismtrace.TraceReader(path, allow_unfinished=True) as reader:
        assert set(reader.ranks) < {0, 1, 2, 3}
    return path


@pytest.mark.parametrize("is_cut", [True, False])
def test_figures_of_some_ranks_are_not_those_of_the_job(
    trace: Path, cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_cut: bool
) -> None:
    part = cut
    if not is_cut:
        part = tmp_path / "part.prism"
        prismtrace.slice_trace(trace, part, ranks=[0, 1])
    with prismtrace.TraceReader(part, allow_unfinished=True) as reader:
        num_ranks = len(reader.ranks)
    words = f"{num_ranks} of 4 ranks"
    assert run(["simulate", str(part)]) == run(["sweep", str(part), "--variant=--no-gaps"]) == 0
    assert f"job        {words}," in (shown := capsys.readouterr().out)
    assert shown.count(f"note: {words} are simulated") == 2 and f"{num_ranks} of 4 " in shown.split("as it is")[1]
    assert ("the file is unfinished" in shown) is is_cut
    assert run(["simulate", str(part), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert (report["num_ranks"], report["world_size"]) == (num_ranks, 4)
    assert any(words in note for note in report["notes"])
    assert run(["analyze", str(part), "--json"]) == 0
    analysis = json.loads(capsys.readouterr().out)
    assert (analysis["num_ranks"], analysis["world_size"]) == (num_ranks, 4)
    assert any(words in note for note in analysis["notes"])
    assert run(["report", str(part), "-o", str(tmp_path / "report.html")]) == 0
    assert words in capsys.readouterr().out
    assert run(["simulate", str(trace)]) == 0
    assert "job        4 ranks," in (shown := capsys.readouterr().out) and "are simulated" not in shown


def test_a_limit_on_errors_is_not_met_by_a_part(
    trace: Path, cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", str(trace), str(trace), "--max-error", "5"]) == 0
    part = tmp_path / "part.prism"
    prismtrace.slice_trace(trace, part, ranks=[1])
    for other, is_cut in ((cut, True), (part, False)):
        assert run(["compare", str(trace), str(other)]) == 0
        assert run(["compare", str(trace), str(other), "--max-error", "5"]) == 1
        shown = capsys.readouterr()
        assert ("is unfinished: its end is not held" in shown.err) is is_cut
        assert "not all traces have rank" in shown.err
    assert f"ranks 0,2-3: not in {part}" in shown.out
    assert run(["compare", str(part), str(trace), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["missing_ranks"] == [0, 2, 3] and values["unfinished"] == []


def test_an_emulation_of_some_ranks_is_no_part(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emulated = write_trace(
        tmp_path / "e.prism", kind=GraphKind.EMULATED, world_size=4, ranks=[1], num_steps=3, step_ns=2_000_000
    )
    assert run(["compare", str(trace), str(emulated), "--max-error", "5"]) == 0
    assert f"ranks 0,2-3: not in {emulated}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [RecordKind.METADATA, RecordKind.GROUP])
def test_damage_that_readers_do_not_meet_is_found(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: RecordKind
) -> None:
    path = tmp_path / "job.prism"
    with prismtrace.TraceWriter(path, world_size=2, metadata={"key": "value"}) as writer:
        writer.add_group(prismtrace.ProcessGroup(5, ranks=(0, 1)))
        writer.add_units(0, {"kind": [1]})
    assert run(["validate", str(path)]) == 0
    offset, frame = next(record for record in _records(path) if record[1].kind == kind)
    raw = bytearray(path.read_bytes())
    raw[offset + container.FRAME_BYTES + frame.meta_length // 2] ^= 1
    path.write_bytes(raw)
    capsys.readouterr()
    assert run(["validate", str(path)]) == 1
    assert f"PT007 at byte {offset}: checksum of a meta section" in capsys.readouterr().out
    assert prismtrace.validate(path, deep=False) == []
    assert run(["recover", str(path), "-o", str(tmp_path / "saved.prism")]) == 3


def test_bytes_after_the_end_are_counted(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.prism"
    path.write_bytes(trace.read_bytes() + container.MAGIC + b"abc")
    assert run(["validate", str(path)]) == 1
    shown = capsys.readouterr().out
    assert f"PT002 at byte {trace.stat().st_size}: 11 bytes after the end" in shown and "cut off" not in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("num_nodes = 99999999999999999999", "cluster.num_nodes: 99999999999999999999 is beyond"),
        (f"num_nodes = {'9' * 5000}", "it is not TOML"),
        ("num_nodes = 1000000", "8,000,000 GPUs in all"),
        ("bandwidth_gb_per_s = 1e300", "bandwidth_gb_per_s: 1e+300 is beyond"),
        ("bandwidth_gb_per_s = inf", "bandwidth_gb_per_s: inf is beyond"),
        (f"bandwidth_gb_per_s = {'9' * 400}", "bandwidth_gb_per_s: 99999999999999999999... is beyond"),
        ("[model]\nbase_us = { ll = nan }", "nan is not a number above 0"),
        ("[[table]]\nop='all_reduce'\nranks=2\npoints=[[1, inf]]", "table[0].points[0]: inf is beyond"),
        ("[[table]]\nop='all_reduce'\nranks=99999999\npoints=[[1, 1]]", "table[0].ranks: 99999999 is beyond"),
        ("[[table]]\nop='all_reduce'\nranks=2\npoints=[[1, 1]]\nspread_percent='x'", "'x' is not a number of 0 or"),
    ],
)
def test_numbers_of_a_profile_have_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    lines = {
        "name": "[cluster]\nname = 'x'\ngpus_per_node = 8", "num_nodes": "num_nodes = 2",
        "bandwidth_gb_per_s": "[nvlink]\nbandwidth_gb_per_s = 100",
        "network": "[network]\nbandwidth_gb_per_s = 10\nnics_per_node = 1",
    }  # fmt: skip
    key = change.partition(" ")[0]
    lines[key] = f"[nvlink]\n{change}" if key == "bandwidth_gb_per_s" else change
    profile = tmp_path / "x.toml"
    profile.write_text("\n".join(lines.values()))
    assert run(["cluster", "check", str(profile)]) in (2, 3)
    assert message in capsys.readouterr().err


def test_no_profile_is_written_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "x.toml"
    assert run(["cluster", "init", "--nodes", "99999999999999999999", "-o", str(output)]) == 2
    assert "cluster.num_nodes" in capsys.readouterr().err and not output.exists()
    assert run(["cluster", "init", "--nodes", "131072", "-o", str(output)]) == 0
    assert run(["cluster", "check", str(output)]) == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1" + bytes(40), "damaged Parquet: it does not end with PAR1"),
        ("a.parquet", b"nothing", "it is no Parquet file"),
        ("a.bin", b"ARROW1\0\0" + bytes(40), "damaged Arrow IPC"),
        ("a.json", b'{"foo": [1, 2,\n', "damaged JSON: Expecting value at line 2, column 1: its end is cut off"),
        ("a.json", b'{"foo": [1 2]}', "damaged JSON: Expecting ',' delimiter at line 1, column 12"),
        ("a.txt", b'{"foo": "\xff"}', "it is not UTF-8, at byte 9"),
        ("a.json", b'{"foo": 1}\n{"foo": 2}\n', "no importer recognises"),
        ("a.json", b'{"foo": 1}', "no importer recognises"),
    ],
)
def test_damage_of_a_known_format_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    source = tmp_path / name
    source.write_bytes(content)
    assert run(["convert", str(source), "-o", str(tmp_path / "o.prism")]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["convert", "slice --ranks 0", "report", "simulate"])
def test_a_file_on_the_way_to_the_output_is_named(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    blocking = tmp_path / "file"
    blocking.touch()
    assert run([*command.split(), str(trace), "-o", str(blocking / "y" / "x.parquet")]) == 2
    assert f"{blocking} is a file and no folder" in capsys.readouterr().err
    assert run([*command.split(), str(trace), "-o", str(tmp_path / "z" / "x.parquet")]) == 2
    assert f"there is no folder {tmp_path / 'z'}" in capsys.readouterr().err


def test_names_of_two_wide_characters_are_hidden(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named, output = tmp_path / "named.prism", tmp_path / "o.prism"
    with prismtrace.TraceWriter(named, metadata={"job.name": "run of 名前 today"}) as writer:
        writer.add_units(0, {"kind": [1]})
    for name, code in (("ab", 2), ("名", 2), ("名前", 0)):
        assert run(["redact", str(named), "-o", str(output), "--name", name]) == code
    assert "is shorter than 3 characters" in capsys.readouterr().err
    with prismtrace.TraceReader(output) as reader:
        assert "名前" not in reader.metadata["job.name"] and "today" in reader.metadata["job.name"]


STRATEGY = """
from prism_sdk.abc import CalibrationStrategy
from prism_sdk.errors import RunError
from prism_sdk.hookspecs import hookimpl

class Failing(CalibrationStrategy):
    name = "failing"
    description = "fails as a run does"
    def calibrate(self, context):
        raise RunError("rank 3 failed", hint=f"look at it\\n  what was recorded is in {context.work_dir / 'x.prism'}")

@hookimpl
def prism_register_strategies():
    return [Failing()]
"""


def test_a_hint_names_no_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "failing.py").write_text(STRATEGY)
    write_trace(tmp_path / "g.prism", kind=GraphKind.BARE, world_size=2, ranks=[0, 1], num_steps=1, step_ns=1_000_000)
    words = ["calibrate", "--graph", "g.prism", "-o", "c.prism", "--plugin", "failing.py", "--strategy", "failing"]
    assert run([*words, "train.py"]) == 1
    shown = capsys.readouterr().err
    assert "rank 3 failed" in shown and "look at it" in shown and "recorded is in" not in shown
    assert not list(tmp_path.glob("prism-calibrate-*"))
