"""prism convert with plugins that are written here: choice, refusals, bad input, atomic output."""

from __future__ import annotations

import gzip
import io
import json
import os
import zipfile
from pathlib import Path

import pytest

from prism_sdk import conversion
from prism_sdk.cli.main import run
from prism_sdk.conversion import KNOWN_PLUGINS, to_install
from prism_sdk.errors import UnknownNameError
from prism_sdk.plugins import PluginManager
from prism_sdk.testing.scripted import write_trace
from prismtrace import GraphKind, TraceReader

PLUGIN = '''
"""Importers `lines` and `words` and the exporter `text` of a toy format. Not a real format."""
from prism_sdk import hookimpl
from prism_sdk.abc import ConversionReport, TraceExporter, TraceImporter
from prismtrace import TraceReader, TraceReadError, TraceWriter

class Lines(TraceImporter):
    name, description = "lines", "one number a line"
    def recognises(self, source, head):
        return head.startswith(b"#lines") or source.is_dir()
    def import_trace(self, sources, *, output, options, report):
        files = [f for s in sources for f in (sorted(s.iterdir()) if s.is_dir() else [s])]
        with TraceWriter(output, metadata={"x-options": repr(sorted(options.items()))}) as writer:
            for rank, file in enumerate(files):
                report(f"reading {file.name}")
                text = file.read_text()
                if "bad" in text:
                    raise TraceReadError("byte 7: not a number", path=str(file))
                if "crash" in text:
                    raise IndexError("list index out of range")
                values = [int(line) for line in text.splitlines()[1:]]
                writer.add_units(rank, {"kind": [1] * len(values), "start_ns": values})
        return ConversionReport(output, {"num_files": len(files)}, ("nothing was lost",))


class Words(Lines):
    name = "words"
    def recognises(self, source, head):
        if head.startswith(b"#raise"):
            raise RuntimeError
        return b"both" in head[:20]


class Text(TraceExporter):
    name, description, suffixes = "text", "one number a line", (".num.txt", ".num")
    def export_trace(self, source, *, output, options, report):
        with TraceReader(source) as reader:
            lines = [str(v) for rank in reader.ranks for v in reader.units(rank).start_ns.tolist()]
        output.write_text("\\n".join(lines))
        if len(lines) > 5:
            raise RuntimeError("too long")
        return ConversionReport(output, {"num_lines": len(lines)})


@hookimpl
def prism_register_importers():
    return [Lines(), Words()]


@hookimpl
def prism_register_exporters():
    return [Text()]
'''


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "toy_formats.py"
    path.write_text(PLUGIN)
    return str(path)


def convert(plugin: str, *words: object) -> int:
    return run(["convert", *map(str, words), "--plugin", plugin])


def source(path: Path, text: str = "#lines\n5\n7\n") -> Path:
    path.write_text(text)
    return path


def test_import_with_options(tmp_path: Path, plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.prism"
    one, two = source(tmp_path / "one"), source(tmp_path / "two")
    assert convert(plugin, one, two, "-o", out, "--lossless", "-O", "a=1", "--json") == 0
    captured = capsys.readouterr()
    assert "reading two" in captured.err
    assert json.loads(captured.out)["used"] == "lines -> trace" and "nothing was lost" in captured.out
    with TraceReader(out) as reader:
        assert reader.metadata["x-options"] == "[('a', '1'), ('lossless', 'true')]"
        assert reader.units(1).start_ns.tolist() == [5, 7]
    folder = tmp_path / "folder"
    folder.mkdir()
    source(folder / "a")
    assert convert(plugin, folder, "-o", out) == 2, "the output exists"
    assert convert(plugin, folder, "-o", out, "--overwrite") == 0


def test_export_and_both_at_once(tmp_path: Path, plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = source(tmp_path / "one")
    assert convert(plugin, one, "-o", tmp_path / "one.prism") == 0
    assert convert(plugin, tmp_path / "one.prism", "-o", tmp_path / "out.num.txt") == 0
    assert (tmp_path / "out.num.txt").read_text() == "5\n7"
    assert convert(plugin, one, "-o", tmp_path / "direct.num", "--json") == 0
    assert (tmp_path / "direct.num").read_text() == "5\n7"
    assert convert(plugin, tmp_path / "one.prism", "-o", tmp_path / "x.bin", "--to", "text") == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]


def test_a_trace_into_a_trace_is_refused(tmp_path: Path, plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "a.prism", kind=GraphKind.BARE, world_size=1, ranks=[0], num_steps=1, step_ns=None)
    assert convert(plugin, trace, "-o", tmp_path / "b.prism") == 2
    assert "prism slice" in capsys.readouterr().err
    assert convert(plugin, trace, trace, "-o", tmp_path / "b.num") == 2
    assert "prism merge" in capsys.readouterr().err
    assert convert(plugin, trace, "-o", tmp_path / "b.unknown") == 2
    error = capsys.readouterr().err
    assert ".num.txt" in error and "text: one number a line" in error
    assert convert(plugin, trace, "-o", trace) == 2


def test_unknown_and_ambiguous_formats_are_named(
    tmp_path: Path, plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(plugin, source(tmp_path / "x", "#raise"), "-o", tmp_path / "o.prism") == 3
    error = capsys.readouterr().err
    assert "no importer recognises" in error and "lines: one number a line" in error
    both = source(tmp_path / "both", "#lines\n1\nboth")
    assert convert(plugin, both, "-o", tmp_path / "o.prism") == 2
    assert "more than one importer recognises" in capsys.readouterr().err
    assert convert(plugin, both, "-o", tmp_path / "o.prism", "--from", "nobody") == 2
    assert "nobody" in capsys.readouterr().err
    words = source(tmp_path / "words", "both")
    assert convert(plugin, source(tmp_path / "y"), words, "-o", tmp_path / "o.prism") == 2
    assert "different formats" in capsys.readouterr().err
    assert not (tmp_path / "o.prism").exists()


def test_bad_files(tmp_path: Path, plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that is no profile: one message, exit code 3 (unreadable) or 2 (no format), no output, no hanging."""
    cases: list[tuple[Path, int, str]] = []

    def case(name: str, raw: bytes, code: int, text: str) -> None:
        path = tmp_path / name
        path.write_bytes(raw)
        cases.append((path, code, text))

    case("empty", b"", 3, "the file is empty")
    case("photo.png", b"\x89PNG\r\n\x1a\n" + bytes(64), 3, "no importer recognises")
    deep = b"#lines\n1"
    for _ in range(10):
        deep = gzip.compress(deep)
    case("deep.gz", deep, 3, "compressed more than once")
    inner = b"#lines\n1"
    for _ in range(10):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("x", inner)
        inner = buffer.getvalue()
    case("deep.zip", inner, 3, "a zip archive; unpack it first")
    case("cut.gz", b"\x1f\x8b\x08\x00garbage-that-is-no-deflate-stream", 3, "damaged gzip")
    case("bomb.gz", gzip.compress(bytes(50_000_000)), 3, "no importer recognises")
    case("damaged", b"#lines\nbad", 3, "byte 7: not a number")
    case("crash", b"#lines\ncrash", 3, "importer 'lines' failed on it: IndexError")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    cases.append((fifo, 3, "neither a file nor a folder"))
    cases.append((tmp_path / "missing", 3, "No such file"))
    (tmp_path / "hollow").mkdir()
    cases.append((tmp_path / "hollow", 3, "the folder is empty"))
    cases.append((Path("/dev/null"), 3, "neither a file nor a folder"))
    for path, code, text in cases:
        assert convert(plugin, path, "-o", tmp_path / "o.prism") == code, path
        error = capsys.readouterr().err
        assert text in error and str(path) in error and "Traceback" not in error, path
    assert not (tmp_path / "o.prism").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path, plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = source(tmp_path / "secret")
    path.chmod(0)
    assert convert(plugin, path, "-o", tmp_path / "o.prism") == 3
    assert "Permission denied" in capsys.readouterr().err


def test_a_failing_exporter_leaves_nothing(tmp_path: Path, plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    long = source(tmp_path / "long", "#lines\n" + "\n".join("123456"))
    assert convert(plugin, long, "-o", tmp_path / "o.num") == 3
    text = capsys.readouterr().err
    assert "too long" in text and f"cannot read {long}" in text and ".tmp" not in text
    (tmp_path / "old.num").write_text("old")
    assert convert(plugin, long, "-o", tmp_path / "old.num", "--overwrite") == 3
    assert (tmp_path / "old.num").read_text() == "old"
    assert convert(plugin, source(tmp_path / "ok"), "-o", tmp_path / "no" / "o.num") == 2
    (tmp_path / "full").mkdir()
    source(tmp_path / "full" / "x")
    assert convert(plugin, tmp_path / "ok", "-o", tmp_path / "full", "--to", "text") == 2
    assert {path.name for path in tmp_path.iterdir()} >= {"old.num"} and not (tmp_path / "o.num").exists()


def test_what_to_install_is_said_where_nothing_is() -> None:
    text = to_install(PluginManager(installed=False))
    assert all(name in text for name in KNOWN_PLUGINS)


def test_a_format_by_name_says_what_to_install(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.prism", kind=GraphKind.BARE, world_size=1, ranks=[0], num_steps=1, step_ns=None)
    manager = PluginManager(installed=False)
    with pytest.raises(UnknownNameError, match="prismtrace-perfetto for"):
        conversion.convert(manager, [trace], output=tmp_path / "x", exporter="perfetto", report=print)
    profile = source(tmp_path / "profile.json", "{}")
    with pytest.raises(UnknownNameError, match="prismtrace-kineto for"):
        conversion.convert(manager, [profile], output=tmp_path / "x.prism", importer="kineto", report=print)


def test_the_plugins_of_this_repository_are_known() -> None:
    folder = Path(__file__).parents[2] / "plugins"
    texts = [path.read_text() for path in folder.glob("*/pyproject.toml")]
    assert all(any(f'name = "{name}"' in text for text in texts) for name in KNOWN_PLUGINS)
