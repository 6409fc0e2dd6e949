"""Writes small catalogs in every format that is read, and has faulty ones refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from widebeam.constraints.catalog import Catalog
from widebeam.errors import CatalogError

Row = Mapping[str, Any]
TOKENS = {"<a_0>": 10, "<a_1>": 11, "<b_0>": 20, "<b_1>": 99, "<c_0>": 10}
"""Of the tokenizer that those of refusals know."""


def write_jsonl(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: Sequence[Row], header: Any = None, row_group_size: int | None = None) -> Path:
    columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
    unsigned = any(type(key) is int and key >= 2**63 for key in columns["item_id"])
    ids = pa.array(columns.pop("item_id"), pa.uint64() if unsigned else None)
    table = pa.table({"item_id": ids, **columns})
    if header is not None:
        table = table.replace_schema_metadata({"widebeam": json.dumps(header)})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def write_minionerec(folder: Path, rows: Sequence[Row], name: str = "Toys") -> Path:
    """`NAME.index.json` and, where rows have metadata, `NAME.item.json`, shaped as the published ones."""
    path = folder / f"{name}.index.json"
    path.write_text(json.dumps({str(row["item_id"]): row["sid"] for row in rows}))
    metadata = {
        str(row["item_id"]): {key: value for key, value in row.items() if key not in ("item_id", "sid")} for row in rows
    }
    if any(metadata.values()):
        (folder / f"{name}.item.json").write_text(json.dumps(metadata, indent=2))
    return path


def write_packed(path: Path, rows: Sequence[Row]) -> Path:
    """sid2pid: a lone item is given bare, several as a list."""
    items: dict[str, list[Any]] = {}
    for row in rows:
        a, b, c = row["sid"]
        items.setdefault(str(a * 8192**2 + b * 8192 + c), []).append(row["item_id"])
    path.write_text(json.dumps({key: value if len(value) > 1 else value[0] for key, value in items.items()}))
    return path


def write_header(folder: Path, header: Any, name: str = "catalog.json") -> None:
    (folder / name).write_text(json.dumps(header))


def refusal(path: Path, **known: Any) -> CatalogError:
    """Why a file cannot be loaded; `known` is what load is told of the model."""
    with pytest.raises(CatalogError) as caught:
        Catalog.load(path, **known)
    assert "\n" not in str(caught.value)  # printed as one line
    return caught.value
