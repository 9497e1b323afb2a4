"""``prism plugin new``: writes the skeleton of a plugin. What a plugin may do is in ``prism_sdk.abc``."""

from __future__ import annotations

import importlib.resources
import keyword
import re
import shlex
import shutil
import string
from pathlib import Path

import click

from prism_sdk.cli.output import echo_json
from prism_sdk.errors import ExitCode, OutputError, UsageError
from prism_sdk.plugins import PluginManager
from prism_sdk.wording import counted
from prism_sdk.workfolders import work_folder

# template -> where it goes; both may say $name
_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "init.py.txt": "src/prismtrace_$name/__init__.py",
    "adapter.py.txt": "src/prismtrace_$name/adapter.py",
    "test_plugin.py.txt": "tests/test_$name.py",
}
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")  # a distribution's name ends with no dash and has no two in a row
_LONGEST = 64  # characters: file systems have names of 255 bytes at most


@click.group("plugin")
def command() -> None:
    """Start a plugin of your own.

    The skeleton works at once: install it, run its tests, then turn it to your framework one hook at a time.

    \b
    Example:
        prism plugin new mytrainer
        pip install -e 'prismtrace-mytrainer[test]'
        pytest prismtrace-mytrainer
    """


@command.command("new")
@click.argument("name", metavar="NAME")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Where to write it.  [default: prismtrace-NAME]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def new(name: str, output: Path | None, as_json: bool) -> int:
    """Write a framework adapter called NAME, with its tests, into a new folder."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST or keyword.iskeyword(name):
        like = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_0123456789")[:_LONGEST]
        example = like if _NAME.fullmatch(like) and not keyword.iskeyword(like) else "mytrainer"
        hint = f"small letters, digits and single _ between them, beginning with a letter, such as {example}"
        raise UsageError(f"{name!r:.80} cannot be the name of a plugin", hint=hint)
    _refuse_taken(name)
    folder = output or Path(f"prismtrace-{name.replace('_', '-')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already", hint="give another folder with --output")
    files = _write(name, folder)
    if as_json:
        echo_json({"folder": folder, "files": files})
    else:
        click.echo(f"{folder}: {counted(len(files), 'file')}. Next:")
        click.echo(f"    pip install -e {shlex.quote(f'{folder}[test]')}")
        click.echo(f"    pytest {shlex.quote(str(folder))}")
    return ExitCode.OK


def _refuse_taken(name: str) -> None:
    """Installed, a plugin would take the place of another of its name, or be told apart from it by nobody."""
    for one in PluginManager().records():
        if name in (one.name, *one.adapters):
            owner = one.distribution or "Prism"
            raise UsageError(f"{name!r} is taken: {owner} has a plugin or adapter of that name",
                             hint=f"choose another name, such as my_{name}")  # fmt: skip


def _write(name: str, folder: Path) -> list[str]:
    """Write the skeleton, whole or not at all; the names of its files."""
    templates = importlib.resources.files("prism_sdk") / "testing" / "skeleton"
    written = []
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(".prism-plugin-", beside=folder) as work:
            for template, target in _FILES.items():
                text = string.Template((templates / template).read_text(encoding="utf-8")).substitute(name=name)
                written.append(string.Template(target).substitute(name=name))
                path = work / "plugin" / written[-1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            if folder.exists():
                folder.rmdir()
            shutil.move(work / "plugin", folder)
    except OSError as error:
        where = "" if error.filename in (None, str(folder)) else f"{error.filename}: "
        raise OutputError(str(folder), reason=where + (error.strerror or str(error))) from error
    return written
