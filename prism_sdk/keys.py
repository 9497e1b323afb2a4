"""Keys of a trace's metadata that some parts of the SDK write and others read; the specification's registry has all."""

from __future__ import annotations

__all__ = ["PURPOSE_KEY"]

PURPOSE_KEY = "group.{}.purpose"
"""Of a group, by id: what an adapter says it is for (tp, dp, ...)."""
