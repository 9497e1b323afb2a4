"""Writes a cluster profile as TOML that ``load_cluster`` reads back equal.

It decides no values.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from prism_sdk.cluster.profile import Cluster, Model

__all__ = ["format_cluster"]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON allows it bare, TOML does not
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    return repr(value)


def format_cluster(cluster: Cluster) -> str:
    """The text of the profile."""
    lines = ["# A cluster profile: docs/cluster.md documents every key.", "", "[cluster]"]
    for key in ("name", "num_nodes", "gpus_per_node", "gpu", "memory_gb"):
        if getattr(cluster, key) not in (None, ""):
            lines.append(f"{key} = {_value(getattr(cluster, key))}")
    for section, item in (("nvlink", cluster.nvlink), ("network", cluster.network)):
        lines += ["", f"[{section}]"]
        for entry in fields(item):
            value = getattr(item, entry.name)
            if value is not None:
                lines.append(f"{entry.name} = {_value(value)}")
    if cluster.model != Model():
        lines += ["", "[model]"]
        lines += [f"{item.name} = {_value(dict(getattr(cluster.model, item.name)))}" for item in fields(Model)]
    if cluster.sources:
        lines += ["", "[sources]"]
        lines += [f"{_value(key)} = {_value(text)}" for key, text in cluster.sources.items()]
    for table in cluster.tables:
        lines += ["", "[[table]]", f'op = "{table.op.name.lower()}"', f"ranks = {table.shape.ranks}",
                  f"nodes = {table.shape.nodes}"]  # fmt: skip
        for key in ("algo", "proto", "source"):
            if getattr(table, key):
                lines.append(f"{key} = {_value(getattr(table, key))}")
        if table.spread_percent:
            lines.append(f"spread_percent = {table.spread_percent!r}")
        lines.append("points = [  # bytes, us")
        pairs = zip(table.size_bytes, table.time_ns, strict=True)
        lines += [f"    [{size}, {time / 1e3!r}]," for size, time in pairs]
        lines.append("]")
    return "\n".join(lines) + "\n"
