"""Who waits for whom between streams: an FSDP-like order of events on made-up streams, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from prism_sdk.runtime.oncuda.streams import StreamFollower, follow_events


@dataclass(eq=True, frozen=True)
class Stream:
    cuda_stream: int


class World:
    """Streams of a made-up device, the one that is current, and what the main stream was seen to wait for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = self
        self.main, self.gather, self.copy = Stream(1), Stream(2), Stream(3)
        self.current = self.main
        self.waits: list[list[int]] = []
        self.calls: list[str] = []

        class Event:
            def record(self, stream: Any = None) -> None:
                world.calls.append("record")

            def wait(self, stream: Any = None) -> None:
                world.calls.append(f"wait on {(stream or world.current).cuda_stream}")

            def synchronize(self) -> None:
                world.calls.append("synchronize")

        self.event_class = Event
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.current_stream", lambda: world.current)
        monkeypatch.setattr("torch.cuda.default_stream", lambda: world.main)
        self.follower = StreamFollower(self._waited)
        follow_events(self.follower, Event)

    def _waited(self, units: list[int], wait: Callable[[], None]) -> None:
        self.waits.append(units)
        wait()

    def communicates(self, unit: int, stream: Stream) -> bool:
        """A synchronous call on a stream: whether it is no wait of the main one."""
        self.current = stream
        taken = self.follower.takes(unit)
        self.current = self.main
        return taken

    def recorded(self, stream: Stream | None = None) -> Any:
        event = self.event_class()
        event.record(stream)
        return event


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_the_main_stream_waits_where_it_waits_for_an_event_behind_the_collective(world: World) -> None:
    assert world.communicates(7, world.gather)
    event = world.recorded(world.gather)
    assert world.communicates(8, world.gather)
    assert world.waits == []
    event.wait(world.main)
    assert world.waits == [[7]]
    event.wait(world.main)  # it has waited already
    assert world.waits == [[7]]
    world.recorded(world.gather).wait()  # the current stream is the main one
    assert world.waits == [[7], [8]]
    assert world.calls.count("wait on 1") == 3


def test_a_wait_passes_through_other_streams(world: World) -> None:
    assert world.communicates(3, world.gather)
    world.recorded(world.gather).wait(world.copy)
    assert world.waits == []
    world.recorded(world.copy).wait(world.main)
    assert world.waits == [[3]]


def test_events_recorded_before_or_elsewhere_wait_for_nothing(world: World) -> None:
    early = world.recorded(world.gather)
    assert world.communicates(1, world.gather)
    early.wait(world.main)
    world.recorded(world.copy).wait(world.main)
    assert world.waits == []
    event = world.recorded(world.gather)
    event.record(world.main)  # recorded again, where nothing is ahead
    event.wait(world.main)
    assert world.waits == []


def test_the_host_that_waits_for_an_event_holds_up_the_main_stream(world: World) -> None:
    assert world.communicates(5, world.gather)
    world.recorded(world.gather).synchronize()
    assert world.waits == [[5]]
    assert world.calls[-1] == "synchronize"


def test_a_call_on_the_main_stream_is_a_wait_of_its_own(world: World) -> None:
    assert world.communicates(4, world.gather)
    assert not world.communicates(4, world.main)  # the same handle is waited for by the main stream itself
    world.recorded(world.gather).wait(world.main)
    assert world.waits == []
