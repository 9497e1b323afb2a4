"""What becomes of the operations of a rank when one of them breaks off: nobody waits for what will not come."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from prism_sdk.abc import CarriedOperation  # noqa: E402
from prism_sdk.errors import RunError  # noqa: E402
from prism_sdk.runtime.announce import SameBoard  # noqa: E402
from prism_sdk.runtime.calls import Call, GroupState  # noqa: E402
from prism_sdk.runtime.carry import Carrier  # noqa: E402
from prism_sdk.runtime.transport import Communicator, Transport  # noqa: E402
from prismtrace import Op  # noqa: E402

pytestmark = pytest.mark.timeout(60)


class Silent(Transport):
    """Nobody ever answers."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def send(self, tensor: Any, position: int, lane: int) -> Any:
        raise AssertionError("only receives are asked for here")

    def receive(self, tensor: Any, position: int, lane: int) -> Any:
        self.asked.set()
        return SimpleNamespace(wait=threading.Event().wait)


class Broken(Silent):
    """The connection is gone."""

    def receive(self, tensor: Any, position: int, lane: int) -> Any:
        raise RuntimeError("connection closed by peer")


@pytest.fixture
def carrier() -> Iterator[Carrier]:
    ours, theirs = socket.socketpair()
    board = os.memfd_create("same", 0)
    groups: dict[int, Transport] = {1: Silent(), 2: Broken()}
    communicators = {number: Communicator(transport, (0, 1), (0,)) for number, transport in groups.items()}
    with theirs:
        yield Carrier(0, (0,), communicators=communicators, control=ours, board=SameBoard(board, 1, 9))
    os.close(board)


def broadcast(carrier: Carrier, group_id: int, seq: int) -> Any:
    group = GroupState("g", (0, 1), 0, "gloo", "", group_id)
    out = torch.zeros(4)
    call = Call(Op.BROADCAST, group, lambda: None, outputs=[out], root=1)
    expected: Any = SimpleNamespace(group_id=group_id, seq=seq, stream=object())
    return carrier.carry(CarriedOperation(call, expected, (seq, 0), lambda: None))


def test_all_end_with_the_one_that_breaks_off(carrier: Carrier) -> None:
    """The program may wait first for one of another group, whose members wait for what broke off."""
    waiting = broadcast(carrier, 1, 0)
    behind = broadcast(carrier, 1, 1)
    silent: Any = carrier._communicators[1].transport
    assert silent.asked.wait(20)
    broken = broadcast(carrier, 2, 2)
    later = broadcast(carrier, 1, 3)
    for carriage in (behind, waiting, later, broken):
        with pytest.raises(RunError, match=r"broadcast in a group of 2 .* broke off: connection closed by peer"):
            carriage.wait()
        assert carriage.is_done()
