"""What a catalog file holds, whatever its format: ids, SIDs as written, metadata; and what is wrong with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec
import numpy as np
import pyarrow as pa

from widebeam.constraints.cells import cells, fitted
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

    def updated(self, gone: np.ndarray, objects: Sequence[Mapping[str, Any]]) -> Self:
        """With a further row for each object. The rows `gone` stay where they are, and their values do not count.
        Raises InvalidRequest (`type_mismatch`) for a value that does not suit its column."""

    def filter(self, keep: np.ndarray) -> Self:
        """Only the rows that `keep`, bool [rows], marks."""


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
        self._columns = dict(zip(table.column_names, table.columns, strict=True))
        self.fields = tuple(table.column_names)

    def get(self, row: int, fields: Sequence[str]) -> dict[str, Any]:
        return {field: self._columns[field][row].as_py() for field in fields}

    def column(self, field: str) -> pa.ChunkedArray:
        return self._columns[field]

    def updated(self, gone: np.ndarray, objects: Sequence[Mapping[str, Any]]) -> ArrowColumns:
        columns = {
            field: grown(column, cells(column.type, [one.get(field) for one in objects], field))
            for field, column in self._columns.items()
        }
        return ArrowColumns(pa.table(columns))

    def filter(self, keep: np.ndarray) -> ArrowColumns:
        mask = pa.array(keep)
        return ArrowColumns(pa.table({field: column.filter(mask) for field, column in self._columns.items()}))


class JsonObjects:
    """Metadata of JSON files: a JSON object for each row, kept as text and decoded when asked for."""

    def __init__(self, objects: pa.ChunkedArray, fields: Iterable[str]) -> None:
        """`objects` are texts (large_binary) with blanks behind them at most."""
        self._objects = objects
        self._decode = msgspec.json.Decoder(dict).decode
        self._columns: dict[str, pa.ChunkedArray | str] = {}
        self._gone = np.zeros(0, np.int64)
        """Rows that count no more: their values have no say in the type of a column."""
        self.fields = tuple(field for field in fields if field not in RESERVED)

    @classmethod
    def of(cls, objects: Iterable[Mapping[str, Any]]) -> JsonObjects:
        fields = dict.fromkeys(field for one in objects for field in one)
        return cls(pa.chunked_array([_texts(objects)]), fields)

    def get(self, row: int, fields: Sequence[str]) -> dict[str, Any]:
        decoded = self._decode(self._objects[row].as_py().rstrip())
        return {field: decoded.get(field) for field in fields}

    def column(self, field: str) -> pa.ChunkedArray:
        """Made once, as that decodes all objects; so is the reason why it cannot be."""
        column = self._columns.get(field)
        if column is None:
            column = self._columns[field] = self._collect(field)
        if isinstance(column, str):
            raise pa.ArrowInvalid(column)
        return column

    def updated(self, gone: np.ndarray, objects: Sequence[Mapping[str, Any]]) -> JsonObjects:
        """Columns are made for their types, of those that the new rows have values in."""
        updated = JsonObjects(grown(self._objects, _texts(objects)), self.fields)
        updated._gone = np.concatenate([self._gone, gone])
        for field in self.fields:
            values = [one.get(field) for one in objects]
            if field in self._columns or any(value is not None for value in values):
                with contextlib.suppress(pa.ArrowInvalid):  # of mixed types before: any value is as good as those
                    fit = fitted(self.column(field), values, field)
                    if fit is not None:
                        updated._columns[field] = grown(*fit)
        return updated

    def filter(self, keep: np.ndarray) -> JsonObjects:
        kept = JsonObjects(self._objects.filter(pa.array(keep)), self.fields)
        known = {field: column for field, column in self._columns.items() if isinstance(column, pa.ChunkedArray)}
        kept._columns = {field: column.filter(pa.array(keep)) for field, column in known.items()}
        return kept

    def _collect(self, field: str) -> pa.ChunkedArray | str:
        values = [self._decode(text.rstrip()).get(field) for chunk in _pieces(self._objects) for text in chunk]
        for row in self._gone.tolist():
            values[row] = None
        try:
            array = pa.array(values)
        except (pa.ArrowException, OverflowError) as error:
            return str(error)
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def _texts(objects: Iterable[Mapping[str, Any]]) -> pa.LargeBinaryArray:
    return pa.array([msgspec.json.encode(one) for one in objects], pa.large_binary())


def _pieces(column: pa.ChunkedArray, rows: int = 1 << 16) -> Iterator[list[bytes]]:
    for chunk in column.chunks:
        for start in range(0, len(chunk), rows):
            yield chunk.slice(start, rows).to_pylist()


def grown(column: pa.ChunkedArray, rows: pa.Array) -> pa.ChunkedArray:
    """The column with further rows. Chunks at its end that are no longer than what follows them are joined with it, so
    that there are few chunks, and a row is copied few times, however often a column grows."""
    chunks, joined = column.chunks, [rows]
    while chunks and len(chunks[-1]) <= sum(map(len, joined)):
        joined.insert(0, chunks.pop())
    return pa.chunked_array([*chunks, pa.concat_arrays(joined)], column.type)
