"""One recording over several machines: here processes that share the file system only, some of which go away."""

from __future__ import annotations

import select
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_sdk.errors import RankFailedError, RunError, UsageError
from prism_sdk.runtime.arena import RANK_SPAN_BYTES
from prism_sdk.runtime.spread import links
from prism_sdk.runtime.spread.mirrors import Mirrors
from prism_sdk.runtime.spread.places import MachineSlots, Places, divide
from prism_sdk.runtime.wire import ChannelClosed
from prismtrace import TraceReader, has_errors, validate
from tests.runtime.spread_machines import LocalStarter, record

SCRIPT = """
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if "--fail" in sys.argv and rank == 3:
    raise ValueError("rank 3 has had enough")
size = 30_000  # beyond what travels inside a message
weight = torch.full((size,), 1.0 + rank, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.5)
for step in range(3):
    weight.square().sum().backward()
    dist.all_reduce(weight.grad)
    if step == 0:
        assert weight.grad.unique().tolist() == [sum(2.0 * (1 + member) for member in range(world))]
    parts = [torch.empty(size) for _ in range(world)]
    dist.all_gather(parts, torch.full((size,), 10.0 * rank + step))
    assert [part.unique().tolist() for part in parts] == [[10.0 * member + step] for member in range(world)]
    given = torch.arange(world).repeat_interleave(size) + 100.0 * rank
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given)
    assert taken.view(world, size)[:, ::size - 1].T.tolist() == [[100.0 * member + rank for member in range(world)]] * 2
    message = torch.full((size,), float(rank))
    if rank % 2:
        dist.send(message, (rank + 1) % world)
        dist.recv(message, (rank - 1) % world)
    else:
        dist.recv(message, (rank - 1) % world)
        dist.send(torch.full((size,), float(rank)), (rank + 1) % world)
    assert message.unique().tolist() == [(rank - 1) % world]
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
print(f"rank {rank} is done")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


def test_ranks_on_several_machines_get_what_the_others_gave(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    starter, said = LocalStarter(), list[str]()
    result = record(script, tmp_path / "spread.prism", num_ranks=4, starter=starter,
                    machines=[("first", 1), ("second", 1)], say=said.append)  # fmt: skip
    assert result.exit_code == 0 and starter.exit_codes == {"first": 0, "second": 0}
    assert "2 slots over 2 machines" in said
    with TraceReader(tmp_path / "spread.prism") as reader:
        assert reader.metadata["job.status"] == "complete" and reader.ranks == (0, 1, 2, 3)
        assert all(reader.num_units(rank) == reader.num_units(0) > 20 for rank in reader.ranks)
    assert not has_errors(validate(tmp_path / "spread.prism"))
    out = capfd.readouterr().out
    assert all(f"rank {rank} is done" in out for rank in range(4))
    assert not list(tmp_path.glob("*.parts"))


def test_a_rank_that_fails_is_named_and_the_last_machine_is_missed(script: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 3") as failed:
        record(script, tmp_path / "a.prism", ["--fail"], num_ranks=4, machines=[("a", 2)])
    assert "rank 3 has had enough" in str(failed.value)

    class Unreachable(LocalStarter):
        def start(self, name: str, arguments: object, key: bytes) -> None:
            super().start(name, ["127.0.0.1", "1", "0"], key)

    said = list[str]()
    with pytest.raises(RunError, match="and no other is left"):
        record(script, tmp_path / "b.prism", num_ranks=2, machines=[("a", 1), ("b", 1)], starter=Unreachable(),
               say=said.append)  # fmt: skip
    assert any("no ranks can be started on machine" in line and "exit status 1" in line for line in said)


def test_a_machine_that_does_not_share_the_folder_says_so(script: Path, tmp_path: Path) -> None:
    from prism_sdk.runtime.spread.branch import Begin, serve

    server, key = links.listen("127.0.0.1"), bytes(links.KEY_BYTES)
    port = server.getsockname()[1]
    machine = threading.Thread(target=serve, args=("127.0.0.1", port, 0, key))
    machine.start()
    channel = None
    until = time.monotonic() + 10
    while channel is None and time.monotonic() < until:
        channel = links.accept(server, key)
    assert channel is not None and channel.receive()[:2] == ("here", 0)
    channel.send(("begin", Begin({}, (), 1, tmp_path / "elsewhere" / "out.prism.parts", "mark")))
    kind, error = channel.receive()
    machine.join()
    assert kind == "refused" and isinstance(error, UsageError) and "does not see the folder" in str(error)
    channel.close()
    server.close()


def test_who_does_not_know_the_key_is_not_heard() -> None:
    server = links.listen("127.0.0.1")
    port = server.getsockname()[1]
    errors = list[Exception]()

    def connect() -> None:
        try:
            links.connect("127.0.0.1", port, b"a" * links.KEY_BYTES)
        except ChannelClosed as error:
            errors.append(error)

    stranger = threading.Thread(target=connect)
    stranger.start()
    assert select.select([server], [], [], 10)[0]
    assert links.accept(server, b"b" * links.KEY_BYTES) is None
    stranger.join()
    assert len(errors) == 1 and "cannot be reached" in str(errors[0])
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.shutdown(socket.SHUT_WR)
        assert select.select([server], [], [], 10)[0]
        assert links.accept(server, b"b" * links.KEY_BYTES) is None
    server.close()


@given(num_slots=st.integers(1, 200), cpus=st.lists(st.integers(1, 64), min_size=1, max_size=12))
def test_slots_are_divided_as_the_cpus_are(num_slots: int, cpus: list[int]) -> None:
    found = divide(num_slots, cpus)
    assert sum(found) == num_slots and len(found) == len(cpus)
    assert all(abs(slots - num_slots * num / sum(cpus)) < 1 for slots, num in zip(found, cpus, strict=True))


@given(slots=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), world=st.integers(1, 64))
def test_a_rank_gets_a_slot_of_its_machine_only(slots: list[int], world: int) -> None:
    for world_size in (world, None):
        places = Places(slots, world_size=world_size)
        of = [places.machine_of(rank) for rank in range(world)]
        assert all(slots[machine] for machine in of)
        if world_size is not None:
            assert of == sorted(of)
        pool, given_out = MachineSlots(slots, places), dict[int, int]()
        while fitting := [rank for rank in pool.fitting(range(world)) if rank not in given_out]:
            slot = pool.take(fitting[0])
            assert slot not in given_out.values() and pool.cpus(slot)[1] == slots[of[fitting[0]]]
            given_out[fitting[0]] = slot
        assert len(given_out) == sum(min(of.count(machine), num) for machine, num in enumerate(slots))
        for slot in given_out.values():
            pool.give_back(slot)
        assert set(pool.fitting(range(world))) == set(range(world))


def test_a_region_goes_to_each_machine_once_until_it_is_written_again() -> None:
    mirrors = Mirrors(lambda rank: rank % 2)
    offset = 3 * RANK_SPAN_BYTES + 4096  # of rank 3, on machine 1
    message = ("ready", {0: (b"small", None), 1: ((offset, 100), None)}, None, 7)
    assert mirrors.needed(message, 1) == {} and mirrors.needed(message, 0) == {offset: 100}
    assert mirrors.order(offset, 0) and not mirrors.order(offset, 0)
    mirrors.arrived(offset, 0)
    assert mirrors.needed(message, 0) == {}
    assert set(mirrors.drop(offset)) == {0}
    assert mirrors.needed(message, 0) == {offset: 100}
    assert mirrors.needed(("stack", []), 0) == {}
