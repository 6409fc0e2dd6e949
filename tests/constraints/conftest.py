"""One catalog that is built from embeddings, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.constraints.builds import DIM, ITEMS, options
from widebeam.constraints.build import build


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
