"""Builds of a small catalog from embeddings, and what their files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from widebeam.constraints.build import Build

ITEMS, DIM = 600, 16


def options(embeddings: Path, output: Path, **given: Any) -> Build:
    return Build(**{"embeddings": str(embeddings), "output": str(output), "codes": 16} | given)


def read(folder: Path) -> tuple[list[Any], np.ndarray, list[np.ndarray]]:
    """Ids, codes and codebooks of a build, as they lie in its files."""
    table = pq.read_table(folder / "items.parquet")
    header = json.loads((folder / "catalog.json").read_text())
    rows = np.load(folder / "codebooks.npy")
    ends = np.cumsum([level["codes"] for level in header["levels"]])
    books = [book for book in np.split(rows, ends[ends <= len(rows)]) if len(book)]
    return table.column("item_id").to_pylist(), np.array(table.column("sid").to_pylist()), books
