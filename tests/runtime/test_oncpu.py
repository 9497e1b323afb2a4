"""`--device cpu`: a script written for GPUs runs on CPUs, with the losses of the script that says cpu."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import prismtrace
from prism_sdk.testing import Launches, losses
from prism_sdk.testing.workplace import Workplace

torch = pytest.importorskip("torch")

JOB = Path(__file__).parent / "cuda_job.py"
ON_CPU = ("--device", "cpu")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_script_for_gpus_runs_on_cpus(workplace: Workplace, tmp_path: Path) -> None:
    launches = Launches(tmp_path, workplace=workplace)
    plain = launches.record(JOB, ["cpu"], num_ranks=2)
    done = launches.record(JOB, ["cuda"], num_ranks=2, options=ON_CPU)
    assert losses(done.out) == losses(plain.out) and len(losses(done.out)) == 2
    with prismtrace.TraceReader(done.trace) as reader, prismtrace.TraceReader(plain.trace) as other:
        assert reader.metadata["job.device"] == "cpu"
        assert "job.device" not in {key for key, value in other.metadata.items() if value}
        ops, others = (table.units(1).op.tolist() for table in (reader, other))
    talks = [[op for op in found if op] for found in (ops, others)]
    assert talks[0][:-1] == talks[1]  # the one more is its barrier
    graph = launches.calibrate(done.trace, JOB, ["cuda"]).trace  # the graph remembers the device
    assert losses(launches.emulate(graph, JOB, ["cuda"]).out) == losses(plain.out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_it_the_script_says_what_is_missing(workplace: Workplace, tmp_path: Path) -> None:
    launches = Launches(tmp_path, workplace=workplace)
    done = launches.run("record", JOB, ["cuda"], options=["--nproc-per-node", "2"])
    assert done.code == 1 and "cuda" in done.err.lower()


LETS_GO = """
    import time
    import torch, torch.distributed as dist
    dist.init_process_group("nccl")
    count = 1 << 20
    value = torch.full((count,), 7.0, device="cuda")
    if dist.get_rank() == 0:
        works = [dist.isend(value, 1)]
        value.data = torch.empty(1, device="cuda")
        other = [torch.full((count,), 3.0, device="cuda") for _ in range(8)]  # takes the memory
        works += dist.batch_isend_irecv([dist.P2POp(dist.isend, other[0], 1)])
        other[0].data = torch.empty(1, device="cuda")
        other += [torch.full((count,), 5.0, device="cuda") for _ in range(8)]
    else:
        time.sleep(0.5)
        got = [torch.empty_like(value) for _ in range(2)]
        works = [dist.irecv(got[0], 0), *dist.batch_isend_irecv([dist.P2POp(dist.irecv, got[1], 0)])]
    for work in works:
        work.wait()
    if dist.get_rank() == 1:
        print("got", *(sorted({one.min().item(), one.max().item()}) for one in got))
    dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("mode", ["observe", "record"])
def test_a_message_is_what_was_sent_though_its_memory_goes(workplace: Workplace, tmp_path: Path, mode: str) -> None:
    """As on a GPU, where memory that a stream reads is not handed out; Megatron's interleaved schedule does so."""
    script = tmp_path / "lets_go.py"
    script.write_text(textwrap.dedent(LETS_GO))
    launches = Launches(tmp_path, workplace=workplace)
    done = launches.must(mode, script, options=["--nproc-per-node", "2", *ON_CPU])
    assert "got [7.0] [3.0]" in done.out
