"""The viewer's server, asked over real sockets: ranges, tokens, names, and Perfetto's handshake in a browser."""

from __future__ import annotations

import gzip
import http.client
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import mixed_job

from prism_sdk.report import report_content
from prism_sdk.report.page import page_html
from prism_sdk.report.serve import TraceServer, parse_range

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceServer]:
    folder = tmp_path_factory.mktemp("view")
    path = mixed_job(folder / "a.prism")
    (folder / "secret.txt").write_text("secret")

    def page(step: int | None, actions: str) -> str:
        return page_html(report_content(path, step=step), title="a", actions=actions)

    def export(output: Path) -> None:
        output.write_bytes(gzip.compress(path.read_bytes()))

    with TraceServer(path, page=page, export=export) as running:
        yield running


def ask(
    server: TraceServer, name: str, *, method: str = "GET", token: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        address = f"/{server.token if token is None else token}/{name}"
        connection.putrequest(method, address, skip_host="Host" in headers)
        for key, value in headers.items():
            connection.putheader(key, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_it_listens_on_loopback_only(server: TraceServer) -> None:
    assert server._server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32 and server.url == f"http://127.0.0.1:{server.port}/{server.token}/"


def test_without_the_token_there_is_nothing(server: TraceServer) -> None:
    for token in ("", "x", server.token[:-1], server.token + "x", "%00", "%C3%A9", "[", "//["):
        for name in ("", "trace.prism", "perfetto"):
            assert ask(server, name, token=token)[0] in (400, 404)
    other = TraceServer(server.path, page=lambda step, actions: "")
    assert other.token != server.token
    other.close()


@pytest.mark.parametrize(
    "name", ["../secret.txt", "..%2fsecret.txt", "secret.txt", "/etc/passwd", "trace.prism/../x", "trace.prism%00",
             "%2e%2e/secret.txt", "a.prism", "perfetto/../../secret.txt"],
)  # fmt: skip
def test_no_path_leads_outside(server: TraceServer, name: str) -> None:
    status, _, body = ask(server, name)
    assert (status, body) == (404, b"404 Not Found\n")


def test_foreign_names_and_methods_are_refused(server: TraceServer) -> None:
    assert ask(server, "", Host="evil.example")[0] == 421
    assert ask(server, "", Host=f"evil.example:{server.port}")[0] == 421
    assert ask(server, "trace.prism", Host=f"localhost:{server.port}")[0] == 200
    for method in ("POST", "PUT", "DELETE"):
        assert ask(server, "trace.prism", method=method)[0] == 501


def test_ranges(server: TraceServer) -> None:
    whole = server.path.read_bytes()
    size = len(whole)
    status, headers, body = ask(server, "trace.prism")
    assert (status, body, headers["Accept-Ranges"]) == (200, whole, "bytes")
    for text, first, stop in (("0-7", 0, 8), ("8-", 8, size), ("-32", size - 32, size), (f"5-{size + 99}", 5, size)):
        status, headers, body = ask(server, "trace.prism", Range=f"bytes={text}")
        assert (status, body) == (206, whole[first:stop])
        assert headers["Content-Range"] == f"bytes {first}-{stop - 1}/{size}"
    status, headers, body = ask(server, "trace.prism", Range=f"bytes={size}-")
    assert (status, headers["Content-Range"], body) == (416, f"bytes */{size}", b"")
    assert ask(server, "trace.prism", Range="bytes=0-1,4-5")[2] == whole
    status, headers, body = ask(server, "trace.prism", method="HEAD", Range="bytes=0-7")
    assert (status, headers["Content-Length"], body) == (206, "8", b"")


@given(st.integers(1, 50), st.integers(0, 60), st.integers(0, 60))
def test_ranges_are_what_the_standard_says(size: int, first: int, last: int) -> None:
    data = bytes(range(size))

    def read(text: str) -> bytes | None:
        try:
            span = parse_range(text, size)
        except ValueError:
            return None
        return data if span is None else data[span[0] : span[1]]

    if first <= last:
        assert read(f"bytes={first}-{last}") == (data[first : last + 1] or None)
    else:
        assert read(f"bytes={first}-{last}") == data
    assert read(f"bytes={first}-") == (data[first:] or None)
    assert read(f"bytes=-{last}") == (data[-last:] if last else None)


@given(st.text(max_size=30))
def test_any_header_is_survived(text: str) -> None:
    try:
        span = parse_range(text, 10)
    except ValueError:
        return
    assert span is None or 0 <= span[0] < span[1] <= 10


def test_the_page_and_another_step(server: TraceServer) -> None:
    status, headers, body = ask(server, "")
    assert status == 200 and headers["Cache-Control"] == "no-store" and b"Open in Perfetto" in body
    assert b'"step":2' in ask(server, "?step=2")[2] or b'"step": 2' in ask(server, "?step=2")[2]
    status, _, body = ask(server, "?step=77")
    assert status == 404 and b"no step 77" in body
    assert [ask(server, f"?step={word}")[0] for word in ("-1", "abc", "1" * 23)] == [400] * 3
    assert server.token.encode() not in body


def test_handing_over_to_perfetto(server: TraceServer, browser: Any) -> None:
    """ui.perfetto.dev is played by a page that answers as it does; what arrives is what was exported."""
    context = browser.new_context()
    stand_in = """<script>addEventListener("message", (event) => {
        if (event.data === "PING") event.source.postMessage("PONG", event.origin);
        else if (event.data.perfetto) {
            const { fileName, buffer } = event.data.perfetto;
            document.title = `${fileName} ${buffer.byteLength}`;
        }
    });</script>"""
    context.route("https://ui.perfetto.dev/**", lambda route: route.fulfill(body=stand_in, content_type="text/html"))
    complaints: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(server.url)
    with context.expect_page() as opened:
        page.click("text=Open in Perfetto")
    hand = opened.value
    hand.on("console", lambda message: complaints.append(message.text))
    with context.expect_page() as window:
        hand.click("#open")
    window.value.wait_for_function("document.title.includes('pftrace')", timeout=15_000)
    size = len(gzip.compress(server.path.read_bytes()))
    assert window.value.title() == f"a.prism.pftrace.gz {size}"
    hand.locator("#said", has_text="Handed over.").wait_for(timeout=15_000)
    context.close()
    assert complaints == []


def test_the_command(tmp_path: Path) -> None:
    path = mixed_job(tmp_path / "a.prism")
    code = "from prism_sdk.cli.main import main; main()"
    with subprocess.Popen([sys.executable, "-c", code, "view", str(path), "--no-browser"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
                          cwd=ROOT) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]+)/\n", line)
            assert match, line
            connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=60)
            connection.request("GET", f"/{match[2]}/trace.prism")
            assert connection.getresponse().read() == path.read_bytes()
            if importlib.util.find_spec("prismtrace_perfetto"):
                connection.request("GET", f"/{match[2]}/trace.pftrace.gz")
                assert len(gzip.decompress(connection.getresponse().read())) > 1000
            connection.close()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0


def test_what_cannot_be_viewed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from prism_sdk.cli.main import run

    assert run(["view", str(tmp_path / "none.prism"), "--no-browser"]) == 3
    with TraceServer(mixed_job(tmp_path / "a.prism"), page=lambda step, actions: "") as taken:
        assert run(["view", str(tmp_path / "a.prism"), "--no-browser", "--port", str(taken.port)]) == 2
    assert "cannot be used" in capsys.readouterr().err
