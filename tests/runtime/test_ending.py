"""SIGTERM at the worst moments: what was traced is written out once and whole, whoever does it."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prism_sdk.runtime.ending import KILLED, undisturbed
from prismtrace import TraceReader

UNITS = 50

# a rank whose writing takes 0.8 s; it says when it is at the moment that a test asks for
RANK = """
    import ctypes, os, signal, sys, time
    from functools import partial
    from pathlib import Path
    from prism_sdk.runtime.ending import KILLED, Once, end_on_sigterm
    from prism_sdk.runtime.tracer import now_ns, open_shard, Tracer
    from prismtrace import GraphKind

    def write_slowly(*arguments):
        print("writing", flush=True)
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            time.sleep(0.01)
        add_units(*arguments)

    tracer = Tracer(0, open_shard(Path(sys.argv[1]), 0, GraphKind.OBSERVED, 1, {}))
    add_units, tracer.writer.add_units = tracer.writer.add_units, write_slowly
    written = Once()
    finish = lambda status: written.run(partial(tracer.finish, status))
    moment = sys.argv[2]
    if moment == "program's own handler":
        def own(*_):
            time.sleep(0.7)  # saves a checkpoint
            finish("complete")
            os._exit(7)
    def dies(*_):
        raise RuntimeError("a worker of the data loader was killed")
    signal.signal(signal.SIGCHLD, dies)
    end_on_sigterm(partial(finish, "aborted"), partial(os._exit, KILLED), waits_in_native_code=True)
    for _ in range(50):
        tracer.compute_until(now_ns() + 1)
        while now_ns() <= tracer.last_ns:
            pass
    if moment == "flush":
        try:
            tracer.flush()
        finally:
            time.sleep(30)
    elif moment == "finish":
        finish("complete")
        os._exit(0)
    elif moment == "program's own handler":
        signal.signal(signal.SIGTERM, own)
        print("ready", flush=True)
        time.sleep(30)
    else:  # in native code, where no Python handler runs, for so long
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # another thread takes the signal
        print("ready", flush=True)
        ctypes.CDLL(None).usleep(int(float(moment) * 1e6))
        time.sleep(30)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("moment", "code", "status"),
    [
        ("flush", KILLED, "aborted"),
        ("finish", 0, "complete"),  # it is told to end when it is about to
        ("0.1", KILLED, "aborted"),
        ("0.9", KILLED, "aborted"),  # the handler comes while the other thread writes
        ("20", KILLED, "aborted"),
        ("program's own handler", 7, "complete"),
    ],
)
def test_what_was_traced_is_written_once_and_whole(tmp_path: Path, moment: str, code: int, status: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    process = subprocess.Popen([sys.executable, script, tmp_path, moment], text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    at = process.stdout.readline()
    assert at in ("writing\n", "ready\n")
    if at == "writing\n":
        process.send_signal(signal.SIGCHLD)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    if moment != "program's own handler":
        process.send_signal(signal.SIGCHLD)
    process.communicate(timeout=30)
    assert process.returncode == code
    with TraceReader(tmp_path / "rank-00000.prism") as reader:
        assert reader.num_units(0) >= UNITS
        assert reader.metadata["rank.0.status"] == status


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Numbers of the signals that were handled; the handler of SIGUSR1 raises."""
    numbers: list[int] = []

    def handler(number: int, _: Any) -> None:
        numbers.append(number)
        if number == signal.SIGUSR1:
            raise RuntimeError("a worker of the data loader was killed")

    before = {number: signal.signal(number, handler) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield numbers
    for number, old in before.items():
        signal.signal(number, old)


def test_a_signal_is_not_lost_because_the_handler_of_another_raises(handled: list[int]) -> None:
    with pytest.raises(RuntimeError, match="data loader"), undisturbed():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        assert handled == []
    assert handled == [signal.SIGUSR1, signal.SIGUSR2]


def test_a_handler_that_raises_while_handlers_are_put_back_leaves_none_away(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = signal.signal

    def put_and_raise(number: int, handler: Any) -> Any:
        old = put(number, handler)
        if number == signal.SIGUSR1 and is_inside:
            signal.raise_signal(signal.SIGUSR1)
        return old

    is_inside = False
    monkeypatch.setattr(signal, "signal", put_and_raise)
    with pytest.raises(RuntimeError, match="data loader"), undisturbed():
        is_inside = True
    is_inside = False
    handled.clear()
    signal.raise_signal(signal.SIGUSR2)
    assert handled == [signal.SIGUSR2]
