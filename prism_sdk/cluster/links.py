"""Says which links of a cluster a group uses, and how long its bytes keep each of them busy.

It gives no transfer times (``estimate``) and knows no jobs.

Links have one direction: each GPU has one into and one out of its NVLink domain, and so has each NIC. GPUs of a node
have its NICs in order; where there are fewer NICs than GPUs, neighbours have one together; where there are more, those
of a GPU count as one. A ring, a tree and an in-switch reduction use both directions of all members.
"""

from __future__ import annotations

from collections.abc import Sequence

from prism_sdk.cluster.profile import Cluster, Shape
from prismtrace import Op

__all__ = ["busy_ns", "link_names", "links_of", "num_nics_of"]


def _links_of_node(cluster: Cluster) -> int:
    """How many links the NICs of a node count as."""
    return min(cluster.network.nics_per_node, cluster.gpus_per_node)


def _nic_of(cluster: Cluster, rank: int) -> int:
    links = _links_of_node(cluster)
    node, local = divmod(rank, cluster.gpus_per_node)
    return node * links + local * links // cluster.gpus_per_node


def num_nics_of(cluster: Cluster, ranks: Sequence[int]) -> int:
    """How many links to the network the ranks of the domain with most of them have."""
    by_domain: dict[int, set[int]] = {}
    for rank in ranks:
        by_domain.setdefault(rank // cluster.domain_gpus, set()).add(_nic_of(cluster, rank))
    return max(len(nics) for nics in by_domain.values())


def links_of(cluster: Cluster, ranks: Sequence[int], *, is_message: bool = False) -> tuple[list[int], list[int]]:
    """The links that a group uses: those of NVLink and those of the network, numbered as in ``link_names``.

    A message from ``ranks[0]`` to ``ranks[1]`` uses one direction only.
    """
    gpus, nics = cluster.num_gpus, cluster.num_nodes * _links_of_node(cluster)
    domains = [rank // cluster.domain_gpus for rank in ranks]
    sources, targets = ([ranks[0]], [ranks[-1]]) if is_message else (ranks, ranks)
    network: list[int] = []
    if len(set(domains)) > 1:
        network = sorted({2 * gpus + _nic_of(cluster, r) for r in sources})
        network += sorted({2 * gpus + nics + _nic_of(cluster, r) for r in targets})
    inside: list[int] = []
    if len(set(domains)) < len(ranks):
        inside = [*sources, *(gpus + r for r in targets)]
    return inside, network


def link_names(cluster: Cluster) -> list[str]:
    """What the numbers of links mean."""
    nics = range(cluster.num_nodes * _links_of_node(cluster))
    gpus = range(cluster.num_gpus)
    return [*(f"NVLink out of GPU {g}" for g in gpus), *(f"NVLink into GPU {g}" for g in gpus),
            *(f"network out of NIC {n}" for n in nics), *(f"network into NIC {n}" for n in nics)]  # fmt: skip


def busy_ns(cluster: Cluster, op: Op, *, num_bytes: int, shape: Shape, num_nics: int) -> tuple[float, float]:
    """How long an operation keeps each of its links busy: those of NVLink, and those of the network.

    Bytes on the link over what the link carries at most; never longer than ``estimate.model_ns`` takes alone, because
    that adds latencies and what protocols lose. Proportional to ``num_bytes`` (as nccl-tests counts them).
    """
    n, per_node = shape.ranks, shape.per_node
    if n < 2 or num_bytes <= 0:
        return 0.0, 0.0
    inside = cluster.nvlink.bandwidth_gb_per_s * cluster.nvlink.efficiency
    network = cluster.network
    one = network.bandwidth_gb_per_s * network.efficiency / network.oversubscription
    one *= network.nics_per_node / _links_of_node(cluster)
    if op in (Op.SEND, Op.RECV):
        return (num_bytes / inside, 0.0) if shape.nodes == 1 else (0.0, num_bytes / one)
    if op is Op.ALL_TO_ALL:
        leaving = per_node * num_bytes * (n - per_node) / n / (one * num_nics) if shape.nodes > 1 else 0.0
        return num_bytes * (per_node - 1) / n / inside, leaving
    passes = 2.0 if op is Op.ALL_REDUCE else 1.0
    moved = passes * num_bytes * (1.0 if op in (Op.BROADCAST, Op.REDUCE, Op.SCATTER) else (n - 1) / n)
    return moved / inside if per_node > 1 else 0.0, moved / (one * num_nics) if shape.nodes > 1 else 0.0
