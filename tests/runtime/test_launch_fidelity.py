"""A rank sees what it would see under torchrun: arguments, paths, environment, children, the order of its end."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)

FACTS = """
    import atexit, json, os, sys, pathlib
    import helper_beside  # next to the script
    import torch
    facts = {
        "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": globals().get("__file__"),
        "package": globals().get("__package__"), "flags": [sys.flags.hash_randomization, sys.flags.safe_path],
        "main": sys.modules["__main__"].__dict__ is globals(), "cwd": os.getcwd(), "stdin": sys.stdin.read(),
        "threads": torch.get_num_threads(), "parent": __import__("multiprocessing").parent_process(),
        "environment": {k: v for k, v in os.environ.items()},
        "unbuffered": [sys.stdout.line_buffering, sys.stdout.write_through],
    }
    def last():
        import pickle
        pickle.dumps(last)  # __main__ is there to the end
        print(" ".join(map(str, ["exit handler", os.environ["RANK"]])) + "\\n", end="")
        pathlib.Path(f"{sys.argv[1]}-{os.environ['RANK']}.json").write_text(json.dumps(facts))
    atexit.register(last)
    print(" ".join(map(str, ["body", os.environ["RANK"]])) + "\\n", end="")
    print("error", os.environ["RANK"], file=sys.stderr)
"""

# what differs from run to run, and what belongs to torchrun's own agent
_NOT_COMPARED = {
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE", "_",
    "TORCHELASTIC_SIGNALS_TO_HANDLE", "BENCH_MARK", "PYTEST_CURRENT_TEST",
}  # fmt: skip


def _facts(bench: Any, tag: str, rank: int) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((bench.folder / f"{tag}-{rank}.json").read_text())
    return facts


@pytest.mark.parametrize("as_module", [False, True])
def test_a_rank_finds_the_world_as_under_torchrun(bench: Any, as_module: bool) -> None:
    (bench.folder / "helper_beside.py").write_text("")
    bench.script(FACTS, name="facts.py")
    target, flags = ("facts", ["-m"]) if as_module else ("facts.py", [])
    real = bench.start(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "static",
        "--master-port", "0", *flags, target, "torchrun", "--x=1", stdin=-1,
    )  # fmt: skip
    ours = bench.prism("observe", target, "--nproc-per-node", "2", *flags, arguments=("prism", "--x=1"), stdin=-1)
    ended, expected = bench.finish(ours, text=""), bench.finish(real, text="")
    assert ended.code == 0, ended.err
    assert expected.code == 0, expected.err
    for rank in (0, 1):
        found, wanted = _facts(bench, "prism", rank), _facts(bench, "torchrun", rank)
        found["argv"][1] = wanted["argv"][1] = ""
        ours_env, real_env = found.pop("environment"), wanted.pop("environment")
        assert found == wanted
        assert ours_env["RANK"] == str(rank) and ours_env["MASTER_ADDR"]
        different = {
            name: (ours_env.get(name), real_env.get(name))
            for name in ours_env.keys() | real_env.keys()
            if ours_env.get(name) != real_env.get(name) and name not in _NOT_COMPARED
        }
        assert different == {}
        assert ended.out.index(f"body {rank}") < ended.out.index(f"exit handler {rank}")


def test_child_processes_of_a_rank_work_and_are_no_ranks(bench: Any) -> None:
    """DataLoader workers, and multiprocessing in its three ways of starting, under the two modes."""
    script = bench.script("""
    import multiprocessing, os, sys, torch, torch.distributed as dist
    from torch.utils.data import DataLoader

    def child(queue):
        queue.put((os.environ["RANK"], "PRISM_MODE" in os.environ, os.getpid()))

    def main():
        dist.init_process_group("gloo")
        print("batches", sum(len(batch) for batch in DataLoader(torch.zeros(40, 2), num_workers=2, batch_size=4)))
        for method in ("fork", "spawn", "forkserver") if dist.get_rank() == 0 else ("fork",):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            rank, observed, pid = queue.get(timeout=30)
            process.join()
            assert rank == os.environ["RANK"] and not observed and pid != os.getpid()
            assert process.exitcode == 0
            if method == "fork":
                process = context.Process(target=__import__("time").sleep, args=(60,))
                process.start(); process.terminate(); process.join()
                assert process.exitcode == -15, process.exitcode
            print(" ".join(map(str, ["child", method])) + "\\n", end="", flush=True)
        dist.all_reduce(torch.ones(2))
        dist.barrier()

    if __name__ == "__main__":
        main()
    """)
    for mode in ("record", "observe"):
        ended = bench.run_shared(mode, script, "--nproc-per-node", "2", "-o", str(bench.folder / f"{mode}.prism"))
        assert ended.code == 0, ended.err
        assert ended.out.count("batches 40") == 2
        assert all(f"child {method}" in ended.out for method in ("fork", "spawn", "forkserver"))
        metadata = bench.metadata(bench.folder / f"{mode}.prism")
        assert metadata["rank.0.status"] == metadata["rank.1.status"] == "complete"


def test_quiet_says_nothing_and_progress_names_what_happens(bench: Any) -> None:
    script = bench.script("""
    import time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    time.sleep(2.5)
    dist.barrier()
    """)
    quiet = bench.prism("record", script, "--nproc-per-node", "2", "-q", "-o", str(bench.folder / "b.prism"))
    ended = bench.run_shared("record", script, "--nproc-per-node", "2", "--slots", "1")
    assert ended.code == 0
    assert "running" in ended.err and "parked" in ended.err and "switches/s" in ended.err
    ended = bench.finish(quiet)
    assert (ended.code, ended.out, ended.err) == (0, "", "")
