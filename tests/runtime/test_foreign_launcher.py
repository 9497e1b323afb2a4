"""Observing under a launcher that is not Prism's, by environment variable, and a job over two nodes."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from prism_sdk.cli.main import run
from prismtrace import GraphKind, TraceReader

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
    import os, sys, torch, torch.distributed as dist
    from torch.utils.data import DataLoader

    def main():
        dist.init_process_group("gloo")
        for batch in DataLoader(torch.zeros(8, 2), num_workers=1, batch_size=4):
            dist.all_reduce(batch)
        print(" ".join(map(str, ["PRISM_MODE" in os.environ, dist.get_rank()])) + "\\n", end="", flush=True)
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""


def _torchrun(bench: Any, script: Any, env: dict[str, str]) -> Any:
    return bench.start(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(_port()), script,
        env=env,
    )  # fmt: skip


def _port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_torchrun_with_the_variables_set_gives_a_whole_trace(bench: Any) -> None:
    script = bench.script(SCRIPT)
    parts = bench.folder / "x.prism.parts"
    parts.mkdir()
    for rank in (0, 1):  # what a run that was killed has left
        (parts / f"rank-0000{rank}.prism").write_bytes(b"rest")
        (parts / f"rank-0000{rank}.done").write_text("complete")
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}  # torchrun itself is Slurm's task: it is no rank
    observed = _torchrun(bench, script, {"PRISM_MODE": "observe", "PRISM_OUTPUT": "x.prism", **slurm})
    plain = _torchrun(bench, script, {})
    ended = bench.finish(observed)
    assert ended.code == 0, ended.err
    assert "prism" not in ended.err
    with TraceReader(bench.folder / "x.prism") as reader:
        assert reader.graph_kind is GraphKind.OBSERVED
        assert reader.ranks == (0, 1) and reader.world_size == 2
        assert reader.metadata["job.status"] == "complete"
        assert reader.num_units(0) == reader.num_units(1) >= 4
    assert not parts.exists()
    assert bench.finish(plain).code == 0
    assert {path.name for path in bench.folder.glob("*.prism*")} == {"x.prism"}  # the plain run has written nothing


def test_a_rank_that_fails_under_torchrun_leaves_an_aborted_trace(bench: Any) -> None:
    script = bench.script("""
    import time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2))
    if dist.get_rank() == 1:
        raise ValueError("a wrong turn")
    time.sleep(60)  # torchrun ends it by SIGTERM
    """)
    ended = bench.finish(_torchrun(bench, script, {"PRISM_MODE": "observe", "PRISM_OUTPUT": "x.prism"}))
    assert ended.code == 1 and "a wrong turn" in ended.err
    with TraceReader(bench.folder / "x.prism") as reader:
        assert reader.ranks == (0, 1)
        assert reader.metadata["job.status"] == "aborted"


def test_no_error_of_ours_breaks_an_import_of_torch(bench: Any) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1"}
    environments = [
        {"PRISM_MODE": "observe", **rank},  # no output
        {"PRISM_MODE": "nonsense", **rank},
        {"PRISM_MODE": "record", "PRISM_OUTPUT": "x.prism", **rank},
        {"PRISM_MODE": "observe", "PRISM_OUTPUT": "/proc/no/x.prism", **rank},
        {"PRISM_MODE": "observe", "PRISM_OUTPUT": "x.prism"},  # no rank
    ]
    command = (sys.executable, "-c", "import torch; print(torch.ones(1).item())")
    for env, process in [(env, bench.start(*command, env=env)) for env in environments]:
        ended = bench.finish(process)
        assert (ended.code, ended.out) == (0, "1.0\n")
        assert "Traceback" not in ended.err
        assert ("not observing this process" in ended.err) == ("RANK" in env)


def test_two_nodes_write_a_trace_each_and_merge_joins_them(bench: Any) -> None:
    script = bench.script("""
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size() == 4
    assert os.environ["LOCAL_RANK"] == str(dist.get_rank() % 2)
    assert os.environ["GROUP_RANK"] == str(dist.get_rank() // 2)
    dist.destroy_process_group()
    """)
    port = str(_port())
    nodes = [
        bench.prism(
            "observe", script, "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", node, "--master-port", port,
            "--master-addr", "127.0.0.1", "-o", str(bench.folder / f"node{node}.prism"),
        )
        for node in "01"
    ]  # fmt: skip
    for process, waits in zip(nodes, (f"wait at port {port} for 1 other machine", f"127.0.0.1:{port}"), strict=True):
        ended = bench.finish(process)
        assert ended.code == 0, ended.err
        assert waits in ended.err
    joined = bench.folder / "job.prism"
    assert run(["merge", *(str(bench.folder / f"node{node}.prism") for node in "01"), "-o", str(joined)]) == 0
    with TraceReader(joined) as reader:
        assert reader.ranks == (0, 1, 2, 3) and reader.world_size == 4
        assert len(reader.groups) == 1
