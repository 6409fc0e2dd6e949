"""`widebeam catalog build`: from a file of embeddings to a folder with a catalog and all that belongs to it.

Codebooks are trained on a sample that fits into memory; then all vectors are encoded in batches, and of each item only
its codes are kept.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Meta

from widebeam.constraints.embeddings import Embeddings, check_values, read_embeddings
from widebeam.constraints.encode import encode, encode_balanced, number_apart
from widebeam.constraints.header import MAX_CODES, PARQUET_KEY, Header
from widebeam.constraints.index import CatalogIndex
from widebeam.constraints.kmeans import Backend, choose_backend
from widebeam.constraints.report import Collisions
from widebeam.constraints.sid import LEVEL_LETTERS, sid_tokens, token_form, train_codebooks
from widebeam.errors import ConfigError
from widebeam.faults import counted

ITEMS, HEADER, TOKENS = "items.parquet", "catalog.json", "added_tokens.json"
CODEBOOKS, REPORT = "codebooks.npy", "build.json"
SAMPLE, SAMPLE_PER_CODE = 200_000, 128
"""Vectors that codebooks are trained on: so many, or so many for each code of a level if that is more."""


class Build(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give items semantic IDs by residual k-means on their embeddings, and write them as a catalog."""

    embeddings: str
    """File of item embeddings: .npy, [items, dim], or parquet with a column of lists of floats."""
    ids: str | None = None
    """Column of ids in a parquet file (default: item_id); beside .npy a text file of one id a line (default: row
    numbers)."""
    column: str | None = None
    """Column of a parquet file that holds the embeddings; needed only where there are several that could."""
    levels: Annotated[int, Meta(ge=1, le=len(LEVEL_LETTERS))] = 3
    """Codes of a SID, without the one that --dedup adds."""
    codes: Annotated[int, Meta(ge=2, le=MAX_CODES)] = 256
    """Codes of each level's codebook."""
    seed: Annotated[int, Meta(ge=0, le=2**31 - 100)] = 0
    """The same input, seed and library give the same SIDs."""
    balanced: bool = False
    """No code of a level gets more than 1.25 times its even share of the items."""
    dedup: bool = False
    """One more level that numbers the items of one SID, so that every item has a SID of its own."""
    backend: Literal["auto"] | Backend = "auto"
    """Library for k-means; auto: faiss if it is installed, else scikit-learn."""
    sample: Annotated[int, Meta(ge=1)] | None = None
    """Items that codebooks are trained on; by default 200,000, or 128 for each code of a level."""
    output: str = "catalog"
    """Folder to write to."""
    overwrite: bool = False
    """Replace an earlier build in that folder. What its catalog.json says beside the levels is kept."""


class BuiltLevel(msgspec.Struct, frozen=True, kw_only=True):
    """One level of the quantiser."""

    codes: int
    """As asked for, or fewer where there are not as many different vectors."""
    codes_in_use: int
    largest: int
    """Items that have the most frequent code."""
    error: float
    """Mean squared distance between an item's vector and the sum of its centroids up to this level."""


class BuildReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was built, and how good it is; `build.json`."""

    items: int
    dim: int
    backend: Backend
    seed: int
    sample: int
    """Items that the codebooks were trained on."""
    balanced: bool
    dedup_codes: int | None
    """Codes of the level that `dedup` adds; None: it was not asked for."""
    variance: float
    """Mean squared distance of a vector to the mean of all: the error without any level."""
    levels: list[BuiltLevel]
    collisions: Collisions
    """Before `dedup`."""

    @property
    def sizes(self) -> list[int]:
        """Codes of every level of a SID."""
        return [level.codes for level in self.levels] + ([] if self.dedup_codes is None else [self.dedup_codes])

    def text(self) -> str:
        """The report for people."""
        lines = [
            f"{'items':<9} {self.items:,} of {counted(self.dim, 'dimension', ',')}",
            f"{'k-means':<9} {self.backend}, seed {self.seed}, on {counted(self.sample, 'item', ',')}"
            + ", balanced" * self.balanced,
            f"{'shared':<9} {self.collisions.text()}",
        ]
        if self.dedup_codes is not None:
            lines.append(f"{'dedup':<9} a level of {counted(self.dedup_codes, 'code', ',')} tells them apart")
        lines.append(f"{'level':>5} {'codes':>9} {'in use':>9} {'items of one: max':>18} {'variance left':>14}")
        for number, level in enumerate(self.levels):
            left = level.error / self.variance if self.variance else 0.0
            lines.append(f"{number:>5} {level.codes:>9,} {level.codes_in_use:>9,} {level.largest:>18,} {left:>14.1%}")
        return "\n".join(lines)


def build(options: Build) -> BuildReport:
    """Write `items.parquet`, `catalog.json`, `added_tokens.json`, `codebooks.npy` and `build.json`.

    Raises CatalogError for what is wrong with a file, ConfigError for what cannot be done.
    """
    path, folder = Path(options.embeddings), Path(options.output)
    backend = choose_backend(options.backend)
    if options.dedup and options.levels == len(LEVEL_LETTERS):
        raise ConfigError(f"--dedup adds a level, and there are letters for {len(LEVEL_LETTERS)}")
    header = _header_to_keep(folder, options.overwrite)
    with scratch_folder(folder) as scratch:
        embeddings = read_embeddings(path, ids=options.ids, column=options.column, scratch=scratch)
        variance = check_values(embeddings, path.name)
        sample = _sample(embeddings, options)
        sizes = [options.codes] * options.levels
        codebooks, _ = train_codebooks(sample, sizes, options.seed, backend, balance=options.balanced)
        codes, errors = (encode_balanced if options.balanced else encode)(embeddings, codebooks)
        report = BuildReport(
            items=len(embeddings),
            dim=embeddings.dim,
            backend=backend,
            seed=options.seed,
            sample=len(sample),
            balanced=options.balanced,
            dedup_codes=options.codes if options.dedup else None,
            variance=variance,
            levels=[_level(*one) for one in zip(codebooks, codes.T, errors, strict=True)],
            collisions=Collisions.of(CatalogIndex.build(codes)[0]),
        )
        if options.dedup:
            codes = np.column_stack([codes, number_apart(codes, options.codes)])
        _write(scratch, embeddings.table, codes, codebooks, header, report)
        for name in (CODEBOOKS, TOKENS, REPORT, HEADER, ITEMS):
            os.replace(scratch / name, folder / name)
    return report


def few_codes(options: Build, report: BuildReport) -> str | None:
    """A warning of levels that got fewer codes than were asked for, if there are any."""
    short = [
        f"level {number} has {counted(level.codes, 'code')}"
        for number, level in enumerate(report.levels)
        if level.codes < options.codes
    ]
    if not short:
        return None
    return (
        f"{', '.join(short)} in place of {options.codes}: the levels before left too few different vectors over, of "
        f"{counted(report.items, 'item', ',')}. A level of few codes tells little apart: take fewer --codes, or fewer "
        "--levels"
    )


def _header_to_keep(folder: Path, overwrite: bool) -> dict[str, Any]:
    """What an earlier catalog.json says beside the SIDs, and a refusal to replace an earlier build unasked."""
    found = [name for name in (ITEMS, HEADER, TOKENS, CODEBOOKS, REPORT) if (folder / name).exists()]
    if found and not overwrite:
        raise ConfigError(f"{folder} has {found[0]} already: take another --output, or --overwrite")
    if HEADER not in found:
        return {}
    try:
        header = msgspec.json.decode((folder / HEADER).read_bytes(), type=dict)
        msgspec.convert(header, Header)
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{folder / HEADER}, of which all but the levels is kept, is wrong: {error}") from None
    return {name: value for name, value in header.items() if name not in ("version", "sid", "levels")}


def _sample(embeddings: Embeddings, options: Build) -> np.ndarray:
    """Vectors to train on, float32, in file order."""
    wanted = max(SAMPLE, SAMPLE_PER_CODE * options.codes) if options.sample is None else options.sample
    if wanted >= len(embeddings):
        return embeddings.read(slice(None))
    rows = np.random.default_rng(options.seed).choice(len(embeddings), wanted, replace=False, shuffle=False)
    return embeddings.read(np.sort(rows))


def _level(book: np.ndarray, codes: np.ndarray, error: float) -> BuiltLevel:
    counts = np.bincount(codes)
    return BuiltLevel(
        codes=len(book), codes_in_use=int(np.count_nonzero(counts)), largest=int(counts.max()), error=float(error)
    )


def _write(
    folder: Path,
    table: pa.Table,
    codes: np.ndarray,
    codebooks: list[np.ndarray],
    kept: dict[str, Any],
    report: BuildReport,
) -> None:
    header = sid_header(report) | kept
    pq.write_table(with_header(with_sids(table, codes), header), folder / ITEMS)
    _write_json(folder / HEADER, header)
    _write_json(folder / TOKENS, sid_tokens(report.sizes))
    np.save(folder / CODEBOOKS, np.concatenate(codebooks))
    _write_json(folder / REPORT, report)


def sid_header(report: BuildReport) -> dict[str, Any]:
    """What the header says of a build's SIDs."""
    levels = [{"token": token_form(level), "codes": size} for level, size in enumerate(report.sizes)]
    return {"sid": "codes", "levels": levels}


def with_header(table: pa.Table, header: object) -> pa.Table:
    """The table with a header inside, so that its codes mean the same wherever the file lies."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), PARQUET_KEY: msgspec.json.encode(header)})


def _write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def with_sids(table: pa.Table, codes: np.ndarray) -> pa.Table:
    """`item_id`, `sid` and metadata: what a catalog file holds."""
    offsets = np.arange(0, codes.size + 1, codes.shape[1], dtype=np.int32)
    sids = pa.ListArray.from_arrays(pa.array(offsets), pa.array(codes.ravel()))
    return table.add_column(1, "sid", sids)


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder inside another, which is made; so what is finished can be moved in one step."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".build-") as scratch:
            yield Path(scratch)
    except OSError as error:
        raise ConfigError(f"cannot write to {parent}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            parent.rmdir()  # only if it is empty: nothing came of it
