"""``prism redact``: writes a copy of a trace that can be shown. Redacting is the work of ``prismtrace.redact``."""

from __future__ import annotations

from pathlib import Path

import click

from prism_sdk.cli.output import echo_json, format_bytes
from prism_sdk.cli.outputs import check_output
from prism_sdk.errors import ExitCode, UsageError
from prism_sdk.wording import counted


@click.command("redact")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", required=True, help="The file to write."
)
@click.option(
    "--key",
    metavar="TEXT",
    help="Makes pseudonyms reproducible: the same name gives the same pseudonym under the same key. Keep it secret.",
)
@click.option("--key-file", type=click.Path(path_type=Path), metavar="FILE", help="Takes the key from a file.")
@click.option("--name", "names", metavar="WORD", multiple=True, help="Replace this word too (repeatable).")
@click.option(
    "--strings",
    type=click.Choice(["secrets", "all"]),
    default="secrets",
    help="Replace what looks like a secret in labels and names (default), or all of them.",
)
@click.option("--keep-payloads", is_flag=True, help="Keep payloads and attachments, as they are.")
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    source: Path,
    output: Path,
    key: str | None,
    key_file: Path | None,
    names: tuple[str, ...],
    strings: str,
    keep_payloads: bool,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Write a copy of a trace without host names, paths, user names, e-mail and IP addresses, and without payloads.

    Each becomes a pseudonym (`host-3f9a01c2d4`); times, sizes and structure stay. At the end the whole output is
    decompressed and searched for everything that was replaced; if any of it is left, nothing is written.

    \b
    Example:
        prism redact real.prism -o public.prism --key-file my.key --name projectname

    A word that looks like any other word is not recognised: name it with --name, or use --strings all.
    """
    from prismtrace import redact
    from prismtrace.redact import KEPT, REDACTED, is_too_short

    if key is not None and key_file is not None:
        raise UsageError("--key and --key-file are both given", hint="leave one out")
    secret: str | bytes | None = key
    if key_file is not None:
        secret = key_file.read_bytes().strip()
    if secret is not None and not secret:
        raise UsageError("the key is empty", hint="give some text, or leave the option out for a random key")
    short = next((name for name in names if is_too_short(name)), None)
    if short is not None:
        raise UsageError(f"--name {short!r} is shorter than 3 characters: it would be found everywhere")
    check_output(output, overwrite=overwrite, sources=[source])
    report = redact(
        source,
        output,
        key=secret,
        names=names,
        keep_payloads=keep_payloads,
        all_strings=strings == "all",
        overwrite=overwrite,
    )
    if as_json:
        echo_json({"file": source, "output": output, "report": report, "redacted": REDACTED, "kept": KEPT})
        return ExitCode.OK
    counts = ", ".join(f"{number} {kind}" for kind, number in report.counts.items()) or "nothing"
    changed = f"{report.num_texts_changed} of {counted(report.num_texts, 'text')}, and in metadata"
    click.echo(f"wrote {output}: replaced {counts} in {changed}")
    attachments = counted(report.num_attachments_dropped, "attachment")
    click.echo(f"dropped {counted(report.num_payloads_dropped, 'payload')}, {attachments}")
    click.echo(f"searched {format_bytes(report.num_bytes_checked)} of output: none of it is left")
    if not report.reproducible:
        click.echo("pseudonyms are of this file only: --key makes them the same in every file")
    click.echo("\nredacted:")
    for line in REDACTED:
        click.echo(f"  {line}")
    click.echo("kept:")
    for line in KEPT:
        click.echo(f"  {line}")
    return ExitCode.OK
