"""Serves the page of one trace, the trace itself in ranges, and a copy for Perfetto, to this machine alone.

It analyses nothing and converts nothing: functions that do are handed in. Nothing but fixed names is ever looked up, so
no path leads to another file. Whoever asks must know a random token, which is part of every address, and must have
called this server by its own name: a page that makes a foreign name point here (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import html
import json
import os
import re
import secrets
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from prism_sdk.errors import PrismError, UsageError
from prism_sdk.report.page import asset
from prism_sdk.workfolders import work_folder
from prismtrace import PrismTraceError

__all__ = ["TraceServer", "parse_range"]

_BLOCK_BYTES = 1 << 20
_PERFETTO = "https://ui.perfetto.dev"


def parse_range(text: str | None, size: int) -> tuple[int, int] | None:
    """The first byte and the one behind the last of a ``Range`` header (RFC 9110, section 14); None: the whole.

    Several ranges and units other than bytes are answered with the whole, as the standard allows.

    Raises:
        ValueError: no byte of the range exists.
    """
    match = re.fullmatch(r"\s*bytes\s*=\s*(\d{0,20})\s*-\s*(\d{0,20})\s*", text or "")
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        first, stop = max(0, size - int(match[2])), size
        if int(match[2]) == 0:
            raise ValueError("the last 0 bytes are no range")
    else:
        first, stop = int(match[1]), size if match[2] == "" else int(match[2]) + 1
        if match[2] != "" and int(match[2]) < first:
            return None
    stop = min(stop, size)
    if first >= stop:
        raise ValueError(f"there are {size} bytes")
    return first, stop


class TraceServer:
    """One trace on a port of the loopback interface; ``with`` starts and stops it.

    Args:
        path: the trace.
        page: makes the page for a step (None: the default one), given HTML for its head.
        export: writes a Perfetto trace of the file to a path; None where no plugin can.
        port: 0 for any that is free.

    Raises:
        OSError: the port is taken.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, page: Callable[[int | None, str], str],
        export: Callable[[Path], None] | None = None, port: int = 0,
    ) -> None:  # fmt: skip
        self.path = Path(path)
        self.token = secrets.token_urlsafe(24)
        self._page, self._export = page, export
        self._pages: dict[tuple[int | None, int], bytes] = {}
        self._exported: tuple[int, Path] | None = None
        self._folders = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, self))
        self._server.daemon_threads = True
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def serve_forever(self) -> None:
        """Answer requests until ``close`` or an interrupt."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop, and remove what was exported."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()
        self._folders.close()

    def __enter__(self) -> TraceServer:
        self._thread = threading.Thread(target=self.serve_forever, name="prism view", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def page(self, step: int | None) -> bytes:
        """The page for a step; made once for each state of the file."""
        key = (step, self.path.stat().st_mtime_ns)
        with self._lock:
            if key not in self._pages:
                if len(self._pages) > 8:
                    self._pages.clear()
                actions = '<a class="button" href="trace.prism" download>Trace file</a>'
                if self._export is not None:
                    actions += '<a class="button" href="perfetto" target="_blank">Open in Perfetto</a>'
                actions += ('<form><label>Step <input name="step" type="number" min="0"></label> '
                            '<button>Show</button></form>')  # fmt: skip
                self._pages[key] = self._page(step, actions).encode("utf-8")
            return self._pages[key]

    def perfetto_page(self, nonce: str) -> bytes | None:
        """The page that hands the trace to Perfetto's; None where it cannot be exported."""
        if self._export is None:
            return None
        name = json.dumps(self.path.name).replace("<", "\\u003c")
        title = html.escape(f"{self.path.name} in Perfetto")
        script = f'const fileName = {name}, PERFETTO = "{_PERFETTO}";\n{asset("perfetto.js")}'
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><body>'
            "<h1>Open in Perfetto</h1>"
            f"<p>The trace is converted on this machine and handed to a window of {_PERFETTO}, which keeps it in the "
            'browser.</p><p><button id="open" type="button">Open</button> <span id="said" role="status"></span></p>'
            f'<script nonce="{nonce}">{script}</script>'
        ).encode()

    def perfetto_trace(self) -> Path | None:
        """The exported copy, made when first asked for, and again when the file has changed."""
        if self._export is None:
            return None
        with self._lock:
            changed = self.path.stat().st_mtime_ns
            if self._exported is None or self._exported[0] != changed:
                if self._exported is None:
                    target = self._folders.enter_context(work_folder("prism-view-")) / "trace.pftrace.gz"
                else:
                    target = self._exported[1]
                self._export(target)
                self._exported = (changed, target)
            return self._exported[1]


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "prism", ""
    timeout = 60

    def __init__(self, owner: TraceServer, *args: Any) -> None:
        self._owner = owner
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the address has the token."""

    def do_HEAD(self) -> None:
        """Headers only."""
        self.do_GET()

    def do_GET(self) -> None:
        """A page, the trace, or its copy for Perfetto."""
        if self.headers.get("Host") not in (f"127.0.0.1:{self._owner.port}", f"localhost:{self._owner.port}"):
            self._fail(HTTPStatus.MISDIRECTED_REQUEST)
            return
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self._fail(HTTPStatus.BAD_REQUEST)
            return
        token, _, name = asked.path.lstrip("/").partition("/")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._owner.token.encode()):
            self._fail(HTTPStatus.NOT_FOUND)
            return
        try:
            self._answer(name, asked.query)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except UsageError as error:  # there is no such step
            self._send(HTTPStatus.NOT_FOUND, f"{error}\n".encode(), "text/plain; charset=utf-8")
        except (PrismError, PrismTraceError, OSError) as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode(), "text/plain; charset=utf-8")

    def _answer(self, name: str, query: str) -> None:
        if name == "":
            step = parse_qs(query).get("step", [""])[0]
            if step and not re.fullmatch(r"[0-9]{1,9}", step):
                self._fail(HTTPStatus.BAD_REQUEST)
                return
            number = int(step) if step else None
            self._send(HTTPStatus.OK, self._owner.page(number), "text/html; charset=utf-8")
        elif name == "trace.prism":
            self._send_file(self._owner.path, "application/vnd.prismtrace")
        elif name == "perfetto":
            nonce = secrets.token_urlsafe(16)
            found = self._owner.perfetto_page(nonce)
            if found is None:
                self._fail(HTTPStatus.NOT_FOUND)
                return
            policy = f"default-src 'none'; script-src 'nonce-{nonce}'; connect-src 'self'"
            self._send(HTTPStatus.OK, found, "text/html; charset=utf-8", policy=policy)
        elif name == "trace.pftrace.gz":
            copy = self._owner.perfetto_trace()
            if copy is None:
                self._fail(HTTPStatus.NOT_FOUND)
                return
            self._send_file(copy, "application/octet-stream")
        else:
            self._fail(HTTPStatus.NOT_FOUND)

    def _fail(self, status: HTTPStatus) -> None:
        self._send(status, f"{status.value} {status.phrase}\n".encode(), "text/plain; charset=utf-8")

    def _head(self, status: HTTPStatus, length: int, kind: str, **headers: str) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Type": kind, "Content-Length": str(length), "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", **headers,
        }.items():  # fmt: skip
            self.send_header(key, value)
        self.end_headers()

    def _send(self, status: HTTPStatus, body: bytes, kind: str, *, policy: str | None = None) -> None:
        self._head(status, len(body), kind, **({"Content-Security-Policy": policy} if policy else {}))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_file(self, path: Path, kind: str) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            try:
                span = parse_range(self.headers.get("Range"), size)
            except ValueError:
                self._head(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, kind, **{"Content-Range": f"bytes */{size}"})
                return
            headers = {"Accept-Ranges": "bytes"}
            first, stop = span or (0, size)
            if span is not None:
                headers["Content-Range"] = f"bytes {first}-{stop - 1}/{size}"
            self._head(HTTPStatus.OK if span is None else HTTPStatus.PARTIAL_CONTENT, stop - first, kind, **headers)
            if self.command != "HEAD":
                self._copy(file, first, stop)

    def _copy(self, file: BinaryIO, first: int, stop: int) -> None:
        file.seek(first)
        while first < stop:
            block = file.read(min(_BLOCK_BYTES, stop - first))
            if not block:
                # the file became shorter: the length that was promised cannot be kept
                self.close_connection = True
                return
            self.wfile.write(block)
            first += len(block)
