"""Where waits stand in a trace when a program asks for communication on streams of its own, on made-up streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from prism_sdk.runtime.calls import Call, GroupState  # noqa: E402
from prism_sdk.runtime.oncuda import clock  # noqa: E402
from prism_sdk.runtime.oncuda.streams import follow_streams  # noqa: E402
from prism_sdk.runtime.tracer import Tracer, now_ns, open_shard  # noqa: E402
from prismtrace import ABSENT, DType, GraphKind, Op, TraceReader, UnitKind  # noqa: E402


@dataclass(frozen=True)
class Stream:
    cuda_stream: int


MAIN, GATHER, COPY = Stream(1), Stream(2), Stream(3)


class Device:
    """A made-up device: the stream that is current, and events that do nothing."""

    def __init__(self, folder: Path) -> None:
        self.current = MAIN
        self.folder = folder
        self.tracer = Tracer(0, open_shard(folder, 0, GraphKind.BARE, 2, {}))
        self.group = GroupState(name="g", ranks=(0, 1), group_rank=0, backend="nccl", description="", group_id=1)
        follow_streams(self.tracer)

    def gather(self, stream: Stream) -> int:
        """A synchronous collective on a stream; its unit."""
        self.current = stream
        call = Call(Op.ALL_GATHER, self.group, lambda: None, is_async=False, dtype=DType.FLOAT32)
        posted = now_ns()
        unit = self.tracer.communication(call, posted, self.group.take_seq())
        self.tracer.wait(unit, posted, now_ns(), blocked=True)
        self.current = MAIN
        return unit

    def event(self, stream: Stream | None = None) -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def rows(self) -> list[tuple[UnitKind, int]]:
        """Kinds and what each awaits, of all rows but those of computing."""
        self.tracer.finish("complete")
        with TraceReader(self.folder / "rank-00000.prism") as reader:
            units = reader.units(0)
            found = [(UnitKind(kind), awaits) for kind, awaits in zip(units.kind, units.awaits, strict=True)]
            assert all(units.end_ns[i] != ABSENT for i in range(len(units)))
        return [row for row in found if row[0] is not UnitKind.COMPUTE]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    class Event:
        def record(self, stream: Any = None) -> None:
            pass

        def wait(self, stream: Any = None) -> None:
            pass

    made: list[Device] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made[0].current if made else MAIN)
    monkeypatch.setattr(clock, "current_device", lambda: 0)
    monkeypatch.setattr(clock, "current_stream", lambda _: (made[0].current if made else MAIN).cuda_stream)
    made.append(Device(tmp_path))
    assert made[0].tracer.streams is not None
    made[0].tracer.streams.follow()
    yield made[0]


def test_a_call_on_the_main_stream_is_waited_for_at_once(device: Device) -> None:
    first, second = device.gather(MAIN), device.gather(MAIN)
    assert device.rows() == [
        (UnitKind.COLLECTIVE, ABSENT), (UnitKind.WAIT, first), (UnitKind.COLLECTIVE, ABSENT), (UnitKind.WAIT, second),
    ]  # fmt: skip


def test_one_on_another_stream_where_the_main_stream_waits_for_it(device: Device) -> None:
    first = device.gather(GATHER)
    event = device.event(GATHER)
    second = device.gather(GATHER)
    event.wait(MAIN)
    event.wait(MAIN)  # it has waited already
    device.event(GATHER).wait()  # the current stream is the main one
    assert device.rows() == [
        (UnitKind.COLLECTIVE, ABSENT), (UnitKind.COLLECTIVE, ABSENT), (UnitKind.WAIT, first), (UnitKind.WAIT, second),
    ]  # fmt: skip


def test_a_wait_passes_through_other_streams(device: Device) -> None:
    unit = device.gather(GATHER)
    device.event(GATHER).wait(COPY)
    device.event(COPY).wait(MAIN)
    assert device.rows() == [(UnitKind.COLLECTIVE, ABSENT), (UnitKind.WAIT, unit)]


def test_events_from_before_or_elsewhere_wait_for_nothing(device: Device) -> None:
    early = device.event(GATHER)
    device.gather(GATHER)
    early.wait(MAIN)
    device.event(COPY).wait(MAIN)
    again = device.event(GATHER)
    again.record(MAIN)  # recorded again, where nothing is ahead
    again.wait(MAIN)
    assert device.rows() == [(UnitKind.COLLECTIVE, ABSENT)]
