"""Item embeddings from a file of any size: an .npy matrix as it lies on disk, or a column of a parquet file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from tqdm import tqdm

from widebeam.constraints.kmeans import blocks
from widebeam.constraints.parquet import (
    check_names,
    is_id,
    is_parquet,
    one_line,
    open_parquet,
    read_columns,
    read_item_ids,
)
from widebeam.constraints.rows import RESERVED, Problems
from widebeam.errors import CatalogError
from widebeam.faults import counted

SPOOL_ROWS = 16_384
"""Rows of a parquet file that are decoded at a time."""


@dataclass(frozen=True, eq=False)
class Embeddings:
    """A vector for each item, left on disk."""

    vectors: np.ndarray
    """[items, dim]; float16, float32 or float64, memory-mapped."""
    table: pa.Table
    """`item_id` and metadata, a row for each vector."""
    numbered: bool = False
    """The ids are the numbers of the rows, as none were given."""

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])

    def read(self, rows: np.ndarray | slice) -> np.ndarray:
        """Those vectors as float32, a copy."""
        return np.array(self.vectors[rows], np.float32)

    def batches(self, progress: str) -> Iterator[slice]:
        """All rows, in parts of a few megabytes, under a bar with that name."""
        with tqdm(total=len(self), desc=progress, unit="item", unit_scale=True, disable=None) as bar:
            for rows in blocks(len(self), self.dim):
                yield rows
                bar.update(rows.stop - rows.start)


def read_embeddings(path: Path, *, ids: str | None, column: str | None, scratch: Path) -> Embeddings:
    """Open a file of embeddings and check its shape and ids, not yet its values.

    `ids` is a column of a parquet file (default: `item_id`), or beside an .npy file a text file of one id a line
    (default: the numbers of the rows). `column` holds the embeddings of a parquet file; it may be left out where only
    one column can. A parquet column is copied to a file without a name in the folder `scratch`, so that rows can be
    read in any order. Raises CatalogError.
    """
    try:
        if is_parquet(path):
            return _from_parquet(path, ids or "item_id", column, scratch)
        vectors = _map_npy(path)
        if column is not None:
            raise CatalogError(f"{path.name} is no parquet file: it has no column {column!r}")
        table = pa.table({"item_id": _numbered(len(vectors)) if ids is None else _ids_of_file(Path(ids), len(vectors))})
        return Embeddings(vectors, table, numbered=ids is None)
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror or error}") from None


def check_values(embeddings: Embeddings, name: str) -> float:
    """The variance: mean squared distance to the mean. Raises CatalogError that names rows which cannot be used."""
    problems = Problems(name)
    total = np.zeros(embeddings.dim, np.float64)
    squares = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in embeddings.batches("checking"):
            batch = embeddings.read(rows)
            lengths = np.square(batch).sum(axis=1)
            for row in np.flatnonzero(~np.isfinite(lengths)).tolist():
                fault = "too long for float32" if np.isfinite(batch[row]).all() else "not finite"
                problems.add(rows.start + row, f"{name} row {rows.start + row}: the embedding is {fault}")
            total += batch.sum(axis=0, dtype=np.float64)
            squares += float(lengths.sum(dtype=np.float64))
    problems.check()
    mean = total / len(embeddings)
    return max(0.0, squares / len(embeddings) - float(mean @ mean))


def _map_npy(path: Path) -> np.ndarray:
    try:
        vectors = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise CatalogError(f"{path.name}: not a readable .npy or parquet file: {one_line(error)}") from None
    if vectors.ndim != 2 or not vectors.size:
        raise CatalogError(
            f"{path.name}: embeddings must be [items, dim] and not empty, but have shape {list(vectors.shape)}"
        )
    if vectors.dtype.kind != "f" or vectors.dtype.itemsize > 8:
        raise CatalogError(f"{path.name}: embeddings must be float16, float32 or float64, not {vectors.dtype}")
    return vectors


def _numbered(count: int) -> pa.Array:
    return pa.array(np.arange(count, dtype=np.int64))


def _ids_of_file(path: Path, count: int) -> pa.ChunkedArray:
    """One id a line; integers if all lines are such, as they are usually written."""
    try:
        text = pa.csv.read_csv(
            path,
            pa.csv.ReadOptions(column_names=["item_id"]),
            pa.csv.ParseOptions(delimiter="\x1f", quote_char=False, ignore_empty_lines=False),
            pa.csv.ConvertOptions(column_types={"item_id": pa.large_string()}),
        ).column(0)
    except (pa.ArrowInvalid, OSError) as error:
        raise CatalogError(f"{path.name}: cannot be read: {one_line(error)}") from None
    if len(text) != count:
        raise CatalogError(f"{path.name} has {counted(len(text), 'line')} for {counted(count, 'embedding')}")
    try:
        numbers = text.cast(pa.int64())
        if pc.all(pc.equal(numbers.cast(pa.large_string()), text)).as_py():
            text = numbers
    except pa.ArrowInvalid:
        pass  # not all are integers
    _check_ids(text, path.name, lambda row: f"{path.name}:{row + 1}")
    return text


def _from_parquet(path: Path, ids: str, column: str | None, scratch: Path) -> Embeddings:
    file = open_parquet(path, path.name)
    schema = file.schema_arrow
    check_names(path.name, schema)
    column = _embedding_column(path.name, schema, column)
    if ids not in schema.names:
        raise CatalogError(f"{path.name}: no column {ids!r} of ids; columns are {', '.join(schema.names)}")
    if not is_id(schema.field(ids).type):
        raise CatalogError(
            f"{path.name}: ids must be integers or strings, but column {ids!r} is {schema.field(ids).type}"
        )
    for name in RESERVED:
        if name in schema.names and name != ids:
            raise CatalogError(f"{path.name}: a metadata column cannot be called {name!r}; drop or rename it")
    if not file.metadata.num_rows:
        raise CatalogError(f"{path.name} holds no items")
    others = [name for name in schema.names if name not in (ids, column)]
    table = read_columns(file, path.name, [ids, *others]).rename_columns(["item_id", *others])
    _check_ids(table.column("item_id"), path.name, lambda row: f"{path.name} row {row}")
    return Embeddings(_spool(file, path.name, column, scratch), table.replace_schema_metadata(None))


def _check_ids(column: pa.ChunkedArray, name: str, where: Callable[[int], str]) -> None:
    problems = Problems(name)
    ids = read_item_ids(column, problems, where)
    for row, earlier in ids.duplicates():
        problems.add(row, f"{where(row)}: item {ids[row]!r} is there twice, first at {where(earlier)}")
    problems.check()


def _embedding_column(name: str, schema: pa.Schema, column: str | None) -> str:
    able = [field.name for field in schema if _is_vector(field.type)]
    if column is None and len(able) == 1:
        return able[0]
    found = f"those that do: {', '.join(able) or 'none'}"
    if column is None:
        raise CatalogError(f"{name}: which column holds the embeddings, lists of floats? Name it by --column; {found}")
    if column not in able:
        raise CatalogError(f"{name}: column {column!r} does not hold embeddings, lists of floats; {found}")
    return column


def _is_vector(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_floating(kind.value_type)


def _spool(file: pq.ParquetFile, name: str, column: str, scratch: Path) -> np.ndarray:
    """The column as a memory-mapped matrix, in a temporary file that goes when it is no longer used."""
    problems = Problems(name)
    rows, dim, dtype = 0, 0, np.dtype(np.float32)
    with tempfile.TemporaryFile(dir=scratch) as spool:
        with tqdm(total=file.metadata.num_rows, desc="reading", unit="item", unit_scale=True, disable=None) as bar:
            for batch in file.iter_batches(SPOOL_ROWS, columns=[column]):
                lists = batch.column(0)
                lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
                dim = dim or int(lengths[0])
                _check_lists(lists, lengths, dim, rows, problems)
                values = lists.flatten().to_numpy(zero_copy_only=False)
                dtype = values.dtype
                values.tofile(spool)
                rows += len(lists)
                bar.update(len(lists))
        problems.check()
        spool.flush()
        return np.memmap(spool, dtype, "r", shape=(rows, dim))


def _check_lists(lists: pa.Array, lengths: np.ndarray, dim: int, first: int, problems: Problems) -> None:
    for row in np.flatnonzero((lengths != dim) | (lengths == 0)).tolist():
        fault = f"has {counted(lengths[row], 'dimension')}, the first has {dim}" if lengths[row] else "is missing"
        problems.add(first + row, f"{problems.name} row {first + row}: the embedding {fault}")
    if lists.flatten().null_count:
        holes = [row for row, vector in enumerate(lists) if vector.is_valid and vector.values.null_count]
        for row in holes:
            problems.add(first + row, f"{problems.name} row {first + row}: the embedding has a missing entry")
