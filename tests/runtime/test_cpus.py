"""Which CPUs ranks are given."""

from __future__ import annotations

import os

from prism_sdk.runtime.cpus import cpu_share, num_cpus, sandbox_cpus


def test_shares_are_disjoint_and_equal() -> None:
    shares = [cpu_share(position, num_cpus()) or () for position in range(num_cpus())]
    assert [len(share) for share in shares] == [1] * num_cpus()
    assert {cpu for share in shares for cpu in share} == os.sched_getaffinity(0)


def test_a_sandbox_rank_gets_what_a_rank_of_a_slice_gets() -> None:
    assert sandbox_cpus(0, num_sandbox=1, world_size=1_000) == cpu_share(0, num_cpus())
    assert sandbox_cpus(0, num_sandbox=1, world_size=1) == tuple(sorted(os.sched_getaffinity(0)))
    assert sandbox_cpus(0, num_sandbox=num_cpus() + 1, world_size=1_000) is None
