"""Gives results a table for notebooks and data frames of pandas, polars and pyarrow in one call. It analyses nothing.

The libraries are imported when asked for; TraceUsageError says which one is missing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from prismtrace.frames import library
from prismtrace.notebook import html_table

__all__ = ["ResultFrames", "columns_of"]

_MAX_ROWS = 12


def columns_of(results: Sequence[Any]) -> dict[str, list[Any]]:
    """Dataclasses of one kind as columns, one a field."""
    return {item.name: [getattr(result, item.name) for result in results] for item in fields(results[0])} if (
        results) else {}  # fmt: skip


class ResultFrames:
    """A result that is a table; a subclass says which columns it has."""

    @abstractmethod
    def columns(self) -> dict[str, Any]:
        """Name of each column -> its values, all of one length; None is absent."""

    def to_pandas(self) -> Any:
        """The result as a ``pandas.DataFrame``."""
        return library("pandas").DataFrame(self.columns())

    def to_polars(self) -> Any:
        """The result as a ``polars.DataFrame``."""
        return library("polars").DataFrame(self.columns(), strict=False)

    def to_arrow(self) -> Any:
        """The result as a ``pyarrow.Table``."""
        return library("pyarrow").table(self.columns())

    def _repr_html_(self) -> str:
        columns = {name: list(values) for name, values in self.columns().items()}
        rows = list(zip(*columns.values(), strict=True))
        left = len(rows) - _MAX_ROWS
        return html_table(type(self).__name__, list(columns), rows[:_MAX_ROWS],
                          rest=f"and {left} more rows" if left > 0 else "")  # fmt: skip
