"""Talks with a process at the other end of a channel without ever blocking on it, beside others in one selector.

It knows nothing of what the messages mean, and who the peer is says its subclass.
"""

from __future__ import annotations

import selectors
from dataclasses import dataclass, field
from typing import Any

from prism_sdk.runtime.wire import Channel, ChannelClosed, OutboundQueue


@dataclass
class Peer:
    """One end of a conversation; without a channel nobody has come yet, or they are gone."""

    channel: Channel | None = field(default=None, kw_only=True)
    outbound: OutboundQueue | None = field(default=None, kw_only=True)

    def meet(self, selector: selectors.BaseSelector, channel: Channel) -> None:
        """Talk over `channel` from now on; `selector` gives this peer as the key's data."""
        self.channel, self.outbound = channel, OutboundQueue(channel.sock)
        selector.register(channel.sock, selectors.EVENT_READ, self)

    def tell(self, selector: selectors.BaseSelector, message: tuple[Any, ...]) -> None:
        """Send what it can take, the rest when it can; nothing where nobody is there."""
        if self.outbound is None or self.channel is None:
            return
        if not self.outbound.send(message):
            selector.modify(self.channel.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def hear(self, selector: selectors.BaseSelector, events: int) -> list[tuple[Any, ...]] | None:
        """What it has said, for the events of a turn; what it can take now is sent. None: it has just gone."""
        if self.channel is None:
            return []
        if events & selectors.EVENT_WRITE and self.outbound is not None and self.outbound.flush():
            selector.modify(self.channel.sock, selectors.EVENT_READ, self)
        if not events & selectors.EVENT_READ:
            return []
        try:
            return self.channel.receive_ready()
        except ChannelClosed:
            selector.unregister(self.channel.sock)
            self.channel.close()
            self.channel = self.outbound = None
            return None
