"""Choose the reader of a catalog file by its ending and, where that does not say, by its content."""

from __future__ import annotations

from pathlib import Path

from widebeam.constraints.header import Header, find_header
from widebeam.constraints.json_files import read_json, read_jsonl
from widebeam.constraints.parquet import embedded_header, is_parquet, read_parquet
from widebeam.constraints.rows import Rows
from widebeam.errors import CatalogError

INHERITED = "the header of the version before (the file has none inside)"


def read(path: Path, name: str, inherited: Header | None = None) -> tuple[Rows, Header, str | None]:
    """The rows of a catalog file, which messages call `name`, its header and where that was found. An `inherited`
    header counts if the file has none inside, whatever lies beside it. Raises CatalogError."""
    try:
        kind = _kind(path, name)
        inside = embedded_header(path, name) if kind == "parquet" else None
        header: Header
        place: str | None
        if inherited is not None and inside is None:
            header, place = inherited, INHERITED
        else:
            header, place = find_header(path, inside, name)
        if kind == "parquet":
            rows = read_parquet(path, name)
        elif kind == "jsonl":
            rows = read_jsonl(path, name)
        else:
            rows = read_json(path, header, name)
    except OSError as error:
        raise CatalogError(f"cannot read {name}: {error.strerror or error}") from None
    if not len(rows.ids):
        raise CatalogError(f"{name} holds no items")
    given = "strings" if rows.tokens is not None else "integers"
    if header.sid is not None and (header.sid == "tokens") != (rows.tokens is not None):
        raise CatalogError(f"{place} says that SIDs are {header.sid}, but {name} gives them as {given}")
    return rows, header, place


def _kind(path: Path, name: str) -> str:
    if path.is_dir():
        raise CatalogError(f"{name} is a folder; a catalog is one file")
    if is_parquet(path):
        return "parquet"
    if path.suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if path.suffix == ".json":
        return "json"
    raise CatalogError(
        f"{name}: not a known catalog format; name it .parquet, .jsonl, .index.json (MiniOneRec) or "
        ".json (packed sid2pid)"
    )
