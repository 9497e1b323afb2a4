"""Runs without Prism, for comparison: what ranks print, and what is said where one of them fails."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from prism_sdk.testing import run_plain

JOB = """
    import os, sys
    import torch.distributed as dist
    from beside import WORDS
    dist.init_process_group("gloo")
    assert not [name for name in os.environ if name.startswith("PRISM_")] and WORDS == sys.argv[1:]
    print("rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
    if dist.get_rank() == 1 and sys.argv[1:] == ["fail"]:
        raise SystemExit("it went wrong here")
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("word", ["end", "fail"])
def test_all_ranks_run_or_the_one_that_failed_is_shown(tmp_path: Path, word: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    (tmp_path / "beside.py").write_text(f"WORDS = [{word!r}]\n")  # found as where the script is started by itself
    if word == "end":
        assert sorted(run_plain(script, [word], num_ranks=2).splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
        return
    started = time.monotonic()
    with pytest.raises(AssertionError, match="it went wrong here"):
        run_plain(script, [word], num_ranks=2)
    assert time.monotonic() - started < 60  # the other one waits at the barrier for half an hour
