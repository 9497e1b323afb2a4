"""Holds a cluster profile: nodes, links and transfer tables, read from ``cluster.toml`` and checked.

It estimates nothing (``estimate``) and measures nothing (``measurements``). docs/cluster.md documents every key.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from prism_sdk.bounds import MAX_BYTES, MAX_QUANTITY, MAX_RANKS
from prism_sdk.errors import UnreadableError, UsageError
from prismtrace import Op

__all__ = [
    "Cluster",
    "ClusterError",
    "Model",
    "Network",
    "NvLink",
    "Shape",
    "Table",
    "builtin_profiles",
    "load_cluster",
    "parse_cluster",
]


class ClusterError(UsageError):
    """A cluster profile is not valid; ``key`` is the place in the file."""

    def __init__(self, file: str, key: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{file}: {key}: {message}", hint=hint or "docs/cluster.md documents every key")
        self.file = file
        self.key = key


@dataclass(frozen=True, kw_only=True)
class NvLink:
    """The links inside a domain. Bandwidths are GB/s (decimal) of one GPU in one direction."""

    bandwidth_gb_per_s: float
    #: Bus bandwidth of in-switch reductions (NVLS) as nccl-tests reports it; absent: the switches have none.
    nvls_bus_gb_per_s: float | None = None
    #: GPUs that reach each other over these links; absent: those of a node.
    domain_gpus: int | None = None
    efficiency: float = 0.78


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network between domains. ``bandwidth_gb_per_s`` is that of one NIC in one direction."""

    bandwidth_gb_per_s: float
    nics_per_node: int
    #: Whether NIC i of every node is on switch i, so that traffic of equal local ranks stays on one rail.
    rails: bool = True
    #: How many times more the NICs can send than the core carries (1: non-blocking).
    oversubscription: float = 1.0
    efficiency: float = 0.9


@dataclass(frozen=True, kw_only=True)
class Model:
    """Latencies of the alpha-beta model, us, and the share of the bandwidth that each protocol reaches."""

    base_us: Mapping[str, float] = field(default_factory=lambda: {"ll": 3.6, "ll128": 10.0, "simple": 8.4})
    nvlink_us: Mapping[str, float] = field(default_factory=lambda: {"ll": 0.47, "ll128": 1.9, "simple": 3.4})
    network_us: Mapping[str, float] = field(default_factory=lambda: {"ll": 2.7, "ll128": 4.0, "simple": 9.6})
    tree_network_us: Mapping[str, float] = field(default_factory=lambda: {"ll": 5.0, "ll128": 8.5, "simple": 50.0})
    bandwidth_share: Mapping[str, float] = field(default_factory=lambda: {"ll": 0.25, "ll128": 0.92, "simple": 1.0})


@dataclass(frozen=True, kw_only=True, order=True)
class Shape:
    """The shape of a group: ranks, and the domains (nodes) that they are spread over."""

    ranks: int
    nodes: int

    @property
    def per_node(self) -> int:
        """Ranks in the fullest node."""
        return -(-self.ranks // self.nodes)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Measured times of one operation in groups of one shape: sizes in bytes, ascending, and ns."""

    op: Op
    shape: Shape
    size_bytes: tuple[int, ...]
    time_ns: tuple[float, ...]
    algo: str = ""
    proto: str = ""
    source: str = ""
    #: Spread of repeated measurements, percent; 0 where each size was measured once.
    spread_percent: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster profile."""

    name: str
    num_nodes: int
    gpus_per_node: int
    gpu: str = ""
    memory_gb: float | None = None
    nvlink: NvLink
    network: Network
    model: Model = field(default_factory=Model)
    tables: tuple[Table, ...] = ()
    #: Where figures come from: key of the figure -> public source.
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def domain_gpus(self) -> int:
        """GPUs of one NVLink domain."""
        return self.nvlink.domain_gpus or self.gpus_per_node

    @property
    def num_gpus(self) -> int:
        """All GPUs."""
        return self.num_nodes * self.gpus_per_node

    def shape(self, ranks: tuple[int, ...]) -> Shape:
        """The shape of a group of global ranks; rank r is GPU r of the cluster, node by node."""
        return Shape(ranks=len(ranks), nodes=len({rank // self.domain_gpus for rank in ranks}))


#: Operations by name; a message is one transfer, whichever end names it.
_OPS = {op.name.lower(): Op.SEND if op is Op.RECV else op for op in Op if op is not Op.UNSPECIFIED}
_TEXTS = ("algo", "proto", "source")
# beyond these a wrong unit is likelier than a link, and times leave 64 bits
_SLOWEST, _FASTEST, _LEAST_SHARE = 1e-3, 1e6, 1e-3
_ROOT = {"name": str, "num_nodes": int, "gpus_per_node": int, "gpu": str, "memory_gb": float}


def load_cluster(source: str | os.PathLike[str]) -> Cluster:
    """Read a profile: a path, or the name of one that ships (``builtin_profiles``).

    Raises:
        UnreadableError: there is no such file, or it is not TOML; says where.
        ClusterError: it is no valid profile; says which key, and what it should be.
    """
    name = os.fspath(source)
    shipped = builtin_profiles()
    path = shipped.get(name, Path(name))
    if not path.exists() and "/" not in name and not name.endswith(".toml"):
        raise UsageError(
            f"no cluster profile is called {name!r}", hint=f"there are: {', '.join(shipped)}; or give a file"
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UnreadableError(name, reason=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise UnreadableError(name, reason=f"it is not UTF-8 text, at byte {error.start}: no TOML file") from error
    # TOMLDecodeError, or a whole number of thousands of digits, or brackets of that depth
    except (ValueError, RecursionError) as error:
        raise UnreadableError(name, reason=f"it is not TOML: {error}", hint="docs/cluster.md has an example") from error
    return parse_cluster(data, file=name)


def builtin_profiles() -> dict[str, Path]:
    """The profiles that ship, by name."""
    folder = Path(__file__).with_name("profiles")
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def parse_cluster(data: Mapping[str, Any], *, file: str = "cluster.toml") -> Cluster:
    """A profile from parsed TOML; raises ClusterError."""
    known = {"cluster", "nvlink", "network", "model", "table", "sources"}
    for key in data:
        if key not in known:
            raise ClusterError(file, key, f"there is no such section; there are {', '.join(sorted(known))}")
    root = _values(data, "cluster", _ROOT, file, required=("name", "num_nodes", "gpus_per_node"))
    for key in ("num_nodes", "gpus_per_node", "memory_gb"):
        _above(file, f"cluster.{key}", root.get(key, 1), 0)
    for key in ("name", "gpu"):
        _printable(file, f"cluster.{key}", root.get(key, "-"))
    nvlink = NvLink(**_section(data, "nvlink", NvLink, file))
    network = Network(**_section(data, "network", Network, file))
    model = _model(data.get("model", {}), file)
    tables = data.get("table", [])
    if not isinstance(tables, list):
        raise ClusterError(file, "table", "is an array of tables: write [[table]]")
    sources = data.get("sources", {})
    if not isinstance(sources, Mapping) or not all(isinstance(text, str) for text in sources.values()):
        raise ClusterError(file, "sources", 'is a table of texts: "nvlink.bandwidth_gb_per_s" = "where from"')
    cluster = Cluster(
        nvlink=nvlink, network=network, model=model, sources=dict(sources),
        tables=tuple(_table(item, index, file) for index, item in enumerate(tables)), **root,
    )  # fmt: skip
    if cluster.num_gpus > MAX_RANKS:
        raise ClusterError(file, "cluster.num_nodes", f"{cluster.num_gpus:,} GPUs in all: a job has at most "
                           f"{MAX_RANKS:,} ranks")  # fmt: skip
    if cluster.num_gpus % cluster.domain_gpus:
        raise ClusterError(
            file, "nvlink.domain_gpus", f"{cluster.domain_gpus} does not divide the {cluster.num_gpus} GPUs"
        )
    if cluster.gpus_per_node % cluster.domain_gpus and cluster.domain_gpus % cluster.gpus_per_node:
        raise ClusterError(file, "nvlink.domain_gpus", f"{cluster.domain_gpus} GPUs are neither whole nodes nor equal "
                           f"parts of a node of {cluster.gpus_per_node}")  # fmt: skip
    seen: dict[tuple[object, ...], int] = {}
    for index, table in enumerate(cluster.tables):
        if (first := seen.setdefault((table.op, table.shape, table.algo, table.proto), index)) != index:
            raise ClusterError(file, f"table[{index}]", f"operation, ranks, nodes, algo and proto are those of "
                               f"table[{first}]: join the two")  # fmt: skip
        if table.shape.per_node > cluster.domain_gpus:
            raise ClusterError(file, f"table[{index}]", f"{table.shape.ranks} ranks do not fit on {table.shape.nodes} "
                               f"domains of {cluster.domain_gpus} GPUs")  # fmt: skip
    return cluster


def _values(
    data: Mapping[str, Any], section: str, types: Mapping[str, type], file: str, *, required: tuple[str, ...]
) -> dict[str, Any]:
    given = data.get(section)
    if not isinstance(given, Mapping):
        raise ClusterError(file, section, "the section is missing" if given is None else "is not a table")
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key not in types:
            raise ClusterError(file, f"{section}.{key}", f"there is no such key; there are {', '.join(types)}")
        wanted = types[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number if wanted is float else isinstance(value, wanted) and (wanted is not int or is_number)
        if not fits:
            raise ClusterError(file, f"{section}.{key}", f"{value!r} is not {_WORDS[wanted]}")
        if wanted in (int, float):
            _within(file, f"{section}.{key}", value, MAX_RANKS if wanted is int else MAX_QUANTITY)
        found[key] = float(value) if wanted is float else value
    for key in required:
        if key not in found:
            raise ClusterError(file, f"{section}.{key}", f"is missing: {_WORDS[types[key]]}")
    return found


_WORDS: Mapping[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _section(data: Mapping[str, Any], section: str, kind: type, file: str) -> dict[str, Any]:
    types: dict[str, type] = {}
    for item in fields(kind):
        text = str(item.type)
        types[item.name] = bool if "bool" in text else float if "float" in text else int
    required = ("bandwidth_gb_per_s", "nics_per_node") if kind is Network else ("bandwidth_gb_per_s",)
    found = _values(data, section, types, file, required=required)
    for key, value in found.items():
        if types[key] is not bool:
            _above(file, f"{section}.{key}", value, 0)
        if key.endswith("gb_per_s") and not _SLOWEST <= value <= _FASTEST:
            raise ClusterError(file, f"{section}.{key}", f"{value:g} GB/s is no link: a link has {_SLOWEST:g} to "
                               f"{_FASTEST:,.0f} GB/s (10^9 bytes a second)")  # fmt: skip
    if found.get("efficiency", 1.0) < _LEAST_SHARE:
        raise ClusterError(file, f"{section}.efficiency", f"{found['efficiency']:g} is below {_LEAST_SHARE:g}")
    if found.get("efficiency", 1.0) > 1.0:
        raise ClusterError(file, f"{section}.efficiency", f"{found['efficiency']:g} is above 1")
    if found.get("oversubscription", 1.0) < 1.0:
        raise ClusterError(
            file, f"{section}.oversubscription", f"{found['oversubscription']:g} is below 1 (non-blocking)"
        )
    return found


def _printable(file: str, key: str, text: Any) -> str:
    if not isinstance(text, str):
        raise ClusterError(file, key, f"{text!r} is not a text")
    if not text.isprintable() or (key == "cluster.name" and not text.strip()):
        raise ClusterError(file, key, f"{text!r} cannot be shown in a line: write printable characters")
    return text


def _above(file: str, key: str, value: float, low: float) -> None:
    if not value > low:
        raise ClusterError(file, key, f"{value:g} is not above {low:g}")


def _within(file: str, key: str, value: float, high: float) -> None:
    if not -high <= value <= high:  # a whole number may have any number of digits, and be too large for a float
        text = str(value) if len(str(value)) <= 24 else f"{str(value)[:20]}..."
        raise ClusterError(file, key, f"{text} is beyond {high:,.0f}, the largest that is supported")


def _model(given: Any, file: str) -> Model:
    defaults = Model()
    names = [item.name for item in fields(Model)]
    if not isinstance(given, Mapping):
        raise ClusterError(file, "model", "is not a table")
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key not in names:
            raise ClusterError(file, f"model.{key}", f"there is no such key; there are {', '.join(names)}")
        if not isinstance(value, Mapping) or not set(value) <= {"ll", "ll128", "simple"}:
            raise ClusterError(file, f"model.{key}", "is a table by protocol: { ll = 1.0, ll128 = 2.0, simple = 3.0 }")
        for proto, number in value.items():
            if not isinstance(number, int | float) or isinstance(number, bool) or not number > 0:
                raise ClusterError(file, f"model.{key}.{proto}", f"{number!r} is not a number above 0")
            _within(file, f"model.{key}.{proto}", number, MAX_QUANTITY)
            if key == "bandwidth_share" and not _LEAST_SHARE <= number <= 1:
                raise ClusterError(file, f"model.{key}.{proto}", f"{number:g} is not from {_LEAST_SHARE:g} to 1")
        found[key] = {**getattr(defaults, key), **{proto: float(number) for proto, number in value.items()}}
    return Model(**found)


def _table(item: Any, index: int, file: str) -> Table:
    key = f"table[{index}]"
    if not isinstance(item, Mapping):
        raise ClusterError(file, key, "is not a table")
    names = {"op", "ranks", "nodes", "algo", "proto", "source", "points", "spread_percent"}
    for name in item:
        if name not in names:
            raise ClusterError(file, f"{key}.{name}", f"there is no such key; there are {', '.join(sorted(names))}")
    op = item.get("op")
    if op not in _OPS:
        raise ClusterError(file, f"{key}.op", f"{op!r} is no operation; there are {', '.join(_OPS)}")
    for name in ("ranks", "nodes"):
        value = item.get(name, 1 if name == "nodes" else None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ClusterError(file, f"{key}.{name}", f"{value!r} is not a whole number above 0")
        _within(file, f"{key}.{name}", value, MAX_RANKS)
    shape = Shape(ranks=item["ranks"], nodes=item.get("nodes", 1))
    if shape.nodes > shape.ranks:
        raise ClusterError(file, f"{key}.nodes", f"{shape.ranks} ranks cannot be spread over {shape.nodes} nodes")
    algo, proto, source = (_printable(file, f"{key}.{name}", item.get(name, "")) for name in _TEXTS)
    spread = item.get("spread_percent", 0.0)
    if not isinstance(spread, int | float) or isinstance(spread, bool) or not spread >= 0:
        raise ClusterError(file, f"{key}.spread_percent", f"{spread!r} is not a number of 0 or more")
    _within(file, f"{key}.spread_percent", spread, MAX_QUANTITY)
    points = item.get("points")
    if not isinstance(points, list) or not points:
        raise ClusterError(file, f"{key}.points", "is a list of [bytes, us], ascending in bytes")
    sizes: list[int] = []
    times: list[float] = []
    for at, point in enumerate(points):
        good = isinstance(point, list) and len(point) == 2 and all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in point)  # fmt: skip
        if not good or not point[0] >= 0 or not point[1] > 0:
            raise ClusterError(file, f"{key}.points[{at}]", f"{point!r} is not [bytes, us] with a time above 0")
        for value, high in zip(point, (MAX_BYTES, MAX_QUANTITY), strict=True):
            _within(file, f"{key}.points[{at}]", value, high)
        if point[0] != int(point[0]):
            raise ClusterError(file, f"{key}.points[{at}]", f"{point[0]!r} is not a whole number of bytes")
        if sizes and point[0] <= sizes[-1]:
            raise ClusterError(file, f"{key}.points[{at}]", f"{point[0]} bytes do not come after {sizes[-1]} bytes")
        sizes.append(int(point[0]))
        times.append(float(point[1]) * 1e3)
    return Table(
        op=_OPS[op], shape=shape, size_bytes=tuple(sizes), time_ns=tuple(times), algo=algo, proto=proto, source=source,
        spread_percent=float(spread),
    )  # fmt: skip
