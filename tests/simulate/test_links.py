"""Sharing of links: closed forms, a slow fluid model in fractions, and equality where nothing overlaps."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.cli.main import run
from prism_sdk.cluster import Cluster, parse_cluster
from prism_sdk.cluster.estimate import model_ns
from prism_sdk.cluster.links import busy_ns, link_names, links_of, num_nics_of
from prism_sdk.errors import UsageError
from prism_sdk.simulate import Scenario, Timeline, compiling, load, simulate, write_timeline
from prism_sdk.simulate.links import shared_links
from prismtrace import GraphKind, Op
from tests.graph.jobs import Program, random_program
from tests.simulate.reference import reference, rows_of, write


def _cluster(nodes: int, gpus: int, nics: int = 1, **network: Any) -> Cluster:
    """Links of 1 byte a nanosecond: bytes are the ns that they keep a link busy."""
    return parse_cluster({
        "cluster": {"name": "t", "num_nodes": nodes, "gpus_per_node": gpus},
        "nvlink": {"bandwidth_gb_per_s": 1.0, "efficiency": 1.0},
        "network": {"bandwidth_gb_per_s": 1.0, "nics_per_node": nics, "efficiency": 1.0, **network},
    })  # fmt: skip


def _run(program: Program, cluster: Cluster, *, kind: GraphKind = GraphKind.CALIBRATED) -> Timeline:
    with tempfile.TemporaryDirectory() as folder:
        job = load(write(Path(folder) / "job.prism", program.rows, program.groups, kind=kind))
    return simulate(replace(job, links=shared_links(job, cluster)))


def _messages(world: int, sent: list[tuple[int, int, int, int, int]]) -> tuple[Program, list[tuple[int, int]]]:
    """Messages (source, destination, post, transfer, bytes), received at once; and the rows that receive them."""
    program = Program(world, {1: tuple(range(world))})
    received = []
    for tag, (source, destination, _, transfer, num_bytes) in enumerate(sent):
        row = program.recv(1, source, destination, tag, transfer)
        program.rows[destination][row] |= {"num_elements_out": num_bytes, "dtype": 11}
        received.append((destination, row))
    for rank in range(world):
        now = 0
        for tag, (source, destination, post, _, _) in sorted(enumerate(sent), key=lambda item: item[1][2]):
            if source == rank:
                program.compute(rank, post - now)
                now = post
                program.send(1, source, destination, tag, 0)
    for destination, row in received:
        program.wait(destination, row)
    return program, received


def _ends(world: int, sent: list[tuple[int, int, int, int, int]], cluster: Cluster) -> list[int]:
    program, received = _messages(world, sent)
    rows = rows_of(_run(program, cluster))
    return [rows[place][1] for place in received]


@pytest.mark.parametrize(
    ("sent", "ends"),
    [
        ([(0, 1, 0, 1000, 1000)], [1000]),
        ([(0, 1, 0, 1000, 1000), (0, 1, 1000, 1000, 1000)], [1000, 2000]),  # one after the other
        ([(0, 1, 0, 1000, 1000), (0, 1, 500, 1000, 1000)], [1500, 2000]),  # half the rate while both are there
        ([(0, 1, 0, 1000, 1000)] * 4, [4000] * 4),
        ([(0, 1, 0, 1000, 1000), (0, 2, 0, 1000, 1000), (3, 2, 0, 1000, 1000)], [2000, 2000, 2000]),
        ([(0, 1, 0, 1000, 1000), (1, 0, 0, 1000, 1000)], [1000, 1000]),  # the two directions are two links
        ([(0, 1, 0, 1000, 1000), (2, 3, 0, 1000, 1000)], [1000, 1000]),
        ([(0, 1, 0, 1000, 500), (0, 1, 0, 1000, 500)], [1000, 1000]),  # half is latency: both fit
        ([(0, 1, 0, 1000, 500)] * 3, [1500] * 3),
        ([(0, 1, 0, 1000, 0), (0, 1, 0, 1000, 1000)], [1000, 1000]),
        ([(0, 1, 0, 300, 300), (0, 1, 0, 1000, 1000)], [600, 1300]),  # processor sharing
    ],
)
def test_messages_between_nodes_as_on_paper(sent: list[tuple[int, int, int, int, int]], ends: list[int]) -> None:
    assert _ends(4, sent, _cluster(4, 1)) == ends


@pytest.mark.parametrize(("nics", "end"), [(1, 2000), (2, 1000)])
def test_neighbours_share_the_nic_that_they_have_together(nics: int, end: int) -> None:
    sent = [(0, 2, 0, 1000, 1000), (1, 3, 0, 1000, 1000)]
    assert _ends(4, sent, _cluster(2, 2, nics)) == [end, end]


def test_messages_in_a_domain_use_nvlink_and_not_the_nic() -> None:
    sent = [(0, 1, 0, 1000, 1000), (0, 2, 0, 1000, 1000)]
    assert _ends(4, sent, _cluster(2, 2, 2)) == [1000, 1000]


def _overlapping(groups: dict[int, tuple[int, ...]], transfer: int, num_elements: int) -> Program:
    program = Program(4, groups)
    posted = [(rank, unit) for g in groups for rank, unit in program.collective(g, lambda _: transfer).items()]
    for rank, unit in posted:
        program.rows[rank][unit] |= {"num_elements_in": num_elements, "num_elements_out": num_elements, "dtype": 11}
    for rank, unit in posted:
        program.wait(rank, unit)
    return program


@pytest.mark.parametrize(
    ("groups", "end"),
    [
        ({1: (0, 1, 2, 3)}, 1500),
        ({1: (0, 1), 2: (2, 3)}, 1500),
        ({1: (0, 1, 2, 3), 2: (0, 1, 2, 3)}, 3000),
        ({1: (0, 1), 2: (1, 2), 3: (2, 3)}, 2000),  # 1,000 bytes each way; ranks 1 and 2 have two of 2/3 demand
    ],
)
def test_collectives_in_a_domain(groups: dict[int, tuple[int, ...]], end: int) -> None:
    # a ring of 4 moves 2 * 3/4 of its bytes through each link, one of 2 moves them once
    assert _run(_overlapping(groups, 1500, 1000), _cluster(1, 4)).length_ns == end


def test_operations_of_one_group_still_follow_each_other() -> None:
    program = Program(2, {1: (0, 1)})
    units = [program.collective(1, lambda _: 100) for _ in range(3)]
    for each in units:
        for rank, unit in each.items():
            program.rows[rank][unit] |= {"num_elements_in": 100, "dtype": 11}
    program.wait(0, units[2][0])
    program.wait(1, units[2][1])
    timeline = _run(program, _cluster(1, 2))
    assert timeline.length_ns == 300 and timeline.sharing == (0, 0)


def _fluid(flows: list[tuple[int, int, int, int, int]]) -> list[Fraction]:
    """The model in fractions: at every change of rates go through all transfers and all links."""
    left = [Fraction(transfer) for *_, transfer, _ in flows]
    ends: list[Fraction | None] = [None] * len(flows)
    demand = [Fraction(num_bytes, transfer) if transfer else Fraction(0) for *_, transfer, num_bytes in flows]
    now = Fraction(0)
    while any(end is None for end in ends):
        active = [i for i, flow in enumerate(flows) if ends[i] is None and flow[2] <= now]
        load: dict[tuple[str, int], Fraction] = {}
        for i in active:
            for link in (("out", flows[i][0]), ("in", flows[i][1])):
                load[link] = load.get(link, Fraction(0)) + demand[i]
        rates = {
            i: min(1 / max(Fraction(1), load[link]) for link in (("out", flows[i][0]), ("in", flows[i][1])))
            if demand[i] else Fraction(1)
            for i in active
        }  # fmt: skip
        coming = [Fraction(flow[2]) - now for flow in flows if flow[2] > now]
        step = min([*coming, *(left[i] / rates[i] for i in active)])
        now += step
        for i in active:
            left[i] -= rates[i] * step
            if left[i] == 0:
                ends[i] = now
    return [end for end in ends if end is not None]


def _random_messages(seed: int) -> tuple[int, list[tuple[int, int, int, int, int]]]:
    rng = random.Random(seed)
    world = rng.randint(2, 5)
    sent = []
    for _ in range(rng.randint(1, 12)):
        source, destination = rng.sample(range(world), 2)
        transfer = rng.choice([0, rng.randint(1, 10**6), rng.randint(1, 10**6)])
        sent.append((source, destination, rng.randint(0, 10**6), transfer, rng.choice([0, transfer, transfer // 3])))
    return world, sent


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_random_messages_are_where_the_slow_model_has_them(seed: int) -> None:
    world, sent = _random_messages(seed)
    expected = _fluid(sent)
    # each change of rate rounds a demand to 2^-30 and an end to a nanosecond
    np.testing.assert_allclose(_ends(world, sent, _cluster(world, 1)), [float(e) for e in expected], atol=2 * len(sent))


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_units_without_bytes_share_nothing(seed: int) -> None:
    program = random_program(seed)
    for rows in program.rows.values():
        for row in rows:
            row.update({name: 0 for name in ("num_elements_in", "num_elements_out") if name in row})
    assert rows_of(_run(program, _cluster(5, 1))) == reference(program.rows, program.groups)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_what_never_overlaps_is_as_it_was(seed: int) -> None:
    rng = random.Random(seed)
    program = Program(4, {1: (0, 1, 2, 3)})
    for _ in range(8):
        for rank in range(4):
            program.compute(rank, rng.randint(0, 500))
        transfers = [rng.randint(0, 300) for _ in range(4)]
        for rank, unit in program.collective(1, lambda r: transfers[r]).items():  # noqa: B023 (used at once)
            program.rows[rank][unit] |= {"num_elements_in": 10**6, "dtype": 11}
            program.wait(rank, unit)
    assert rows_of(_run(program, _cluster(2, 2))) == reference(program.rows, program.groups)


@pytest.mark.skipif(not compiling.has_compiler(), reason="numba is not installed")
def test_compiled_and_plain_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_ends() -> list[object]:
        found: list[object] = [rows_of(_run(random_program(seed), _cluster(2, 4))) for seed in range(15)]
        jobs = [_random_messages(seed) for seed in range(15)]
        return found + [_ends(world, sent, _cluster(world, 1)) for world, sent in jobs]

    plain = all_ends()
    monkeypatch.setattr(compiling, "PLAIN_UNITS", 0)
    assert all_ends() == plain


def test_a_written_timeline_gives_itself_again(tmp_path: Path) -> None:
    program = _overlapping({1: (0, 1, 2, 3), 2: (0, 1, 2, 3), 3: (1, 2)}, 1500, 1000)
    path = write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)
    job = load(path)
    shared = simulate(replace(job, links=shared_links(job, _cluster(1, 4))))
    write_timeline(shared, tmp_path / "out.prism")
    assert shared.length_ns > simulate(job).length_ns
    again = simulate(load(tmp_path / "out.prism"))
    assert rows_of(again) == rows_of(shared)
    assert again.totals()[0].tolist() == shared.totals()[0].tolist()  # where the time goes, too


def test_the_command_shares_links_of_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = _overlapping({1: (0, 1, 2, 3), 2: (0, 1, 2, 3)}, 1, 10**9)
    path = str(write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED))
    found = []
    for options in ([], ["--no-link-sharing"], ["--transfers", "missing"]):
        assert run(["simulate", path, "--cluster", "h100-sxm", *options, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)["report"]
        found.append((report["step_time_ns"], any("links are shared: 2 of 2" in note for note in report["notes"])))
    # NVLS needs a part of each link only, so two take less than twice the time
    assert found[0][1] and not found[1][1] and not found[2][1]
    assert 1.2 * found[1][0] < found[0][0] <= 2 * found[1][0]
    with pytest.raises(UsageError, match="give a profile"):
        Scenario(link_sharing=True).run(path)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.BROADCAST, Op.REDUCE, Op.ALL_TO_ALL, Op.SEND]),
    st.integers(1, 10**9), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 12),
    st.data(),
)  # fmt: skip
def test_a_link_is_never_busier_than_the_whole_transfer(
    op: Op, num_bytes: int, gpus: int, nodes: int, nics: int, data: st.DataObject
) -> None:
    cluster = _cluster(nodes, gpus, nics, oversubscription=2.0)
    chosen = st.lists(st.integers(0, cluster.num_gpus - 1), min_size=1, max_size=8, unique=True)
    ranks = sorted(data.draw(chosen)) if op is not Op.SEND else [0, cluster.num_gpus - 1]
    shape = cluster.shape(tuple(ranks))
    if len(ranks) % shape.nodes:
        return  # nodes of unequal numbers of ranks have a shape that says more than they have
    busy = busy_ns(cluster, op, num_bytes=num_bytes, shape=shape, num_nics=num_nics_of(cluster, ranks))
    assert max(busy) <= model_ns(cluster, op, num_bytes=num_bytes, shape=shape)[0]
    inside, network = links_of(cluster, ranks, is_message=op is Op.SEND)
    names = link_names(cluster)
    assert all(names[link].startswith("NVLink") for link in inside)
    assert all(names[link].startswith("network") for link in network)
    assert bool(network) == (shape.nodes > 1)
