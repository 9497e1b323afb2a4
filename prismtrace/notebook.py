"""Gives tables and readers what notebooks look for: a view in HTML, and data frames in one call.

Does not convert anything itself (`frames` does, when asked), and imports no library of data frames.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from prismtrace.wording import counted

if TYPE_CHECKING:
    from prismtrace.tables import Table

__all__ = ["ReaderFrames", "TableFrames", "html_table"]

_MAX_ROWS: Final = 10


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[object]], *, rest: str = "") -> str:
    """A table in HTML; every text is escaped, None is empty."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    cells = "".join(
        "<tr>" + "".join(f"<td>{'' if cell is None else html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    foot = f'<tfoot><tr><td colspan="{len(header)}">{html.escape(rest)}</td></tr></tfoot>' if rest else ""
    text = html.escape(caption)
    return f"<table><caption>{text}</caption><thead><tr>{head}</tr></thead><tbody>{cells}</tbody>{foot}</table>"


class TableFrames:
    """What every table of one rank can do."""

    __slots__ = ()

    def to_arrow(self, *, names: bool = True) -> Any:
        """The rows as a `pyarrow.Table`; see `to_pandas`."""
        from prismtrace import frames

        return frames.to_arrow([self], names=names)  # type: ignore[list-item]

    def to_pandas(self, *, names: bool = True) -> Any:
        """The rows as a `pandas.DataFrame`: `rank` and `row_index`, then the columns that hold something.

        Absent values are missing values; times are whole nanoseconds. With `names` enumerations are their lower-case
        names, else their numbers. Digests are bytes, lists arrays.

        Raises:
            TraceUsageError: pandas is not installed.
        """
        from prismtrace import frames

        return frames.to_pandas([self], names=names)  # type: ignore[list-item]

    def to_polars(self, *, names: bool = True) -> Any:
        """The rows as a `polars.DataFrame`; see `to_pandas`."""
        from prismtrace import frames

        return frames.to_polars([self], names=names)  # type: ignore[list-item]

    def _repr_html_(self) -> str:
        from prismtrace import frames

        table: Table = self  # type: ignore[assignment]
        header, rows = frames.first_rows(table, limit=_MAX_ROWS)
        left = len(table) - len(rows)
        caption = f"{type(self).__name__} of rank {table.rank}: {counted(len(table), 'row')}"
        return html_table(caption, header, rows, rest=f"and {left} more rows" if left > 0 else "")


class ReaderFrames:
    """What an open trace can do."""

    def to_arrow(
        self, table: str = "units", *, ranks: Collection[int] | None = None, steps: range | int | None = None,
        names: bool = True,
    ) -> Any:  # fmt: skip
        """One table of all (or some) ranks as a `pyarrow.Table`; see `to_pandas`."""
        from prismtrace import frames

        return frames.to_arrow(frames.tables_of(self, table, ranks=ranks, steps=steps), names=names)  # type: ignore[arg-type]

    def to_pandas(
        self, table: str = "units", *, ranks: Collection[int] | None = None, steps: range | int | None = None,
        names: bool = True,
    ) -> Any:  # fmt: skip
        """One table of all (or some) ranks as a `pandas.DataFrame`.

        Args:
            table: units, steps, scalars, events or tracks.
            ranks: global ranks; all with data by default.
            steps: only the units of these steps; other tables are given whole.
            names: enumerations as lower-case names, not numbers.

        Raises:
            TraceUsageError: pandas is not installed, or there is no such table or rank.
            TraceLimitError: the rows are more than fit in memory: choose ranks or steps.
        """
        from prismtrace import frames

        return frames.to_pandas(frames.tables_of(self, table, ranks=ranks, steps=steps), names=names)  # type: ignore[arg-type]

    def to_polars(
        self, table: str = "units", *, ranks: Collection[int] | None = None, steps: range | int | None = None,
        names: bool = True,
    ) -> Any:  # fmt: skip
        """One table of all (or some) ranks as a `polars.DataFrame`; see `to_pandas`."""
        from prismtrace import frames

        return frames.to_polars(frames.tables_of(self, table, ranks=ranks, steps=steps), names=names)  # type: ignore[arg-type]

    def _repr_html_(self) -> str:
        reader: Any = self
        ranks = reader.ranks
        rows = []
        for rank in ranks[:_MAX_ROWS]:
            span = reader.step_range(rank)
            rows.append((rank, reader.num_units(rank), "" if span is None else f"{span[0]} to {span[1]}",
                         reader.num_steps(rank), reader.num_events(rank), reader.role_of(rank)))  # fmt: skip
        world = counted(reader.world_size, "rank")
        caption = f"{reader.path}: {reader.graph_kind.name.lower()} graph, {len(ranks)} of {world}"
        left = len(ranks) - len(rows)
        made = html_table(caption, ("rank", "units", "steps", "step rows", "events", "role"), rows,
                          rest=f"and {left} more ranks" if left > 0 else "")  # fmt: skip
        facts: Mapping[str, str] = reader.metadata
        if not facts:
            return made
        shown = [(key, value if len(value) <= 80 else value[:77] + "...") for key, value in list(facts.items())[:20]]
        return made + html_table("metadata", ("key", "value"), shown)
