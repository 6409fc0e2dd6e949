"""From vectors to the codes of their SIDs, in batches; and a number that tells items of one SID apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from widebeam.constraints.balance import balanced, capacity
from widebeam.constraints.embeddings import Embeddings
from widebeam.constraints.index import CatalogIndex
from widebeam.constraints.kmeans import nearest
from widebeam.constraints.sid import residuals
from widebeam.errors import ConfigError
from widebeam.faults import counted


def encode(embeddings: Embeddings, codebooks: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Codes int32 [items, levels], each the nearest centroid of what the levels before left; and errors by level.

    An error is the mean squared distance that is left. A vector's codes do not depend on the others.
    """
    codes = np.empty((len(embeddings), len(codebooks)), np.int32)
    errors = np.zeros(len(codebooks), np.float64)
    for rows in embeddings.batches("encoding"):
        residual = embeddings.read(rows)
        for level, book in enumerate(codebooks):
            codes[rows, level], squares = nearest(residual, book)
            errors[level] += squares.sum()
            residual -= book[codes[rows, level]]
    return codes, errors / len(embeddings)


def encode_balanced(embeddings: Embeddings, codebooks: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """As `encode`, but no code of a level is given to more items than its capacity: a vector's depend on the others."""
    codes = np.zeros((len(embeddings), len(codebooks)), np.int32)
    for level, book in enumerate(codebooks):
        left = _Residuals(embeddings, codebooks[:level], codes)
        codes[:, level] = balanced(left, book, capacity(len(embeddings), len(book)), f"level {level}")
    errors = np.zeros(len(codebooks), np.float64)
    for rows in embeddings.batches("measuring"):
        residual = embeddings.read(rows)
        for level, book in enumerate(codebooks):
            residual -= book[codes[rows, level]]
            errors[level] += np.square(residual).sum(dtype=np.float64)
    return codes, errors / len(embeddings)


class _Residuals:
    """What some levels left over of each vector, made when asked for."""

    def __init__(self, embeddings: Embeddings, codebooks: Sequence[np.ndarray], codes: np.ndarray) -> None:
        self._embeddings, self._codebooks, self._codes = embeddings, codebooks, codes

    def __len__(self) -> int:
        return len(self._embeddings)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return residuals(self._embeddings.read(rows), self._codebooks, self._codes[rows])


def number_apart(codes: np.ndarray, limit: int, given: np.ndarray | None = None) -> np.ndarray:
    """A number from 0 to `limit` - 1 for each item (int32) that no other with the same codes has.

    `given` holds those that are fixed, and -1 for the others, which get the next ones in order. Raises ConfigError when
    there are not enough.
    """
    given = np.full(len(codes), -1, np.int32) if given is None else given
    index, order = CatalogIndex.build(codes)
    counts = index.num_terminal[index.num_terminal > 0]  # in the order of `order`, as all SIDs are of one length
    starts = np.cumsum(counts) - counts
    known = given[order]
    earlier = np.cumsum(known < 0) - (known < 0)  # items without a number before each
    first = np.maximum.reduceat(known, starts) + 1 - earlier[starts]
    numbers = np.empty(len(codes), np.int32)
    numbers[order] = np.where(known < 0, np.repeat(first, counts) + earlier, known)
    if numbers.max() >= limit:
        sid = codes[numbers.argmax()].tolist()
        raise ConfigError(
            f"{numbers.max() + 1} items have the SID {sid}, but the level that tells them apart has "
            f"{counted(limit, 'code')}; take more codes or levels, or --balanced"
        )
    return numbers
