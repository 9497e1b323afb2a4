"""Runs the code blocks of the documentation: Python, and commands whose output is compared with what the page shows.

It says nothing about what a page must contain. A page is a sequence of blocks that share one folder and one namespace:

- ``console``: each line behind ``$`` is run in the folder, lines behind ``>`` continue it; lines below it are what it
  must print. A line ``...`` stands for any lines, ``...`` within a line for any text. A command without lines below it
  may print anything.
- ``python``: is executed. A ``text`` block behind ``<!-- output -->`` is what the last one must print.
- ``toml``: must be TOML.

A comment on the line before a block changes that: ``<!-- file: NAME -->`` saves it, ``<!-- exit: N -->`` expects that
exit code of the last command, ``<!-- numbers vary -->`` compares the output without its numbers, and
``<!-- not run: WHY -->`` leaves the block alone, as does ``<!-- needs: MODULE -->`` where that is not installed.
Several are joined by semicolons. With ``PRISM_DOCS_UPDATE=1`` in the environment, output that differs is written into
the page instead, and a line ``?`` becomes the lines that are there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

from prism_sdk.cli.main import run

ROOT = Path(__file__).parents[2]
#: The pages whose blocks are run, relative to the root.
PAGES = ("docs/*.md", "docs/reference/*.md", "README.md", "spec/*.md")
LANGUAGES = {"console", "python", "toml", "text"}
#: Commands that start processes of their own, or end only when they are told to.
STARTING = {"observe", "record", "calibrate", "emulate", "view"}
OPTIONS = {"exit", "file", "needs", "not run", "numbers vary", "output"}
_COMMENT = re.compile(r"<!-- (.*) -->\Z")
_NUMBER = re.compile(r"(?<![A-Za-z_])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_PROGRESS = re.compile(r"^prism [a-z]+: +[0-9.]+ s  .*\n", re.MULTILINE)  # comes when a machine is slow


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and what the comment before it says of it."""

    language: str
    source: str
    options: Mapping[str, str]


def _parse(document: Document) -> Iterator[Region]:
    lexer = FencedCodeBlockLexer(language=r"[^\n{]*", mapping={"language": "language", "source": "source"})
    for lexed in lexer(document):
        before = _COMMENT.search(document.text[: lexed.start].rstrip().rpartition("\n")[2].strip())
        words = [] if before is None else [before[1]] if before[1].startswith("not run") else before[1].split("; ")
        options = {key: value for key, _, value in (word.partition(": ") for word in words)}
        block = Block(lexed.lexemes["language"].strip(), str(lexed.lexemes["source"]), options)
        yield Region(lexed.start, lexed.end, block, _evaluate)


def _evaluate(example: Example) -> str | None:
    block: Block = example.parsed
    folder = Path(example.namespace["FOLDER"])
    assert block.language in LANGUAGES, f"a block of language {block.language!r}: say one of {sorted(LANGUAGES)}"
    assert set(block.options) <= OPTIONS, f"a comment that means nothing: {block.options}"
    if "not run" in block.options:
        assert block.options["not run"], "say why the block is not run"
    elif "needs" in block.options and importlib.util.find_spec(block.options["needs"]) is None:
        pytest.skip(f"needs {block.options['needs']}")
    elif "file" in block.options:
        (folder / block.options["file"]).write_text(block.source)
    elif block.language == "console":
        _run_console(example, block, folder)
    elif block.language == "python":
        _run_python(example, block, folder)
    elif block.language == "toml":
        tomllib.loads(block.source)
    elif "output" in block.options:
        _compare(example, block, block.source, str(example.namespace["PRINTED"]))
    return None


def _run_python(example: Example, block: Block, folder: Path) -> None:
    first = example.document.text[: example.start].count("\n") + 1
    code = compile("\n" * first + block.source, str(example.path), "exec")
    printed = io.StringIO()
    sys.path.insert(0, str(folder))
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
            exec(code, example.namespace)
    finally:
        sys.path.remove(str(folder))
    example.namespace["PRINTED"] = printed.getvalue()


def commands_of(source: str) -> Iterator[tuple[str, str]]:
    """Command and shown output, one pair for each line that begins with ``$``; lines behind ``>`` continue it."""
    command, shown = "", ""
    for line in source.splitlines(keepends=True):
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], ""
        elif command and not shown and line.startswith("> "):
            command += line[2:]
        else:
            assert command, f"output without a command: {line!r}"
            shown += line
    yield command, shown


def _run(command: str, folder: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of one command. A plain call of ``prism`` is made in this process, which is quicker."""
    words = shlex.split(command)
    if words[0] == "prism" and words[1] not in STARTING and not re.search(r"[|<>;&$*`#\n]", command.strip()):
        printed = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = run(words[1:])
        return code, printed.getvalue()
    exported = re.fullmatch(r"export (\w+)=(\S+)\n", command)
    if exported:  # for the commands behind it
        command = f'printf %s "{exported[2]}"'
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environ, check=False, timeout=200, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if exported:
        environ[exported[1]] = done.stdout
        return done.returncode, ""
    return done.returncode, done.stdout


def _run_console(example: Example, block: Block, folder: Path) -> None:
    pairs = list(commands_of(block.source))
    text = ""
    for number, (command, shown) in enumerate(pairs):
        expected = int(block.options.get("exit", 0)) if number == len(pairs) - 1 else 0
        code, printed = _run(command, folder, example.namespace["ENVIRON"])
        if not _PROGRESS.search(shown):
            printed = _PROGRESS.sub("", printed)
        assert code == expected, f"exit code {code} of: {command}\n{printed}"
        if shown and os.environ.get("PRISM_DOCS_UPDATE"):
            shown = _updated(block, shown, printed)
        text += "$ " + command.rstrip("\n").replace("\n", "\n> ") + "\n" + shown
        if shown:
            _check(block, shown, printed, what=command)
    _update(example, block, text)


def _compare(example: Example, block: Block, shown: str, printed: str) -> None:
    if os.environ.get("PRISM_DOCS_UPDATE"):
        _update(example, block, _updated(block, shown, printed))
    else:
        _check(block, shown, printed, what="the block above")


def _normal(block: Block, line: str) -> str:
    line = line.rstrip()
    if "numbers vary" in block.options:
        line = re.sub(r"-{2,}", "--", _NUMBER.sub("0", line))
        line = re.sub(r"\b0 (?:KiB|MiB|GiB|B)\b", "0 B", line)
        line = re.sub(r" +", " ", line)
    return line


def _match(block: Block, shown: str, printed: str) -> re.Match[str] | None:
    pattern = ""
    for line in shown.splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        elif line.strip() == "?":
            pattern += r"((?:.+\n)+?)"
        else:
            pattern += ".*".join(re.escape(part) for part in _normal(block, line).split("...")) + r"\n"
    return re.fullmatch(pattern, "".join(_normal(block, line) + "\n" for line in printed.splitlines()))


def _updated(block: Block, shown: str, printed: str) -> str:
    """What the page should show: as it is where it fits, with lines in place of ``?``, else all that was printed."""
    match = _match(block, shown, printed)
    if match is None:
        return printed
    lines = printed.splitlines(keepends=True)
    spans = ([match.string.count("\n", 0, at) for at in match.span(index + 1)] for index in range(match.re.groups))
    found = ("".join(lines[begin:end]) for begin, end in spans)
    return "".join(next(found) if line.strip() == "?" else line for line in shown.splitlines(keepends=True))


def _check(block: Block, shown: str, printed: str, *, what: str) -> None:
    if _match(block, shown, printed) is None:
        raise AssertionError(f"{what.strip()}\nprinted\n{printed}\nand the page shows\n{shown}")


def _update(example: Example, block: Block, source: str) -> None:
    """Remember other text for a block; the page is written when all of its blocks have run."""
    if source != block.source and os.environ.get("PRISM_DOCS_UPDATE"):
        old = example.document.text[example.start : example.end]
        example.namespace["CHANGES"].append((example.start, old, old.replace(block.source, source, 1)))
        example.namespace["PAGE"] = example.path


def _setup(namespace: dict[str, Any]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="prism-docs-"))
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "spec").symlink_to(ROOT / "spec")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environ = {**os.environ, "PATH": path, "PYTHONPATH": python_path}
    namespace.update(FOLDER=str(folder), ENVIRON=environ, PRINTED="", CHANGES=[], __name__="page")


def _teardown(namespace: dict[str, Any]) -> None:
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(namespace["FOLDER"]):
            del sys.modules[name]
    shutil.rmtree(namespace["FOLDER"], ignore_errors=True)
    for start, old, new in sorted(namespace["CHANGES"], reverse=True):
        page = Path(namespace["PAGE"])
        text = page.read_text()
        page.write_text(text[:start] + new + text[start + len(old) :])


def pages() -> list[Path]:
    """The pages whose blocks are run."""
    return sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def collector() -> Callable[[Path, Any], Any]:
    """The hook of pytest that makes an item of every block, and of every page a folder."""
    collect = Sybil([_parse], path=str(ROOT), pattern="*.md", setup=_setup, teardown=_teardown).pytest()
    chosen = set(pages())
    return lambda file_path, parent: collect(file_path, parent) if file_path in chosen else None
