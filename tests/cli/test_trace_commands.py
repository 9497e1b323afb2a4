"""info, validate, recover and merge on real trace files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import prismtrace
from prism_sdk.cli.main import run
from prism_sdk.testing.scripted import write_trace
from prismtrace import GraphKind, ProcessGroup, TraceWriter


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(
        tmp_path / "real.prism", kind=GraphKind.OBSERVED, world_size=4, ranks=range(4), num_steps=3, step_ns=2_000_000
    )


@pytest.fixture
def unfinished(tmp_path: Path, trace: Path) -> Path:
    path = tmp_path / "cut.prism"
    path.write_bytes(trace.read_bytes()[:-40])
    return path


def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_info(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", str(trace)]) == 0
    text = capsys.readouterr().out
    for part in ("observed graph", "ranks: 4 of 4, 48 units", "step: 2.000 ms", "0..2", "default_pg", "gloo", "0-3"):
        assert part in text


def test_info_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--json", str(trace)]) == 0
    values = as_json(capsys)
    assert (values["graph_kind"], values["world_size"], values["num_units"]) == ("observed", 4, 48)
    assert values["size_bytes"] == trace.stat().st_size and values["finished"] is True
    assert values["ranks"][3]["step_ns_median"] == 2_000_000 and values["ranks"][3]["loss_last"] is None
    assert values["groups"][0]["ranks"] == [0, 1, 2, 3]


def test_info_says_beside_a_group_what_it_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, group_id = tmp_path / "groups.prism", 14_679_016_272_539_019_784
    facts = {f"group.{group_id}.purpose": "edp", "group.9.purpose": "of no group here", "rank.0.fidelity": "full"}
    with TraceWriter(path, graph_kind=GraphKind.BARE, world_size=2, metadata=facts) as writer:
        for number, name in ((group_id, "29"), (5, "30")):
            writer.add_group(ProcessGroup(group_id=number, name=name, description="", backend="gloo", ranks=(0, 1)))
    assert run(["info", str(path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["29", "edp", "gloo", "2", "0-1", str(group_id)] in lines
    assert ["30", "-", "gloo", "2", "0-1", "5"] in lines
    assert [line for line in lines if line[:1] and line[0].startswith("group.")] == [
        ["group.9.purpose", "=", "of", "no", "group", "here"]
    ]
    assert run(["info", "--json", str(path)]) == 0
    assert [group["purpose"] for group in as_json(capsys)["groups"]] == ["edp", None]


def test_info_of_a_bare_graph_has_no_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(
        tmp_path / "b.prism", kind=GraphKind.BARE, world_size=20, ranks=range(20), num_steps=1, step_ns=None
    )
    assert run(["info", str(path)]) == 0
    text = capsys.readouterr().out
    assert "step:" not in text and "and 4 more ranks" in text
    assert run(["info", "--all", str(path)]) == 0
    assert "more ranks" not in capsys.readouterr().out


def test_info_of_an_unfinished_file_says_so(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", str(unfinished)]) == 0
    assert "unfinished (prism recover saves it)" in capsys.readouterr().out
    assert run(["info", "--json", str(unfinished)]) == 0
    assert as_json(capsys)["finished"] is False


@pytest.mark.parametrize("command", ["info", "validate"])
@pytest.mark.parametrize("content", [None, b"", b"not a trace at all, but long enough to hold a header"])
def test_what_is_no_trace_is_unreadable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, content: bytes | None
) -> None:
    path = tmp_path / "x.prism"
    if content is not None:
        path.write_bytes(content)
    assert run([command, str(path)]) == 3
    captured = capsys.readouterr()
    assert str(path) in captured.out + captured.err and "Traceback" not in captured.err


def test_validate(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", str(trace)]) == 0
    assert "is a valid trace" in capsys.readouterr().out
    assert run(["validate", "--json", str(trace)]) == 0
    values = as_json(capsys)
    assert values["valid"] is True


def test_validate_finds_a_changed_byte(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(trace.read_bytes())
    data[len(data) // 2] ^= 0xFF
    trace.write_bytes(data)
    assert run(["validate", str(trace)]) == 1
    assert "error: " in capsys.readouterr().out


def test_recover(unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "saved.prism"
    assert run(["recover", str(unfinished), "-o", str(output)]) == 3
    assert "wrote" in capsys.readouterr().out
    with prismtrace.TraceReader(output) as reader:
        assert reader.world_size == 4
    assert run(["recover", str(unfinished), "-o", str(unfinished)]) == 2
    assert run(["recover", str(unfinished), "-o", str(output)]) == 2, "the output exists"
    assert str(output) in capsys.readouterr().err
    assert run(["recover", str(unfinished), "-o", str(output), "--overwrite", "--json"]) == 3
    values = as_json(capsys)
    assert values["num_rows"] > 0 and values["was_finished"] is False


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [
        write_trace(
            tmp_path / f"{rank}.prism", kind=GraphKind.OBSERVED, world_size=2, ranks=[rank], num_steps=2, step_ns=10
        )
        for rank in range(2)
    ]
    output = tmp_path / "all.prism"
    assert run(["merge", *map(str, parts), "-o", str(output)]) == 0
    with prismtrace.TraceReader(output) as reader:
        assert tuple(reader.ranks) == (0, 1)
    assert run(["merge", *map(str, parts), "-o", str(parts[0])]) == 2
    assert "which is to be read" in capsys.readouterr().err


def test_validate_says_each_place_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.prism"
    path.write_bytes(b"not a trace at all, but long enough to hold a header")
    assert run(["validate", str(path)]) == 3
    text = capsys.readouterr().out
    assert text.count("byte 0") == text.count(str(path)) == 1


def test_recover_of_the_shards_of_a_killed_run_says_what_happens_to_them(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = tmp_path / "out.prism.parts"
    parts.mkdir()
    assert run(["recover", str(parts), "-o", str(tmp_path / "x")]) == 3
    assert "a folder without shards" in capsys.readouterr().err
    (parts / "rank-0.prism").write_bytes(trace.read_bytes())
    for given in (parts, tmp_path / "out.prism"):
        assert run(["recover", str(given), "-o", str(tmp_path / "x")]) == 2
        text = capsys.readouterr().err
        assert (
            f"the next run that writes {tmp_path / 'out.prism'} joins them into {tmp_path / 'out.prism'}.recovered"
            in text
        )
    assert run(["recover", str(parts / "rank-0.prism"), "-o", str(tmp_path / "x")]) == 0


@pytest.mark.parametrize("command", ["simulate", "analyze", "info", "report", "sweep", "cat", "compare"])
def test_an_unfinished_file_is_used_as_far_as_it_goes(
    tmp_path: Path, unfinished: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    more = {
        "report": ["-o", str(tmp_path / "page.html")], "sweep": ["--variant", "--no-gaps"],
        "compare": [str(unfinished)],
    }  # fmt: skip
    assert run([command, str(unfinished), *more.get(command, [])]) == 0
    shown = capsys.readouterr()
    assert "unfinished" in (shown.err if command == "cat" else shown.out)


def test_a_file_cut_off_before_its_first_unit_says_so(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.prism"
    cut.write_bytes(trace.read_bytes()[:128])
    assert run(["analyze", str(cut)]) == 2
    error = capsys.readouterr().err
    assert "has no units" in error and "it is unfinished" in error


@pytest.mark.parametrize("command", ["slice", "diff"])
def test_what_needs_a_whole_file_names_the_command_that_saves_it(
    tmp_path: Path, unfinished: Path, trace: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    more = [str(trace)] if command == "diff" else ["-o", str(tmp_path / "x.prism"), "--steps", "0:1"]
    assert run([command, str(unfinished), *more]) == 3
    text = capsys.readouterr().err
    assert "`prism recover` saves" in text and "allow_unfinished" not in text


WRITERS = ("report", "compact", "redact", "recover", "simulate", "merge", "slice --ranks 0", "expand --dp 2")


@pytest.mark.parametrize("command", WRITERS)
def test_where_nothing_can_be_written_is_said_before_the_work(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    def written(output: Path, *flags: str) -> tuple[int, str]:
        code = run([*command.split(), str(trace), "-o", str(output), *flags])
        return code, capsys.readouterr().err

    for flags in ([], ["--overwrite"]):
        code, text = written(tmp_path, *flags)
        assert code == 2 and "is a folder" in text and "--overwrite" not in text
        code, text = written(tmp_path / "none" / "x", *flags)
        assert code == 2 and f"there is no folder {tmp_path / 'none'}" in text
    (tmp_path / "there").write_text("mine")
    code, text = written(tmp_path / "there")
    assert code == 2 and "--overwrite replaces it" in text and (tmp_path / "there").read_text() == "mine"
    code, text = written(trace, "--overwrite")
    assert code == 2 and "which is to be read" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["real.prism", "there"]


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"\x7fELF\x02\xd0\xff", 3, "not UTF-8 text, at byte 5"),
        (b'name = "x"\nnodes = = 3\n', 3, "at line 2, column 9"),
        (b"", 2, "the section is missing"),
    ],
)
def test_a_broken_cluster_profile_is_unreadable_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, code: int, message: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    assert run(["cluster", "check", str(path)]) == code
    assert message in capsys.readouterr().err


def test_nccl_report_of_what_is_no_record_file(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.prism"
    empty.touch()
    assert run(["nccl", "report", str(empty)]) == 3
    text = capsys.readouterr().err
    assert "it is empty" in text and "NCCL_PROFILER_PLUGIN" in text and "prism info" not in text
    assert run(["nccl", "report", str(trace)]) == 3
    assert "a trace: `prism info` shows it" in capsys.readouterr().err
