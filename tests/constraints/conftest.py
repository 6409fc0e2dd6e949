"""Catalogs for all tests of this folder: one that is built from embeddings, and one to filter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.constraints.builds import DIM, ITEMS, options
from tests.constraints.catalog_files import write_header, write_jsonl
from widebeam.constraints.build import build
from widebeam.constraints.catalog import Catalog


@pytest.fixture(scope="session")
def vectors() -> np.ndarray:
    """Clouds of items, some of which are the same as others."""
    rng = np.random.default_rng(5)
    drawn = rng.normal(size=(20, DIM))[rng.integers(0, 20, ITEMS)] + 0.3 * rng.normal(size=(ITEMS, DIM))
    drawn[500:520] = drawn[0]
    return drawn.astype(np.float32)


@pytest.fixture(scope="session")
def npy(vectors: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embeddings") / "items.npy"
    np.save(path, vectors)
    return path


@pytest.fixture
def token_of() -> Callable[[str], int]:
    """Ids of SID tokens, as a tokenizer that knows them all would have them."""
    return lambda token: 1000 * "abcdefgh".index(token[1]) + int(token[3:-1])


@pytest.fixture(scope="session")
def built(npy: Path) -> Path:
    """A build with default settings but for the size."""
    build(options(npy, npy.parent / "built"))
    return npy.parent / "built"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """200 items under few SIDs, with columns of many kinds."""
    rng = np.random.default_rng(5)
    rows = [
        {
            "item_id": i,
            "sid": rng.integers(0, 4, 2).tolist(),
            "price": i % 7,
            "title": f"Title {i}",
            "mixed": [i, "a"][i % 2],
        }
        for i in range(200)
    ]
    rows[0]["deep"], rows[1]["huge"] = {"a": 1}, 2**70
    write_header(tmp_path, {"filters": {"in_stock": [{"column": "price", "op": ">", "value": 3}]}})
    return Catalog.load(write_jsonl(tmp_path / "items.jsonl", rows))
