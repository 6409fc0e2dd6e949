"""What a catalog file holds, whatever its format: ids, SIDs as written, metadata; and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from widebeam.constraints.item_ids import ItemIds
from widebeam.errors import CatalogError

MAX_PROBLEMS = 20
"""Problems that are listed; the rest is counted."""
RESERVED = ("item_id", "sid")
"""Columns with a meaning of their own: not metadata."""


class Metadata(Protocol):
    """Metadata columns by file row."""

    fields: tuple[str, ...]

    def get(self, row: int, fields: Sequence[str]) -> dict[str, Any]:
        """Values of one row; None where the row has none."""

    def column(self, field: str) -> pa.ChunkedArray:
        """One column of all rows. Raises pa.ArrowInvalid when its values are of mixed types."""


@dataclass(frozen=True, eq=False)
class Rows:
    """One catalog file as read, a row for each item, in file order."""

    format: str
    """jsonl, parquet, minionerec or sid2pid."""
    ids: ItemIds
    lengths: np.ndarray
    """int64 [rows]; levels of each SID."""
    values: np.ndarray
    """int64 [sum of lengths]; all SIDs end to end: codes, token ids, or indices into `tokens`."""
    tokens: list[str] | None
    """Distinct token strings, if SIDs are given as such."""
    metadata: Metadata
    where: Callable[[int], str]
    """Name of a row for an error message, such as `items.jsonl:17`."""


class Problems:
    """Collects what is wrong with a file, so that all of it is reported at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._count = 0
        self._listed: list[tuple[int, str]] = []

    def add(self, position: int, text: str) -> None:
        """`position` orders the list: a line or row number."""
        self._count += 1
        if self._count <= MAX_PROBLEMS:
            self._listed.append((position, text))

    def add_rows(self, rows: np.ndarray, describe: Callable[[int], str]) -> None:
        """One problem for each of these rows, described only where it may be listed."""
        self._count += len(rows)
        self._listed += [(row, describe(row)) for row in rows[:MAX_PROBLEMS].tolist()]

    def check(self) -> None:
        """Raise CatalogError if there was any."""
        if not self._count:
            return
        lines = [text for _, text in sorted(self._listed)[:MAX_PROBLEMS]]
        more = self._count - len(lines)
        message = lines[0]
        if self._count > 1:
            message = f"{self.name} has {self._count} problems, the first: {lines[0]}"
        raise CatalogError(message, lines + [f"... and {more} more"] * (more > 0))


class ArrowColumns:
    """Metadata of a parquet file, as its columns."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.fields = tuple(table.column_names)

    def get(self, row: int, fields: Sequence[str]) -> dict[str, Any]:
        return {field: self._table.column(field)[row].as_py() for field in fields}

    def column(self, field: str) -> pa.ChunkedArray:
        return self._table.column(field)


class JsonObjects:
    """Metadata of JSON files: a JSON object for each row, kept as text and decoded when asked for."""

    def __init__(self, text: bytes, starts: np.ndarray, ends: np.ndarray, fields: Iterable[str]) -> None:
        self._text = memoryview(text)
        self._starts = starts
        self._ends = ends
        self._decode = msgspec.json.Decoder(dict).decode
        self._columns: dict[str, pa.ChunkedArray | str] = {}
        self.fields = tuple(field for field in fields if field not in RESERVED)

    @classmethod
    def of(cls, objects: Iterable[dict[str, Any]]) -> JsonObjects:
        encoded = [msgspec.json.encode(one) for one in objects]
        ends = np.cumsum([len(one) for one in encoded])
        starts = np.append(0, ends[:-1])
        fields = dict.fromkeys(field for one in objects for field in one)
        return cls(b"".join(encoded), starts, ends, fields)

    def get(self, row: int, fields: Sequence[str]) -> dict[str, Any]:
        decoded = self._decode(self._text[self._starts[row] : self._ends[row]])
        return {field: decoded.get(field) for field in fields}

    def column(self, field: str) -> pa.ChunkedArray:
        """Made once, as that decodes all objects; so is the reason why it cannot be."""
        column = self._columns.get(field)
        if column is None:
            column = self._columns[field] = self._collect(field)
        if isinstance(column, str):
            raise pa.ArrowInvalid(column)
        return column

    def _collect(self, field: str) -> pa.ChunkedArray | str:
        places = zip(self._starts.tolist(), self._ends.tolist(), strict=True)
        try:
            array = pa.array([self._decode(self._text[start:end]).get(field) for start, end in places])
        except (pa.ArrowException, OverflowError) as error:
            return str(error)
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
