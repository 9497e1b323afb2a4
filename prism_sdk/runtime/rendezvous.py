"""Where the ranks of a job meet: address and port of machine 0, and what a launch on several machines waits for.

The meeting itself is torch's, inside the ranks; nothing here talks to another machine.
"""

from __future__ import annotations

import socket

from prism_sdk.errors import PortInUseError
from prism_sdk.runtime.config import LaunchConfig
from prism_sdk.wording import counted


def master_of(config: LaunchConfig) -> tuple[str, int]:
    """Address and port of the rendezvous, as torchrun takes them from its flags; a free port when none is given."""
    endpoint = (config.rdzv_endpoint or "").rpartition(":")
    address = config.master_addr or endpoint[0] or "127.0.0.1"
    port = config.master_port or (int(endpoint[2]) if endpoint[2].isdigit() else None)
    if port is None and config.num_nodes > 1:
        port = 29500
    return address, free_port() if port is None else port


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def check_port(config: LaunchConfig, address: str, port: int) -> None:
    """Raise PortInUseError when the rendezvous port is taken on this machine."""
    if config.node_rank == 0 and address in ("127.0.0.1", "localhost"):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((address, port))
            except OSError:
                raise PortInUseError(address, port=port) from None


def waiting_for(config: LaunchConfig, address: str, port: int) -> str:
    """What to tell whoever starts the job on one machine of several: nothing runs before all of them are there."""
    others = config.num_nodes - 1
    if config.node_rank == 0:
        numbers = "1" if others == 1 else f"1 to {others}"
        return (
            f"machine 0 of {config.num_nodes}: its ranks wait at port {port} for {counted(others, 'other machine')}, "
            f"where the same command runs with --node-rank {numbers} and --master-addr naming this machine"
        )
    return (
        f"machine {config.node_rank} of {config.num_nodes}: its ranks wait until machine 0 listens at {address}:{port} "
        "and all others are there"
    )
