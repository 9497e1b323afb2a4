"""What the assistant of backend nccl does where calls wait for what comes later, and ends that others wait for."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.laboratory import Laboratory

pytest.importorskip("torch")

from prism_sdk.runtime.assisting import listen
from prism_sdk.runtime.oncuda.lines import Lines
from prism_sdk.runtime.wire import Channel

pytestmark = pytest.mark.timeout(120)
HERE = Path(__file__).parent
JOB = str(HERE / "overlap_job.py")
PLUGIN = ("--plugin", str(HERE / "played_gpu.py"))  # with it the launcher is a process of its own


@pytest.mark.parametrize(
    ("backend", "word", "name"),
    [
        ("gloo", "prism_sdk.runtime.virtual", "the assistant that plays the virtual ranks ended before the ranks did"),
        ("played-nccl", "played_gpu", "the assistant with the virtual neighbours ended before the ranks did"),
    ],
    ids=["gloo's assistant", "nccl's assistant"],
)
def test_who_is_killed_is_named_though_others_wait_for_it(lab: Laboratory, backend: str, word: str, name: str) -> None:
    """Their connections break, or wait for half an hour."""
    graph = lab.graph((JOB, "killed", ""))
    ended, _ = lab.emulate(graph, (JOB, "killed", word), "0,1", *PLUGIN, "--backend", backend)
    assert ended.code == 1 and f"prism: error: {name}" in ended.err, ended.err
    assert "killed by SIGKILL" in ended.err


class Event:
    """Behind a call that is over when a test says so."""

    is_over = False

    def query(self) -> bool:
        return self.is_over


class Device:
    """Calls on the streams of a device."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, int]] = []
        self.events: dict[int, Event] = {}

    def issue(self, key: str, stream: str, call: int) -> tuple[Event, object]:
        self.made.append((key, stream, call))
        self.events[call] = Event()
        return self.events[call], None


def test_a_line_takes_the_stream_of_one_that_has_nothing_under_way() -> None:
    """Streams beyond the connections of a device would wait for one another."""
    device = Device()
    lines: Lines[str, int] = Lines(["one", "two"], device.issue, most_under_way=2)
    for call, key in enumerate(["a", "a", "a", "b", "c", "b"]):
        lines.add(key, call)
    made = device.made
    assert made == [("a", "two", 0), ("a", "two", 1), ("b", "one", 3), ("b", "one", 5)]
    assert lines.look() is not None
    device.events[3].is_over = True
    assert lines.look() is not None and len(made) == 4  # b has one under way still
    device.events[5].is_over = device.events[0].is_over = True
    assert lines.look() is None and made[4:] == [("a", "two", 2), ("c", "one", 4)]


def test_hundreds_of_calls_that_are_not_over_hold_up_no_other() -> None:
    """The one that lets them go on may be told of last."""
    device = Device()
    lines: Lines[str, int] = Lines(["one", "two"], device.issue)
    for call in range(600):
        lines.add("a", call)
    lines.add("b", 600)
    assert device.made[-1][::2] == ("b", 600) and len(device.made) < 600  # what the device takes, and the host goes on
    done = 0
    while lines.look() is not None:
        device.events[done].is_over = True
        done += 1
    assert 0 < done < 600
    assert [call for key, _, call in device.made if key == "a"] == list(range(600))


def test_who_listens_looks_after_what_waits_meanwhile() -> None:
    """Nobody says anything: without a look the calls would wait for ever."""
    here, there = socket.socketpair()
    looks: list[int] = []
    heard: list[Any] = []

    def look() -> float | None:
        looks.append(len(heard))
        if len(looks) == 5:
            there.close()
        return 0.001

    with here:
        listen([Channel(here)], heard.append, look=look)
    assert len(looks) >= 5 and not heard
