"""cat, diff, redact, slice, merge --align and info --sizes as commands: output, JSON, exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import prismtrace
from prism_sdk.cli.main import run
from prism_sdk.testing.scripted import write_trace
from prismtrace import GraphKind


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return make(tmp_path / "a.prism")


def make(path: Path, *, ranks: list[int] | None = None, step_ns: int = 2_000_000, num_steps: int = 3) -> Path:
    ranks = list(range(4)) if ranks is None else ranks
    return write_trace(path, kind=GraphKind.OBSERVED, world_size=4, ranks=ranks, num_steps=num_steps, step_ns=step_ns)


def output(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(output(capsys))


def test_cat_shows_rows(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cat", str(trace), "--rank", "1", "--step", "2"]) == 0
    lines = output(capsys).splitlines()
    assert lines[0].split()[:4] == ["rank", "row", "step", "kind"]
    assert len(lines) == 6 and all(line.split()[0] == "1" and line.split()[2] == "2" for line in lines[2:])


def test_cat_formats_agree(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cat", str(trace), "--format", "csv"]) == 0
    table = list(csv.DictReader(io.StringIO(output(capsys))))
    assert run(["cat", str(trace), "--json"]) == 0
    records = [json.loads(line) for line in output(capsys).splitlines()]
    assert len(table) == len(records) == 48
    for row, record in zip(table, records, strict=True):
        for name, value in record.items():
            assert row[name] == ("" if value is None else str(value))


def test_cat_other_tables_and_limits(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cat", str(trace), "--table", "steps", "--columns", "step,end_ns", "--json", "-n", "4"]) == 0
    records = [json.loads(line) for line in output(capsys).splitlines()]
    assert [(record["rank"], record["step"]) for record in records] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert set(records[0]) == {"rank", "row", "step", "end_ns"}
    for wrong in ("--table x", "--columns x", "--rank 9", "--step x", "--json --format csv"):
        assert run(["cat", str(trace), *wrong.split()]) == 2, wrong
        assert "Traceback" not in capsys.readouterr().err


def test_cat_says_which_named_columns_have_no_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "named.prism"
    with prismtrace.TraceWriter(path, world_size=1) as writer:
        writer.add_units(0, {"kind": [1], "start_ns": [0], "end_ns": [1], "prism.part": ["forward"]})
    assert run(["cat", str(path), "--columns", "kind,prism.part"]) == 0
    assert capsys.readouterr().err == ""
    for style in ("table", "csv", "jsonl"):
        assert run(["cat", str(path), "--columns", "kind,prism.part,prism.prat", "--format", style]) == 0
        assert "no row here has a value of prism.prat (" in capsys.readouterr().err


def test_cat_survives_a_reader_that_goes_away(tmp_path: Path) -> None:
    trace = make(tmp_path / "long.prism", num_steps=4000)
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "prism_sdk.cli.main", "cat", str(trace), "--json"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    os.read(read, 100)
    os.close(read)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")


def test_diff(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(trace), str(trace)]) == 0
    assert "no difference: 48 units" in output(capsys)
    slower = make(tmp_path / "b.prism", step_ns=3_000_000)
    assert run(["diff", str(trace), str(slower)]) == 1
    text = output(capsys)
    assert "times" in text and "+50.0 %" in text and "structure" not in text
    assert run(["diff", str(trace), str(slower), "--ignore", "times"]) == 0
    assert "not compared: times" in output(capsys)
    fewer = make(tmp_path / "c.prism", ranks=[0, 1], num_steps=2)
    assert run(["diff", "--json", str(trace), str(fewer)]) == 1
    values = as_json(capsys)
    assert values["differs"] and values["diff"]["counts"]["ranks"] == 2
    assert {change["num_removed"] for change in values["diff"]["structure"]} == {4}
    assert run(["diff", str(trace), str(slower), "--ignore", "clocks"]) == 2
    assert "clocks" in capsys.readouterr().err
    assert run(["diff", str(trace), str(tmp_path / "none")]) == 3


def test_slice(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = tmp_path / "part.prism"
    assert run(["slice", str(trace), "-o", str(part), "--ranks", "0,2-3", "--steps", "1:"]) == 0
    assert "24 of 36 units of 3 ranks" in output(capsys)
    assert run(["validate", str(part)]) == 0
    capsys.readouterr()
    assert run(["slice", str(trace), "-o", str(part), "--time", "1ms:3ms", "--json", "--overwrite"]) == 0
    assert as_json(capsys)["num_units"] > 0
    for wrong in ([], ["--ranks", "9"], ["--time", "3:2"], ["--time", "1s:5"], ["--time", "x"]):
        assert run(["slice", str(trace), "-o", str(tmp_path / "no.prism"), *wrong]) == 2, wrong
    assert run(["slice", str(trace), "-o", str(trace), "--ranks", "0"]) == 2
    assert run(["slice", str(trace), "-o", str(part), "--ranks", "0"]) == 2, "the output exists"
    assert not (tmp_path / "no.prism").exists()


def test_redact(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = tmp_path / "public.prism"
    (tmp_path / "key").write_text("k\n")
    assert run(["redact", str(trace), "-o", str(public), "--key-file", str(tmp_path / "key")]) == 0
    text = output(capsys)
    assert "none of it is left" in text and "kept:" in text and "redacted:" in text
    assert run(["redact", str(trace), "-o", str(public), "--overwrite", "--json", "--name", "default_pg"]) == 0
    values = as_json(capsys)
    assert values["report"]["counts"]["name"] == 1 and values["report"]["reproducible"] is False
    with prismtrace.TraceReader(public) as reader:
        assert all("default_pg" not in group.name + group.description for group in reader.groups.values())
    for wrong in (["--key", ""], ["--key", "a", "--key-file", "b"], ["--name", "x"]):
        assert run(["redact", str(trace), "-o", str(tmp_path / "no.prism"), *wrong]) == 2, wrong
    assert run(["redact", str(trace), "-o", str(tmp_path / "no.prism"), "--key-file", str(tmp_path / "none")]) == 3


def test_merge_aligns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [make(tmp_path / f"{rank}.prism", ranks=[rank]) for rank in range(2)]
    whole = tmp_path / "all.prism"
    assert run(["merge", *map(str, parts), "-o", str(whole), "--drift"]) == 2
    assert run(["merge", str(parts[0]), "-o", str(whole), "--align"]) == 2
    capsys.readouterr()
    code = run(["merge", *map(str, parts), "-o", str(whole), "--align", "--json"])
    values = as_json(capsys)
    assert code == (0 if values["alignment"]["is_causal"] else 1)
    assert values["alignment"]["num_collectives"] == 3
    with prismtrace.TraceReader(whole) as reader:
        assert reader.metadata["clock.num_collectives"] == "3"
    assert run(["merge", *map(str, parts), "-o", str(whole), "--align", "--overwrite"]) == code
    assert "correction" in output(capsys)


def test_info_says_where_the_bytes_go(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--sizes", str(trace)]) == 0
    text = output(capsys)
    assert "bytes a row" in text and "index and rest" in text
    assert run(["info", "--sizes", "--json", str(trace)]) == 0
    values = as_json(capsys)
    assert values["sizes"]["file_bytes"] == trace.stat().st_size and values["sizes"]["num_rows"]["units"] == 48
    assert values["attachments"] == {} and values["num_events"] == 0


VECTORS = Path(__file__).parents[2] / "spec" / "conformance"


def _has_steps(path: Path) -> bool:
    with prismtrace.TraceReader(path) as reader:
        return any(
            bool((getattr(reader, table)(rank).step >= 0).any())
            for table in ("units", "steps", "scalars")
            for rank in reader.ranks
        )


VALID = [
    path for path in sorted(VECTORS.glob("valid/*.prism")) if path.with_suffix(".json").exists()
]  # not the large one


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_every_valid_vector_goes_through_every_tool(path: Path, tmp_path: Path) -> None:
    before = {(item.code, item.where) for item in prismtrace.validate(path)}
    for name in ("redact", "slice"):
        out = tmp_path / f"{name}.prism"
        extra = ["--steps", "0:"] if name == "slice" else ["--keep-payloads"]
        code = run([name, str(path), "-o", str(out), *extra])
        if name == "slice" and not _has_steps(path):
            assert code == 2 and not out.exists()
            continue
        assert code == 0
        assert {item.code for item in prismtrace.validate(out)} <= {code for code, _ in before} | {"PT024", "PT032"}
    assert run(["diff", str(path), str(path)]) == 0
    assert run(["cat", str(path), "--format", "csv"]) == 0
    assert run(["info", "--sizes", str(path)]) == 0


@pytest.mark.parametrize("path", sorted(VECTORS.glob("invalid/*.prism")), ids=lambda path: path.stem)
def test_every_invalid_vector_is_refused_or_handled(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.prism"
    for words in (
        ["slice", path, "-o", out, "--steps", "0:", "--overwrite"],
        ["redact", path, "-o", out, "--overwrite"],
        ["merge", path, path, "-o", out, "--align", "--overwrite"],
        ["diff", path, path],
        ["cat", path, "--table", "steps"],
        ["cat", path, "--json"],
        ["info", path, "--sizes"],
    ):
        if words[0] == "slice" and path.stem == "stacked_bomb_of_ranks":
            continue  # copies a million ranks one by one, which takes minutes
        assert run([*map(str, words)]) in (0, 1, 2, 3)
        error = capsys.readouterr().err
        assert "Traceback" not in error and "unexpected" not in error, words


def test_compact_keeps_everything(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small.prism"
    assert run(["compact", str(trace), "-o", str(small), "--json"]) == 0
    report = as_json(capsys)
    assert report["num_roles"] >= 1 and report["num_members"] == 4 and report["bytes"] < report["bytes_before"]
    assert not prismtrace.diff(trace, small).differs
    assert run(["validate", str(small)]) == 0
    assert run(["compact", str(trace), "-o", str(small)]) == 2, "the output exists"
    assert run(["compact", str(trace), "-o", str(trace)]) == 2
