"""Tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Table", "cell", "table_html"]


def cell(value) -> str:
    """A value as text: numbers with four significant digits."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def table_html(title: str, columns: Iterable[str], rows: Iterable[Iterable]) -> str:
    """A table as HTML, with numbers to the right."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_td, row))}</tr>" for row in rows)
    return f"<table><caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _td(value) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    style = ' style="text-align:right"' if number else ""
    return f"<td{style}>{html.escape(cell(value))}</td>"


class Table(Sequence):
    """Rows of a table of the program: mappings of column names to values. A notebook shows it as a table."""

    def __init__(self, title: str, columns: Iterable[str], rows: Iterable[Mapping]):
        self.title = title
        #: Names of the columns, with units.
        self.columns = tuple(columns)
        self._rows = [dict(row) for row in rows]

    @classmethod
    def of(cls, fields: Mapping) -> Table:
        """The table of the JSON that the program writes."""
        return cls(fields["title"], fields["columns"], fields["rows"])

    def __getitem__(self, index):
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> list:
        """The values of a column."""
        if name not in self.columns:
            raise KeyError(f"{name!r} is no column of {self.title!r}: {', '.join(self.columns)}")
        return [row.get(name) for row in self._rows]

    def __repr__(self) -> str:
        return f"<Table {self.title!r}, {len(self)} rows of {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        rows = ([row.get(column) for column in self.columns] for row in self._rows)
        return table_html(self.title, self.columns, rows)
