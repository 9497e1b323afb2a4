"""Estimates how long a communication takes on a cluster: from its tables where they have it, else from a model.

It knows nothing of jobs. Every estimate says what it is: *fitted* (interpolated between measured points, with the error
that interpolation has on the points themselves) or *modelled*.

Sizes are those of nccl-tests: the buffer of an all-reduce, broadcast or reduce; the whole gathered or scattered buffer
of all-gather and reduce-scatter; the send buffer of a rank in an all-to-all; the message of a send.

The model, alpha-beta, by algorithm and protocol (LL, LL128, Simple); the fastest counts, as NCCL's tuner chooses. For n
ranks on k nodes, S bytes and bandwidth B of the narrowest link of the path, with latencies of NCCL's ``tuning.cc``:

- ring: 2(n-1)/n S/B for all-reduce, (n-1)/n S/B for all-gather and reduce-scatter, S/B for broadcast and reduce, and
  as many hops, of which those between nodes take the network's latency;
- tree (all-reduce, broadcast, reduce): 2 S/B (all-reduce) or S/B, and log2 k hops of the network each way;
- NVLS (one domain, all-reduce): the bus bandwidth that in-switch reductions reach, two hops;
- hierarchical all-to-all: the part that stays in the node over NVLink and the part that leaves over the NICs, at the
  same time; one hop for each node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from prism_sdk.cluster.profile import Cluster, Shape, Table
from prism_sdk.wording import counted
from prismtrace import Op

__all__ = ["Estimate", "FITTED", "MODELLED", "estimate", "interpolation_error_percent", "model_ns"]

FITTED, MODELLED = 2, 3
_LIKE = {Op.GATHER: Op.ALL_GATHER, Op.SCATTER: Op.BROADCAST, Op.RECV: Op.SEND, Op.REDUCE: Op.BROADCAST}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long an operation takes, and how far that can be trusted."""

    time_ns: float
    #: The enumeration Provenance of the registry: FITTED or MODELLED.
    provenance: int
    algo: str
    #: Percent; None for a model, whose error is not known.
    error_percent: float | None
    basis: str


def estimate(cluster: Cluster, op: Op, *, num_bytes: int, shape: Shape) -> Estimate:
    """The time of one operation on ``num_bytes`` (as nccl-tests counts them) in a group of this shape."""
    if shape.ranks <= 1 and op not in (Op.SEND, Op.RECV):
        return Estimate(time_ns=0.0, provenance=MODELLED, algo="none", error_percent=0.0, basis="one rank alone")
    tables = [t for t in cluster.tables if t.op is op] or [t for t in cluster.tables if t.op is _LIKE.get(op)]
    exact = [t for t in tables if t.shape == shape]
    inside = [t for t in exact if t.size_bytes[0] <= num_bytes <= t.size_bytes[-1]]
    if inside:
        best = min(inside, key=lambda table: _interpolated(table, num_bytes))
        error = max(interpolation_error_percent(best), best.spread_percent)
        return Estimate(time_ns=_interpolated(best, num_bytes), provenance=FITTED, algo=best.algo or "measured",
                        error_percent=error, basis=f"table of {op.name.lower()}, {_words(shape)}")  # fmt: skip
    plain, algo = model_ns(cluster, op, num_bytes=num_bytes, shape=shape)
    if tables:
        # outside of the tables the model counts, corrected by what it gets wrong at the nearest measured point
        near = min(tables, key=lambda t: (abs(math.log(t.shape.ranks / shape.ranks)), abs(t.shape.nodes - shape.nodes)))
        at = min(max(num_bytes, near.size_bytes[0]), near.size_bytes[-1])
        known, _ = model_ns(cluster, op, num_bytes=at, shape=near.shape)
        factor = _interpolated(near, at) / known if known > 0 else 1.0
        basis = f"model, scaled by {factor:.2f} to the table of {_words(near.shape)}"
        return Estimate(time_ns=plain * factor, provenance=MODELLED, algo=algo, error_percent=None, basis=basis)
    return Estimate(time_ns=plain, provenance=MODELLED, algo=algo, error_percent=None, basis="model")


def _words(shape: Shape) -> str:
    return f"{counted(shape.ranks, 'rank')} on {counted(shape.nodes, 'node')}"


def _interpolated(table: Table, num_bytes: int) -> float:
    """Straight lines between the logarithms of sizes and times."""
    sizes = np.log(np.maximum(table.size_bytes, 1))
    return float(np.exp(np.interp(math.log(max(num_bytes, 1)), sizes, np.log(table.time_ns))))


def interpolation_error_percent(table: Table) -> float:
    """The mean error of each inner point of a table when it is interpolated from the others, percent."""
    if len(table.size_bytes) < 3:
        return 0.0
    sizes, times = np.log(np.maximum(table.size_bytes, 1)), np.log(table.time_ns)
    errors = [
        abs(math.expm1(float(np.interp(sizes[i], np.delete(sizes, i), np.delete(times, i))) - times[i]))
        for i in range(1, len(sizes) - 1)
    ]
    # a point's neighbours are twice as far away here as when the table is used, and the error goes with the square
    return 100.0 * float(np.mean(errors)) / 4.0


def model_ns(cluster: Cluster, op: Op, *, num_bytes: int, shape: Shape) -> tuple[float, str]:
    """The alpha-beta model: time in ns and the name of the algorithm that was fastest."""
    n, k = max(shape.ranks, 2), max(shape.nodes, 1)
    m, size = cluster.model, float(max(num_bytes, 0))
    inside = cluster.nvlink.bandwidth_gb_per_s * cluster.nvlink.efficiency
    nics = cluster.network.nics_per_node * cluster.domain_gpus / cluster.gpus_per_node
    per_nic = cluster.network.bandwidth_gb_per_s * cluster.network.efficiency / cluster.network.oversubscription
    # the ranks of a domain share its NICs; a rank alone uses the NIC of its rail
    used = max(1.0, nics * min(shape.per_node, cluster.domain_gpus) / cluster.domain_gpus)
    outside = per_nic * used
    found: list[tuple[float, str]] = []
    for proto in ("ll", "ll128", "simple"):
        share = m.bandwidth_share[proto]
        base, near, far = m.base_us[proto], m.nvlink_us[proto], m.network_us[proto]
        width = (inside if k == 1 else min(inside, outside)) * share
        if op in (Op.SEND, Op.RECV):
            wire = inside if k == 1 else min(inside, per_nic)
            found.append((base + (near if k == 1 else far) + size / (wire * share) / 1e3, f"p2p/{proto}"))
        elif op is Op.ALL_TO_ALL:
            stays = size * (shape.per_node - 1) / n / (inside * share)
            leaves = (
                size * (n - shape.per_node) / n / (per_nic * max(used / shape.per_node, 1e-9) * share) if k > 1 else 0.0
            )
            hops = near * (1 if k == 1 else 2) + far * (k - 1)
            found.append((base + hops + max(stays, leaves) / 1e3, f"hierarchical/{proto}"))
        else:
            passes = 2 if op in (Op.ALL_REDUCE, Op.BARRIER) else 1
            factor = 1.0 if op in (Op.BROADCAST, Op.REDUCE, Op.SCATTER) else (n - 1) / n
            hops = passes * ((n - k) * near + (k - 1) * far) + (far if k > 1 and passes == 1 else 0.0)
            found.append((base + hops + passes * factor * size / width / 1e3, f"ring/{proto}"))
            if op in (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE, Op.BARRIER):
                hops = passes * ((shape.per_node - 1) * near + math.ceil(math.log2(k)) * m.tree_network_us[proto])
                found.append((base + hops + passes * size / (0.9 * width) / 1e3, f"tree/{proto}"))
    if op is Op.ALL_REDUCE and k == 1 and cluster.nvlink.nvls_bus_gb_per_s and n > 2:
        time = m.base_us["simple"] + 2 * m.nvlink_us["simple"]
        found.append((time + 2 * (n - 1) / n * size / cluster.nvlink.nvls_bus_gb_per_s / 1e3, "nvls"))
    best, algo = min(found)
    return best * 1e3, algo
