"""What the assistant processes of replay backends share: how they begin, whom they listen to, and how they end.

What an assistant does is its own module's; the launcher's side is prism_sdk.builtin.assistants.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from prism_sdk.runtime.parents import die_with_parent
from prism_sdk.runtime.wire import Channel, ChannelClosed


class Assisting(Protocol):
    """An assistant."""

    def serve(self) -> None:
        """Work until all sandbox ranks are gone."""

    def summary(self) -> dict[str, int]:
        """Facts for the launcher's report."""


def listen(
    channels: Sequence[Channel], heard: Callable[[tuple[Any, ...]], None], *,
    look: Callable[[], float | None] = lambda: None,
) -> None:  # fmt: skip
    """Hand on what sandbox ranks say, until all of them are gone.

    `look` is called each time before it is waited for them; it says for how many seconds at most, None: for ever.
    """
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel.sock, selectors.EVENT_READ, channel)
        while selector.get_map():
            for key, _ in selector.select(look()):
                try:
                    messages = key.data.receive_ready()
                except ChannelClosed:
                    selector.unregister(key.fileobj)
                    continue
                for message in messages:
                    heard(message)


def run(argv: Sequence[str], make: Callable[[Any], Assisting]) -> int:
    """Be an assistant: `argv` is the file with its facts, beside which it leaves a summary, and its parent's id."""
    die_with_parent(int(argv[1]))
    facts = pickle.loads(Path(argv[0]).read_bytes())
    if facts.cpus:
        os.sched_setaffinity(0, facts.cpus)
    torch.set_num_threads(1)
    assistant = make(facts)

    def leave(number: int, frame: object) -> None:
        Path(argv[0]).with_suffix(".json").write_text(json.dumps(assistant.summary()))
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    assistant.serve()
    signal.pause()
    return 0
