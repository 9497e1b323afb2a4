"""``prism view``: shows the page of a trace in a browser. Serving is the work of ``prism_sdk.report.serve``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from prism_sdk.errors import ExitCode


@click.command("view")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--compare", type=click.Path(path_type=Path), metavar="REAL",
              help="A real run of the same job, drawn beside it.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="The port; any free one otherwise.")
@click.option("--no-browser", is_flag=True, help="Print the address, and open no browser.")
def command(file: Path, compare: Path | None, port: int, no_browser: bool) -> int:
    """Show the page of a trace in a browser, from this machine to this machine only, until Ctrl-C.

    Every address has a random token. The page can show other steps, hands the trace to Perfetto's
    (which needs the plugin perfetto), and serves the file itself in ranges.

    \b
    Example:
        prism view real.prism
    """
    import webbrowser

    from prism_sdk.errors import UsageError
    from prism_sdk.report import report_content
    from prism_sdk.report.page import page_html
    from prism_sdk.report.serve import TraceServer

    def page(step: int | None, actions: str) -> str:
        content = report_content(file, compare=compare, step=step,
                                 report=lambda line: click.echo(f"prism: {line}", err=True))  # fmt: skip
        return page_html(content, title=f"Prism: {content['file']}", actions=actions)

    page(None, "")  # what is wrong with the file is said here, not in the browser
    try:
        server = TraceServer(file, page=page, export=_exporter(file), port=port)
    except OSError as error:
        raise UsageError(f"port {port} cannot be used: {error.strerror}", hint="leave --port out") from error
    click.echo(f"{server.url}\nCtrl-C ends it")
    if not no_browser:
        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        click.echo("ended", err=True)
    finally:
        server.close()
    return ExitCode.OK


def _exporter(file: Path) -> Callable[[Path], None] | None:
    from prism_sdk.conversion import convert
    from prism_sdk.plugins import PluginManager

    manager = PluginManager(report=lambda line: click.echo(line, err=True))
    if "perfetto" not in manager.exporters():
        click.echo("prism: no `Open in Perfetto`: install the plugin prismtrace-perfetto", err=True)
        return None

    def export(output: Path) -> None:
        convert(manager, [file], output=output, exporter="perfetto", overwrite=True,
                report=lambda line: click.echo(line, err=True))  # fmt: skip

    return export
