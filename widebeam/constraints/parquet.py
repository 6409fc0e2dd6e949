"""Read a native catalog from parquet, column by column."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from widebeam.constraints.header import PARQUET_KEY
from widebeam.constraints.item_ids import ItemIds
from widebeam.constraints.predicates import is_list
from widebeam.constraints.rows import RESERVED, ArrowColumns, Problems, Rows
from widebeam.errors import CatalogError

Where = Callable[[int], str]


def is_parquet(path: Path) -> bool:
    """By its name or its first bytes. Raises OSError."""
    with path.open("rb") as file:
        return path.suffix in (".parquet", ".pq") or file.read(4) == b"PAR1"


def embedded_header(path: Path, name: str) -> bytes | None:
    """The JSON text under the schema metadata key `widebeam`, if there is one."""
    return (open_parquet(path, name).schema_arrow.metadata or {}).get(PARQUET_KEY)


def read_parquet(path: Path, name: str) -> Rows:
    """Columns `item_id` (integers or strings), `sid` (lists of integers or of strings), any others as metadata.

    Rows are counted from 0 in messages. Raises CatalogError.
    """
    file = open_parquet(path, name)
    table = read_columns(file, name)
    _check_schema(name, table.schema)

    def where(row: int) -> str:
        return f"{name} row {row}"

    problems = Problems(name)
    ids = table.column("item_id")
    _check_ids(ids, problems, where)

    def item(row: int) -> str:
        item_id = ids[row].as_py()
        return "the item" if item_id in (None, "") else f"item {item_id!r}"

    lengths, values, tokens = _sids(table.column("sid"), item, problems, where)
    return Rows("parquet", ItemIds.from_arrow(ids), lengths, values, tokens, _metadata(name, table), where)


def open_parquet(path: Path, name: str) -> pq.ParquetFile:
    """Raises CatalogError, which calls the file by `name`."""
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last for names of columns
        raise CatalogError(f"{name}: not a readable parquet file: {one_line(error)}") from None


def read_columns(file: pq.ParquetFile, name: str, columns: list[str] | None = None) -> pa.Table:
    """Those columns of all rows, or all columns. Raises CatalogError, which calls the file by `name`."""
    try:  # by row groups: pyarrow cannot read nested columns that need more than one chunk in one go
        groups = [file.read_row_group(group, columns) for group in range(file.num_row_groups)]
        if columns is not None:  # "a" is also read as the beginning of "a.b"
            groups = [group.select(columns) for group in groups]
        table = pa.concat_tables(groups or [file.schema_arrow.empty_table()])
    except (pa.ArrowException, OSError) as error:
        raise CatalogError(f"{name}: cannot be read: {one_line(error)}") from None
    for label, column in zip(table.column_names, table.columns, strict=True):
        try:
            column.validate(full=True)  # reading checks neither that text is UTF-8 nor that places are inside
        except pa.ArrowInvalid as error:
            raise CatalogError(f"{name}: column {label!r} cannot be read: {one_line(error)}") from None
    return table


def one_line(error: Exception) -> str:
    """An error of several lines, for a message of one."""
    return " ".join(str(error).split())


def check_names(name: str, schema: pa.Schema) -> None:
    """Raise CatalogError for two columns of one name."""
    for column in schema.names:
        if schema.names.count(column) > 1:
            raise CatalogError(f"{name}: column {column!r} is there twice")


def _check_schema(name: str, schema: pa.Schema) -> None:
    check_names(name, schema)
    for column in RESERVED:
        if column not in schema.names:
            raise CatalogError(f"{name}: no column {column!r}; columns are {', '.join(schema.names)}")
    ids, sid = schema.field("item_id").type, schema.field("sid").type
    if not is_id(ids):
        hint = "; ids become floating point when some are missing" if pa.types.is_floating(ids) else ""
        raise CatalogError(f"{name}: column 'item_id' must hold integers or strings, not {ids}{hint}")
    is_list = pa.types.is_list(sid) or pa.types.is_large_list(sid) or pa.types.is_fixed_size_list(sid)
    if not (is_list and is_id(sid.value_type)):
        raise CatalogError(f"{name}: column 'sid' must hold lists of integers or of strings, not {sid}")


def _metadata(name: str, table: pa.Table) -> ArrowColumns:
    """The other columns, of types that can grow."""
    columns: dict[str, pa.ChunkedArray] = {}
    for label, column in zip(table.column_names, table.columns, strict=True):
        if label not in RESERVED:
            try:
                columns[label] = column.cast(_growing(column.type))
            except pa.ArrowException as error:
                raise CatalogError(f"{name}: column {label!r} cannot be read: {one_line(error)}") from None
    return ArrowColumns(pa.table(columns))


def _growing(kind: pa.DataType) -> pa.DataType:
    """The same type with room in its dictionaries for the values of items that come later."""
    if pa.types.is_dictionary(kind):
        return pa.dictionary(pa.int32(), kind.value_type, kind.ordered)
    if not is_list(kind):
        return kind
    element = kind.value_field.with_type(_growing(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(element, kind.list_size)
    return pa.large_list(element) if pa.types.is_large_list(kind) else pa.list_(element)


def is_id(kind: pa.DataType) -> bool:
    """Whether item ids may be of that type."""
    return pa.types.is_integer(kind) or _is_text(kind)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def read_item_ids(column: pa.ChunkedArray, problems: Problems, where: Where) -> ItemIds:
    """Ids. Raises CatalogError for a missing or empty one."""
    _check_ids(column, problems, where)
    problems.check()
    return ItemIds.from_arrow(column)


def _check_ids(column: pa.ChunkedArray, problems: Problems, where: Where) -> None:
    missing = np.flatnonzero(column.is_null().to_numpy())
    problems.add_rows(missing, lambda row: f"{where(row)}: item_id is missing")
    if _is_text(column.type):
        empty = np.flatnonzero(pc.equal(column.cast(pa.large_string()), "").fill_null(False).to_numpy())
        problems.add_rows(empty, lambda row: f"{where(row)}: item_id is empty")


def _sids(
    column: pa.ChunkedArray, item: Where, problems: Problems, where: Where
) -> tuple[np.ndarray, np.ndarray, list[str] | None]:
    """Lengths, values and distinct tokens, as `Rows` has them. Raises CatalogError for all problems so far."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
    problems.add_rows(np.flatnonzero(lengths == 0), lambda row: f"{where(row)}: {item(row)} has no sid")
    flat = pc.list_flatten(column)
    if flat.null_count:
        holes = np.repeat(np.arange(len(lengths)), lengths)[np.flatnonzero(flat.is_null().to_numpy())]
        problems.add_rows(np.unique(holes), lambda row: f"{where(row)}: {item(row)}: sid has a missing entry")
    problems.check()
    if not _is_text(flat.type):
        try:
            return lengths, flat.cast(pa.int64()).to_numpy(), None
        except pa.ArrowInvalid as error:
            raise CatalogError(f"{problems.name}: column 'sid': {error}") from None
    encoded = flat.cast(pa.large_string()).dictionary_encode().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0)
    return lengths, encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()
