"""What is measured elsewhere comes from programs and people: every fault of it is named where it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prism_sdk.cli.main import run
from prism_sdk.cluster import (
    ClusterError,
    Shape,
    format_cluster,
    joined_tables,
    load_cluster,
    parse_cluster,
    read_measurements,
    read_nccl_tests,
)
from prism_sdk.cluster.links import busy_ns, link_names, links_of
from prism_sdk.errors import PrismError, UnreadableError, UsageError
from prismtrace import Op

_COLUMNS = "#     size     count   type   redop    root   time   algbw   busbw #wrong   time   algbw   busbw #wrong\n"


def _log(*, ranks: int, nodes: int, binary: str, groups: int = 1, time_us: float = 20.0, wrong: str = "0") -> str:
    lines = [f"# Collective test starting: {binary}\n", "# Using devices\n"]
    for rank in range(ranks):
        where = f"Pid {100 + rank} on node{rank * nodes // ranks} device {rank}"
        lines.append(f"#  Rank {rank:2} Group {rank % groups:2} {where} [0000:07:00] NVIDIA H100\n")
    rows = "".join(f"  {size}  {size // 4}  float  sum  -1  {time_us + size / 1e4:.2f}  1.00  2.00  {wrong}  9.00  1.00"
                   f"  2.00  {wrong}\n" for size in (1024, 65536))  # fmt: skip
    return "".join(lines) + _COLUMNS + rows + f"# Collective test concluded: {binary}\n"


def _shapes(text: str, folder: Path, **options: Any) -> list[tuple[Op, Shape, int, float]]:
    path = folder / "x.log"
    path.write_text(text)
    return [(s.op, s.shape, s.size_bytes, s.time_ns) for s in read_nccl_tests(path, **options)]


def test_runs_in_one_log_are_kept_apart(tmp_path: Path) -> None:
    two = _log(ranks=8, nodes=1, binary="all_reduce_perf") + _log(ranks=4, nodes=2, binary="alltoall_perf", time_us=50)
    found = _shapes(two, tmp_path)
    assert [(op, shape) for op, shape, _, _ in found] == (
        [(Op.ALL_REDUCE, Shape(ranks=8, nodes=1))] * 2 + [(Op.ALL_TO_ALL, Shape(ranks=4, nodes=2))] * 2
    )
    assert [time for _, _, _, time in found] == [pytest.approx(t) for t in (20100, 26550, 50100, 56550)]


def test_a_log_is_the_same_with_tags_indents_and_without_roots(tmp_path: Path) -> None:
    plain = _log(ranks=8, nodes=1, binary="all_gather_perf")
    expected = _shapes(plain, tmp_path)
    for tag in ("[1,0]<stdout>:", "0: ", "    "):
        assert _shapes("".join(tag + line for line in plain.splitlines(keepends=True)), tmp_path) == expected
    before_roots = plain.replace("redop    root", "redop").replace("  sum  -1", "")
    assert _shapes(before_roots, tmp_path) == expected


def test_groups_of_a_split_log_have_their_own_size(tmp_path: Path) -> None:
    split = _log(ranks=16, nodes=2, binary="all_reduce_perf", groups=8)
    assert {shape for _, shape, _, _ in _shapes(split, tmp_path)} == {Shape(ranks=2, nodes=2)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (_log(ranks=3, nodes=1, binary="all_reduce_perf", groups=2), "groups have several shapes"),
        (_log(ranks=4, nodes=1, binary="all_reduce_perf").replace("Rank  3", "Rank  0"), "1 rank listed twice"),
        (_log(ranks=4, nodes=1, binary="all_reduce_perf").replace("Rank  1", "Rank  9"), "line of rank 1 is missing"),
        (_log(ranks=4, nodes=1, binary="all_reduce_perf", wrong="3"), "2 rows had wrong results"),
        (_log(ranks=4, nodes=1, binary="hypercube_perf"), "which operation is it"),
    ],
)
def test_logs_that_would_mean_something_else_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _shapes(text, tmp_path)


_HEADER = "op,algo,proto,size,ranks,nodes,time_us\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", _HEADER + "all_reduce,ring,ll,1024,8,0,20", "nodes 0 is not a whole number from 1"),
        ("a.csv", _HEADER + "all_reduce,ring,ll,1024,2,8,20", "2 ranks cannot be spread over 8 nodes"),
        ("a.csv", _HEADER + "all_reduce,ring,ll,1024,8,1,nan", "time_us is nan: it must be above 0"),
        ("a.csv", _HEADER + "all_reduce,ring,ll,1024,8,1,0", "time_us is 0: it must be above 0"),
        ("a.csv", _HEADER + "all_reduce,ring,ll,-5,8,1,20", "size -5 is not a whole number"),
        ("a.csv", _HEADER + "all_reduce,ri\x7fng,ll,5,8,1,20", "cannot be printed"),
        ("a.csv", _HEADER + "allreduce,ring,ll,5,8,1,20", "'allreduce' is no operation; there are"),
        ("a.csv", _HEADER, "holds no measurement"),
        ("a.csv", _HEADER + "x" * 200_000, "it is no CSV"),
        ("a.json", "[" * 100_000, "it is no JSON"),
        ("a.json", "[1]", "1 is not an object with columns"),
        ("a.json", '[{"op": "all_reduce", "size": 1e999, "ranks": 8, "time_us": 1}]', "size inf is not a whole"),
        ("a.json", '[{"op": "all_reduce", "size": true, "ranks": 8, "time_us": 1}]', "size 'True' is not a number"),
    ],
)
def test_measurements_that_cannot_be_are_named_by_row(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((UsageError, UnreadableError), match=words):
        read_measurements(tmp_path / name)


def test_measurements_as_spreadsheets_write_them(tmp_path: Path) -> None:
    header = _HEADER.upper().replace(",", ", ")
    (tmp_path / "a.csv").write_text(f"\ufeff{header}RECV, ring, ll, 1024.0, 2, 1, 20\n")
    (sample,) = read_measurements(tmp_path / "a.csv")
    assert (sample.op, sample.size_bytes, sample.time_ns) == (Op.SEND, 1024, 20_000)  # a message has one table


def test_sources_of_one_table_are_joined(tmp_path: Path) -> None:
    cluster = load_cluster("h100-sxm")
    path = tmp_path / "all_reduce_perf.log"
    parts = []
    for name, time_us in (("one", 20), ("two", 40)):
        path.write_text(_log(ranks=8, nodes=1, binary="all_reduce_perf", time_us=time_us))
        parts.append((name, read_nccl_tests(path)))
    (table,) = joined_tables(parts, cluster=cluster)
    assert table.source == "one; two" and table.time_ns == pytest.approx((30100, 36550)) and table.spread_percent > 10
    with pytest.raises(UsageError, match="three: no transfer in it has a time"):
        joined_tables([*parts, ("three", [])], cluster=cluster)


def _profile(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "cluster": {"name": "two", "num_nodes": 2, "gpus_per_node": 8}, "nvlink": {"bandwidth_gb_per_s": 100},
        "network": {"bandwidth_gb_per_s": 10, "nics_per_node": 4},
        "table": [{"op": "all_reduce", "ranks": 8, "points": [[8, 1.0]]}],
    }  # fmt: skip
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["cluster"].update(name="a\nb"), "cannot be shown in a line"),
        (lambda d: d["cluster"].update(memory_gb=-1), "memory_gb: -1 is not above 0"),
        (lambda d: d["nvlink"].update(bandwidth_gb_per_s=450e9), "is no link: a link has 0.001 to 1,000,000 GB/s"),
        (lambda d: d["network"].update(bandwidth_gb_per_s=1e-320), "is no link"),
        (lambda d: d["nvlink"].update(domain_gpus=16, efficiency=1e-300), "efficiency: 1e-300 is below"),
        (lambda d: d["nvlink"].update(domain_gpus=4) or d["cluster"].update(gpus_per_node=6), "4 GPUs are neither"),
        (lambda d: d.update(model={"bandwidth_share": {"ll": 1.5}}), "bandwidth_share.ll: 1.5 is not from"),
        (lambda d: d["table"][0].update(nodes=9), "8 ranks cannot be spread over 9 nodes"),
        (lambda d: d["table"][0].update(algo=5), r"table\[0\].algo: 5 is not a text"),
        (lambda d: d["table"][0].update(points=[[8.5, 1.0]]), "8.5 is not a whole number of bytes"),
        (lambda d: d["table"].append(d["table"][0]), r"table\[1\]: .* are those of table\[0\]"),
    ],
)  # fmt: skip
def test_profiles_that_cannot_be(change: Callable[[dict[str, Any]], None], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        parse_cluster(_profile(change))


def test_strange_files_of_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.toml"
    path.write_text("\ufeff" + format_cluster(parse_cluster(_profile(lambda _: None))))
    assert load_cluster(path).name == "two"
    path.write_text("a = " + "[" * 100_000)
    with pytest.raises(UnreadableError, match="it is not TOML"):
        load_cluster(path)
    log = tmp_path / "a\x7fb.log"
    log.write_text(_log(ranks=8, nodes=1, binary="all_reduce_perf"))
    assert run(["cluster", "fit", "h100-sxm", "--nccl-tests", str(log)]) == 0
    assert 'source = "nccl-tests, a?b.log"' in capsys.readouterr().out


def test_domains_of_half_a_node_have_half_of_its_nics() -> None:
    half = parse_cluster(_profile(lambda d: (d["nvlink"].update(domain_gpus=4), d.pop("table"))))
    assert sum("network out" in name for name in link_names(half)) == 8
    assert links_of(half, (0, 4), is_message=True) == ([], [32, 42])
    assert busy_ns(half, Op.SEND, num_bytes=90, shape=Shape(ranks=2, nodes=2), num_nics=1) == (0.0, 10.0)


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("network.nics_per_node=x0.01", "gives 0.08: network.nics_per_node is a whole number"),
        ("network.oversubscription=x0.5", "0.5 is below 1"),
        ("network.efficiency=2", "2 is above 1"),
        ("network.rails=x0.5", "theirs are numbers"),
        ("nvlink.bandwidth_gb_per_s=x1e-300", "is no link"),
        ("nvlink.nvls_bus_gb_per_s=x2", "the profile gives no nvlink.nvls_bus_gb_per_s"),
    ],
)
def test_changed_links_are_checked_as_profiles_are(link: str, words: str) -> None:
    from prism_sdk.simulate.scenario import with_links

    with pytest.raises(PrismError, match=words):
        with_links(load_cluster("a100-sxm"), (link,))
