from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_sdk.cli.main import run
from prism_sdk.cluster import (
    Cluster,
    ClusterError,
    Shape,
    Table,
    builtin_profiles,
    estimate,
    format_cluster,
    load_cluster,
    parse_cluster,
    read_measurements,
    read_nccl_tests,
    read_trace,
    tables_of,
)
from prism_sdk.cluster.estimate import FITTED, MODELLED, interpolation_error_percent, model_ns
from prism_sdk.errors import UnreadableError, UsageError
from prism_sdk.simulate import Scenario, load, simulate
from prism_sdk.simulate.transfers import with_cluster
from prismtrace import DType, GraphKind, Op
from tests.graph.jobs import Program
from tests.simulate.reference import write

MINIMAL: dict[str, Any] = {
    "cluster": {"name": "two", "num_nodes": 2, "gpus_per_node": 4},
    "nvlink": {"bandwidth_gb_per_s": 100},
    "network": {"bandwidth_gb_per_s": 10, "nics_per_node": 4},
}

LOG = """# nThread 1 nGpus 1 minBytes 1024 maxBytes 1048576 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
# Using devices
#  Rank  0 Group  0 Pid   4101 on    nodeA device  0 [0000:07:00] NVIDIA H100
#  Rank  1 Group  0 Pid   4102 on    nodeA device  1 [0000:0a:00] NVIDIA H100
#  Rank  2 Group  0 Pid   3391 on    nodeB device  0 [0000:07:00] NVIDIA H100
#  Rank  3 Group  0 Pid   3392 on    nodeB device  1 [0000:0a:00] NVIDIA H100
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    20.00    0.05    0.08      0    19.00    0.05    0.08      0
       65536         16384     float     sum      -1    40.00    1.64    2.46      0    39.00    1.68    2.52      0
     1048576        262144     float     sum      -1   160.00    6.55    9.83      0   158.00    6.64    9.95      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 4.1
"""


def _with(section: str, **values: Any) -> dict[str, Any]:
    data = {key: dict(value) for key, value in MINIMAL.items()}
    data.setdefault(section, {}).update(values)
    return data


@pytest.mark.parametrize("name", sorted(builtin_profiles()))
def test_profiles_that_ship_name_the_source_of_every_figure(name: str) -> None:
    cluster = load_cluster(name)
    given = tomllib.loads(builtin_profiles()[name].read_text(encoding="utf-8"))
    for section in ("nvlink", "network"):
        for key in given[section]:
            assert f"{section}.{key}" in cluster.sources or key == "rails", f"{section}.{key} has no source"
    assert parse_cluster(tomllib.loads(format_cluster(cluster))) == cluster


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "cluster: the section is missing"),
        ({**MINIMAL, "nvlnk": {}}, "nvlnk: there is no such section"),
        (_with("cluster", num_nodes=0), "cluster.num_nodes: 0 is not above 0"),
        (_with("cluster", num_nodes="many"), "'many' is not a whole number"),
        (_with("cluster", gpus_per_node=True), "True is not a whole number"),
        (_with("nvlink", bandwith=1), "nvlink.bandwith: there is no such key"),
        (_with("nvlink", domain_gpus=3), "nvlink.domain_gpus: 3 does not divide the 8 GPUs"),
        (_with("network", efficiency=1.5), "network.efficiency: 1.5 is above 1"),
        (_with("network", oversubscription=0.5), "network.oversubscription: 0.5 is below 1"),
        (_with("model", base_us={"ll": -1}), "model.base_us.ll: -1 is not a number above 0"),
        ({**MINIMAL, "table": {}}, "write \\[\\[table\\]\\]"),
        ({**MINIMAL, "table": [{"op": "all_reduced", "ranks": 2}]}, "'all_reduced' is no operation"),
        ({**MINIMAL, "table": [{"op": "all_reduce", "ranks": 2, "points": [[8, 1.0], [4, 2.0]]}]},
         r"table\[0\].points\[1\]: 4 bytes do not come after 8"),
        ({**MINIMAL, "table": [{"op": "all_reduce", "ranks": 8, "points": [[8, 1.0]]}]}, "8 ranks do not fit"),
    ],
)  # fmt: skip
def test_faults_of_a_profile_are_named_by_key(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        parse_cluster(data)


def test_a_log_of_nccl_tests_becomes_a_table(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce_perf.log"
    path.write_text(LOG)
    (table,) = tables_of(read_nccl_tests(path), source="log")
    assert (table.op, table.shape) == (Op.ALL_REDUCE, Shape(ranks=4, nodes=2))
    assert table.size_bytes == (1024, 65536, 1048576) and table.time_ns == (20_000, 40_000, 160_000)
    (other,) = tables_of(read_nccl_tests(path, op="alltoall"), source="log")
    assert other.op is Op.ALL_TO_ALL
    path.write_text("nothing of the kind")
    with pytest.raises(UnreadableError, match="no log of nccl-tests"):
        read_nccl_tests(path)


def test_measurements_of_other_tools_come_as_csv_or_json(tmp_path: Path) -> None:
    rows = [{"op": "all_gather", "algo": "ring", "proto": "ll", "size": 64, "ranks": 4, "nodes": 2, "time_us": t}
            for t in (10.0, 12.0, 14.0)]  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.csv").write_text("op,size,ranks,nodes,time_us,algo,proto\n" + "".join(
        f"all_gather,64,4,2,{row['time_us']},ring,ll\n" for row in rows))  # fmt: skip
    found = [tables_of(read_measurements(tmp_path / name), source="x") for name in ("a.json", "a.jsonl", "a.csv")]
    assert found[0] == found[1] == found[2]
    assert found[0][0].time_ns == (12_000,) and found[0][0].algo == "ring" and found[0][0].spread_percent > 10
    (tmp_path / "bad.csv").write_text("op,size\nall_gather,64\n")
    with pytest.raises(UsageError, match=r"bad.csv: row 1: ranks is missing"):
        read_measurements(tmp_path / "bad.csv")


def _tabled() -> Cluster:
    table = Table(op=Op.ALL_REDUCE, shape=Shape(ranks=4, nodes=1), size_bytes=(1 << 10, 1 << 20, 1 << 30),
                  time_ns=(1e4, 1e5, 1e7))  # fmt: skip
    cluster = parse_cluster(MINIMAL)
    return Cluster(
        name="t", num_nodes=2, gpus_per_node=4, nvlink=cluster.nvlink, network=cluster.network, tables=(table,)
    )


def test_inside_a_table_the_table_counts_and_outside_the_model() -> None:
    cluster, shape = _tabled(), Shape(ranks=4, nodes=1)
    inside = estimate(cluster, Op.ALL_REDUCE, num_bytes=1 << 20, shape=shape)
    assert (inside.time_ns, inside.provenance) == (pytest.approx(1e5), FITTED)
    # halfway between two points on both logarithms
    assert estimate(cluster, Op.ALL_REDUCE, num_bytes=1 << 25, shape=shape).time_ns == pytest.approx(1e6)
    assert inside.error_percent == pytest.approx(interpolation_error_percent(cluster.tables[0]))
    beyond = estimate(cluster, Op.ALL_REDUCE, num_bytes=1 << 31, shape=shape)
    assert beyond.provenance == MODELLED and beyond.error_percent is None
    at_the_end = estimate(cluster, Op.ALL_REDUCE, num_bytes=(1 << 30) + 1, shape=shape)
    assert at_the_end.time_ns == pytest.approx(1e7, rel=0.01), "the model goes on where the table ends"
    other = estimate(cluster, Op.ALL_TO_ALL, num_bytes=1 << 20, shape=shape)
    assert other.provenance == MODELLED and other.basis == "model"


@given(st.sampled_from([op for op in Op if op]), st.integers(0, 2**34), st.integers(2, 512), st.integers(0, 9))
def test_the_model_grows_with_size_and_shrinks_with_bandwidth(op: Op, size: int, ranks: int, spread: int) -> None:
    cluster = load_cluster("h100-sxm")
    shape = Shape(ranks=ranks, nodes=min(ranks, -(-ranks // 8) + spread))
    time, _ = model_ns(cluster, op, num_bytes=size, shape=shape)
    assert 0 < time <= model_ns(cluster, op, num_bytes=2 * size, shape=shape)[0]
    assert time <= model_ns(load_cluster("a100-sxm"), op, num_bytes=size, shape=shape)[0] * 1.0001


def test_bandwidth_of_large_operations_is_that_of_the_links() -> None:
    cluster = parse_cluster(_with("nvlink", efficiency=1.0))
    time, algo = model_ns(cluster, Op.ALL_GATHER, num_bytes=8 << 30, shape=Shape(ranks=4, nodes=1))
    assert algo == "ring/simple" and (8 << 30) * 0.75 / time == pytest.approx(100, rel=0.001)  # bus bandwidth, GB/s
    time, _ = model_ns(cluster, Op.ALL_GATHER, num_bytes=8 << 30, shape=Shape(ranks=8, nodes=2))
    assert (8 << 30) * 7 / 8 / time == pytest.approx(4 * 10 * 0.9, rel=0.001), "four NICs of 10 GB/s"
    time, _ = model_ns(cluster, Op.SEND, num_bytes=8 << 30, shape=Shape(ranks=2, nodes=2))
    assert (8 << 30) / time == pytest.approx(10 * 0.9, rel=0.001), "one NIC"


def _job(path: Path) -> Path:
    program = Program(8, {1: tuple(range(8)), 2: (0, 1, 2, 3), 3: (4, 5, 6, 7)})
    for step in range(2):
        program.step = step
        for group in (2, 3, 1):
            for rank in program.groups[group].ranks:
                program.compute(rank, 1000)
            for rank, unit in program.collective(group, lambda _: 7).items():
                program.wait(rank, unit)
    for rows in program.rows.values():
        for row in rows:
            if row["kind"] == 2:
                row.update(num_elements_in=1 << 20, num_elements_out=1 << 20, dtype=int(DType.FLOAT32))
    return write(path, program.rows, program.groups, kind=GraphKind.CALIBRATED)


def test_transfers_of_a_job_come_from_the_profile(tmp_path: Path) -> None:
    cluster = parse_cluster(MINIMAL)
    path = _job(tmp_path / "job.prism")
    timeline = simulate(with_cluster(load(path), cluster))
    inner = round(model_ns(cluster, Op.ALL_REDUCE, num_bytes=4 << 20, shape=Shape(ranks=4, nodes=1))[0])
    outer = round(model_ns(cluster, Op.ALL_REDUCE, num_bytes=4 << 20, shape=Shape(ranks=8, nodes=2))[0])
    assert timeline.length_ns == 2 * (1000 + inner + 1000 + outer) and outer > inner > 0
    assert set(timeline.job.provenance[timeline.job.main > 1000].tolist()) == {MODELLED}
    slower = parse_cluster(_with("network", bandwidth_gb_per_s=5))
    changed = simulate(with_cluster(load(path), slower, relative_to=cluster))
    ratio = model_ns(slower, Op.ALL_REDUCE, num_bytes=4 << 20, shape=Shape(ranks=8, nodes=2))[0] / outer
    assert changed.length_ns == 2 * (1000 + 7 + 1000 + round(7 * ratio)), "measured transfers are scaled"
    with pytest.raises(UsageError, match="8 ranks, small 4 GPUs"):
        with_cluster(load(path), parse_cluster(_with("cluster", name="small", num_nodes=1)))


@pytest.mark.parametrize(
    ("change", "section", "values"),
    [
        ("network.bandwidth_gb_per_s=x0.5", "network", {"bandwidth_gb_per_s": 5}),
        ("network.nics_per_node=x0.5", "network", {"nics_per_node": 2}),
        ("network.oversubscription=4", "network", {"oversubscription": 4}),
        ("nvlink.bandwidth_gb_per_s=25", "nvlink", {"bandwidth_gb_per_s": 25}),
    ],
)
def test_a_changed_link_is_as_in_a_profile_that_has_it(
    tmp_path: Path, change: str, section: str, values: dict[str, Any]
) -> None:
    profile, path = tmp_path / "two.toml", _job(tmp_path / "job.prism")
    profile.write_text(format_cluster(parse_cluster(MINIMAL)))
    other = parse_cluster({key: {**part, **(values if key == section else {})} for key, part in MINIMAL.items()})
    times = [round(model_ns(other, Op.ALL_REDUCE, num_bytes=4 << 20, shape=Shape(ranks=ranks, nodes=nodes))[0])
             for ranks, nodes in ((4, 1), (8, 2))]  # fmt: skip
    changed = Scenario(cluster=str(profile), link=(change,)).run(path)
    assert changed.length_ns == pytest.approx(2 * (1000 + times[0] + 1000 + times[1]), abs=4)  # each is rounded twice
    assert changed.length_ns > Scenario(cluster=str(profile)).run(path).length_ns


@pytest.mark.parametrize("step", [2, 4, 8])
@pytest.mark.parametrize(("base_us", "gb_per_s"), [(20, 100), (50, 400), (10, 10)])
def test_the_stated_error_is_that_between_the_points(step: int, base_us: int, gb_per_s: int) -> None:
    """Against times that are known everywhere: latency and bandwidth, measured at few sizes."""

    def time_ns(num_bytes: float) -> float:
        return base_us * 1e3 + num_bytes / gb_per_s

    sizes = [1024 * step**power for power in range(int(20 / np.log2(step)))]
    shape = Shape(ranks=4, nodes=1)
    table = Table(op=Op.ALL_REDUCE, shape=shape, size_bytes=tuple(sizes), time_ns=tuple(map(time_ns, sizes)))
    cluster = replace(parse_cluster(MINIMAL), tables=(table,))
    errors = []
    for size in (round(np.sqrt(one * other)) for one, other in pairwise(sizes)):
        found = estimate(cluster, Op.ALL_REDUCE, num_bytes=size, shape=shape)
        errors.append(100 * abs(found.time_ns / time_ns(size) - 1))
        assert found.provenance == FITTED
    assert 0.75 * np.mean(errors) <= interpolation_error_percent(table) <= 1.5 * np.mean(errors)


def test_a_fitted_trace_gives_its_transfers_back(tmp_path: Path) -> None:
    cluster = parse_cluster(MINIMAL)
    timeline = simulate(with_cluster(load(_job(tmp_path / "job.prism")), cluster))
    from prism_sdk.simulate import write_timeline

    write_timeline(timeline, tmp_path / "out.prism")
    tables = tables_of(read_trace(tmp_path / "out.prism", cluster), source="trace", cluster=cluster)
    assert {(t.op, t.shape) for t in tables} == {(Op.ALL_REDUCE, Shape(ranks=4, nodes=1)),
                                                 (Op.ALL_REDUCE, Shape(ranks=8, nodes=2))}  # fmt: skip
    for table in tables:
        assert table.time_ns[0] == pytest.approx(
            model_ns(cluster, table.op, num_bytes=4 << 20, shape=table.shape)[0], abs=1)  # fmt: skip


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "all_reduce_perf.log").write_text(LOG)
    mine = str(tmp_path / "mine.toml")
    assert run(["cluster", "init", "h100-sxm", "--nodes", "2", "--name", "mine", "-o", mine]) == 0
    assert run(["cluster", "fit", mine, "--nccl-tests", str(tmp_path / "all_reduce_perf.log"), "-o", mine]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    fit = ["cluster", "fit", mine, "--nccl-tests", str(tmp_path / "all_reduce_perf.log"), "-o", mine, "--overwrite"]
    assert run(fit) == 0
    assert run(["cluster", "check", mine]) == 0
    assert "mine: 2 nodes of 8 GPUs" in capsys.readouterr().out
    assert run(["cluster", "check", mine, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"][0]["op"] == "all_reduce"
    job = _job(tmp_path / "job.prism")
    assert run(["simulate", str(job), "--cluster", mine, "-o", str(tmp_path / "out.prism")]) == 0
    assert "modelled" in capsys.readouterr().out
    observed, fitted = str(tmp_path / "out.prism"), str(tmp_path / "fitted.toml")
    assert run(["cluster", "fit", mine, "--trace", observed, "-o", fitted]) == 0
    assert "trace out.prism" in capsys.readouterr().out
    assert run(["simulate", str(job), "--cluster", fitted]) == 0
    assert "fitted" in capsys.readouterr().out, "provenance of what the critical path consists of"
    assert run(["simulate", str(job), "--cluster", "nowhere"]) == 2
    assert "there are: a100-sxm, h100-sxm, h200-sxm" in capsys.readouterr().err
    assert run(["cluster", "fit", mine]) == 2
    assert run(["cluster", "init", "-o", mine]) == 2 and load_cluster(mine).name == "mine"
    assert run(["cluster", "init", "-o", str(tmp_path)]) == 2 and run(["cluster", "init", "-o", "none/x.toml"]) == 2
    capsys.readouterr()
    (tmp_path / "cut.json").write_text('[{"op": "all_re')
    (tmp_path / "binary.csv").write_bytes(b"op,size\n\xff\xfe")
    for file, why in (("cut.json", "it is no JSON"), ("binary.csv", "not UTF-8 text, at byte 8")):
        assert run(["cluster", "fit", mine, "--measurements", str(tmp_path / file)]) == 3
        assert why in capsys.readouterr().err
    assert run(["simulate", str(job), "-o", str(tmp_path / "out.prism")]) == 2
    assert run(["simulate", str(job), "-o", str(job), "--overwrite"]) == 2
    assert run(["simulate", str(job), "-o", str(tmp_path / "out.prism"), "--overwrite"]) == 0
