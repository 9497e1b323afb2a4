"""Frames over a socket, and the launcher's end of it: no message waits for the next one."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Any

import pytest

from prism_sdk.runtime import wire
from prism_sdk.runtime.config import LaunchMode
from prism_sdk.runtime.host import Policy, RankHost
from prism_sdk.runtime.ranks import RankSpec

pytestmark = pytest.mark.timeout(30)


def test_messages_come_one_by_one_and_in_one_go() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = wire.Channel(ours), wire.Channel(theirs)
    for number in range(3):
        sender.send(("message", number, b"x" * 10_000))
    assert receiver.receive()[1] == 0
    assert [message[1] for message in receiver.take_ready()] == [1, 2]
    sender.close()
    with pytest.raises(wire.ChannelClosed):
        receiver.receive()
    receiver.close()


def test_sending_to_a_slow_reader_does_not_block() -> None:
    ours, theirs = socket.socketpair()
    queue, reader = wire.OutboundQueue(ours), wire.Channel(theirs)
    assert not queue.send(("large", b"y" * 4_000_000))
    assert not queue.send(("small",))
    received: list[tuple[Any, ...]] = []
    while len(received) < 2:
        received += reader.receive_ready()
        queue.flush()
    assert [message[0] for message in received] == ["large", "small"]
    ours.close()
    reader.close()


def test_waiting_works_beyond_a_thousand_descriptors() -> None:
    """select() would refuse them, and a launcher has a socket for each rank."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("too few descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    ours, theirs = socket.socketpair()
    high = os.dup2(theirs.fileno(), 1500)
    try:
        with socket.socket(fileno=high) as sock:
            assert not wire.wait_readable(sock, 0.0)
            ours.send(b"x")
            assert wire.wait_readable(sock, 1.0)
    finally:
        ours.close()
        theirs.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class _Listens(Policy):
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def start(self) -> None:
        """Nothing is forked: the test plays the rank."""

    def message(self, rank: int, message: tuple[Any, ...]) -> None:
        self.heard.append(message)


def test_a_message_right_behind_the_greeting_is_heard(tmp_path: Path) -> None:
    """Both arrive in one read when the launcher is busy; the rank says nothing more until it is answered."""
    token = secrets.token_hex(8)
    policy = _Listens()
    spec = RankSpec(
        mode=LaunchMode.RECORD, rank=0, world_size=1, local_rank=0, target="", is_module=False, arguments=(),
        parts_dir=tmp_path, token=token,
    )  # fmt: skip
    host = RankHost([spec], token=token, policy=policy, environment=dict(os.environ))
    try:
        channel = wire.connect(token)
        channel.send(("hello", 0, os.getpid()))
        channel.send(("question",))
        host._accept()
        assert policy.heard == [("question",)]
        channel.close()
    finally:
        host.ranks[0].pid = 0
        host._end_processes()
