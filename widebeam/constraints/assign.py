"""`widebeam catalog assign`: SIDs for items that came after the codebooks were built."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from widebeam.constraints.build import (
    CODEBOOKS,
    ITEMS,
    REPORT,
    BuildReport,
    scratch_folder,
    sid_header,
    with_header,
    with_sids,
)
from widebeam.constraints.embeddings import check_values, read_embeddings
from widebeam.constraints.encode import encode, number_apart
from widebeam.constraints.header import Header, find_header
from widebeam.constraints.parquet import open_parquet, read_columns
from widebeam.errors import CatalogError, ConfigError
from widebeam.faults import counted


class Assign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give new items SIDs by the codebooks of an earlier build, and print them as JSON lines."""

    codebooks: str
    """Folder that `widebeam catalog build` wrote."""
    embeddings: str
    """File of the new items' embeddings, as for build."""
    ids: str | None = None
    """As for build; needed where the numbers of the rows are ids of the catalog beside the codebooks."""
    column: str | None = None
    """As for build."""
    output: str | None = None
    """Parquet file to write instead of printing."""


def assign(options: Assign) -> pa.Table:
    """`item_id`, `sid` and metadata of the new items: at each level the nearest centroid.

    After a `--dedup` build an item gets the next free number of its SID; one that the catalog has under the same SID
    keeps its number. An id that the catalog has means that item, so that rows without ids may get none of those.
    Raises CatalogError or ConfigError.
    """
    folder, path = Path(options.codebooks), Path(options.embeddings)
    report, codebooks = read_codebooks(folder)
    where = tempfile.gettempdir() if options.output is None else Path(options.output).parent
    with scratch_folder(Path(where)) as scratch:
        embeddings = read_embeddings(path, ids=options.ids, column=options.column, scratch=scratch)
        if embeddings.dim != report.dim:
            raise ConfigError(
                f"{path.name} has {counted(embeddings.dim, 'dimension')}, the codebooks in {folder} {report.dim}"
            )
        if embeddings.numbered:
            _check_new(folder / ITEMS, embeddings.table.column("item_id"), path.name)
        check_values(embeddings, path.name)
        codes, _ = encode(embeddings, codebooks)
        if report.dedup_codes is not None:
            numbers = _numbers(folder / ITEMS, embeddings.table.column("item_id"), codes, report.dedup_codes)
            codes = np.column_stack([codes, numbers])
        table = with_sids(embeddings.table, codes)
        if options.output is not None:
            pq.write_table(with_header(table, _header(folder, report)), scratch / ITEMS)
            os.replace(scratch / ITEMS, options.output)
    return table


def _header(folder: Path, report: BuildReport) -> Header:
    """That of the build as it is now, edits included, without its version. Raises CatalogError."""
    header, _ = find_header(folder / ITEMS, msgspec.json.encode(sid_header(report)), str(folder / ITEMS))
    return msgspec.structs.replace(header, version=None)


def json_lines(table: pa.Table) -> Iterator[str]:
    """The rows as lines of a JSONL catalog."""
    for batch in table.to_batches(1 << 12):
        for row in batch.to_pylist():
            yield msgspec.json.encode(row).decode()


def read_codebooks(folder: Path) -> tuple[BuildReport, list[np.ndarray]]:
    """The report of a build and its codebooks, float32 [codes, dim] each. Raises ConfigError."""
    try:
        report = msgspec.json.decode((folder / REPORT).read_bytes(), type=BuildReport)
        rows = np.load(folder / CODEBOOKS, allow_pickle=False)
    except (OSError, ValueError, EOFError, msgspec.DecodeError) as error:
        raise ConfigError(f"{folder} is no folder of `widebeam catalog build`: {error}") from None
    ends = np.cumsum([level.codes for level in report.levels])
    if rows.shape != (ends[-1], report.dim) or rows.dtype != np.float32:
        raise ConfigError(f"{folder}: {CODEBOOKS} is not what {REPORT} says: it is {rows.dtype} {list(rows.shape)}")
    return report, np.split(rows, ends[:-1])


def _check_new(catalog: Path, item_ids: pa.ChunkedArray, name: str) -> None:
    """Raise ConfigError if the catalog has items of ids that are mere numbers of rows: they would be replaced."""
    if not catalog.exists():
        return
    known = int((_rows_of(item_ids, _read_known(catalog, ["item_id"])) >= 0).sum())
    if known:
        raise ConfigError(
            f"--ids is needed: {name} has no ids, and {known:,} of its row numbers 0 to {len(item_ids) - 1:,} are ids "
            f"of other items in {catalog}"
        )


def _read_known(catalog: Path, columns: list[str]) -> pa.Table:
    return read_columns(open_parquet(catalog, catalog.name), catalog.name, columns)


def _rows_of(item_ids: pa.ChunkedArray, known: pa.Table) -> np.ndarray:
    """The catalog's row of each id, -1 for one that it does not have."""
    at = pc.index_in(item_ids.cast(pa.large_string()), known.column("item_id").cast(pa.large_string()))
    return at.fill_null(-1).to_numpy()


def _numbers(catalog: Path, item_ids: pa.ChunkedArray, codes: np.ndarray, limit: int) -> np.ndarray:
    """The last code of each new item, by what the catalog's items have."""
    if not catalog.exists():
        raise CatalogError(f"{catalog} is missing; which numbers are taken can be known from it alone")
    table = _read_known(catalog, ["item_id", "sid"])
    known = pc.list_flatten(table.column("sid")).to_numpy().reshape(len(table), -1)
    if known.shape[1] != codes.shape[1] + 1:
        raise CatalogError(f"{catalog.name} has SIDs of {counted(known.shape[1], 'level')}, not {codes.shape[1] + 1}")
    rows = _rows_of(item_ids, table)
    same = (rows >= 0) & (known[rows, :-1] == codes).all(axis=1)
    given = np.where(same, known[rows, -1], -1)
    stays = np.ones(len(known), bool)
    stays[rows[same]] = False
    numbers = number_apart(
        np.concatenate([known[stays, :-1], codes]).astype(np.int32),
        limit,
        np.concatenate([known[stays, -1], given]).astype(np.int32),
    )
    return numbers[int(stays.sum()) :]
