"""Semantic IDs from item embeddings: a residual vector quantiser, and embeddings from interaction logs to feed it.

A catalog is usually delivered with its SIDs. This module builds them where they do not exist yet, for what fits into
memory (`build.py` does it for files of any size); serving never uses it. It needs scikit-learn and SciPy
(the extra `demo`), imported only when a function here is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from widebeam.constraints.balance import capacity, refine
from widebeam.constraints.kmeans import Backend, kmeans, need
from widebeam.errors import ConfigError
from widebeam.faults import counted

LEVEL_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class SidTable:
    """The SID of every item and the codebooks that it was quantised with."""

    codes: np.ndarray
    """int32 [num_items, levels]; row i is the SID of item i."""
    codebooks: tuple[np.ndarray, ...]
    """One float32 [codes, dim] per level. The sum of an item's code vectors approximates its embedding."""

    @property
    def num_sids(self) -> int:
        """Distinct SIDs; `num_items - num_sids` items share the SID of another."""
        return len(np.unique(self.codes, axis=0))

    @property
    def num_collisions(self) -> int:
        """Items beyond the first of their SID."""
        return len(self.codes) - self.num_sids

    def reconstruct(self, levels: int | None = None) -> np.ndarray:
        """Sum of the code vectors of the first `levels` levels (default: all); float32 [num_items, dim]."""
        used = self.codebooks[:levels]
        return sum((book[self.codes[:, level]] for level, book in enumerate(used)), np.zeros_like(used[0][:1]))


def token_form(level: int) -> str:
    """How tokens of a level are usually spelt, with `{code}` in place of the number: `<a_{code}>` at the first."""
    return f"<{LEVEL_LETTERS[level]}_{{code}}>"


def sid_token(level: int, code: int) -> str:
    """The usual spelling of a code as a token: `<a_12>` is code 12 of the first level."""
    return token_form(level).replace("{code}", str(code))


def sid_tokens(codebook_sizes: Sequence[int]) -> list[str]:
    """All SID tokens, level by level, as they are added to a tokenizer."""
    return [sid_token(level, code) for level, size in enumerate(codebook_sizes) for code in range(size)]


def build_sids(
    embeddings: np.ndarray, levels: int = 3, codes: int | Sequence[int] = 256, seed: int = 0, unique: bool = False
) -> SidTable:
    """Quantise `embeddings` (float32 [num_items, dim]) into SIDs of `levels` codes by residual k-means.

    Each level clusters what the levels before left over: k-means on the embeddings, then on embeddings minus their
    centroid, and so on. That is multistage (residual) vector quantisation (Juang and Gray 1982), the scheme of
    generative retrieval with semantic IDs (TIGER, arXiv 2305.05065), with k-means codebooks in place of a learnt
    RQ-VAE. `codes` is the codebook size, one for all levels or one per level; it is clipped to the distinct residuals.

    Several items may end up with the same SID; `SidTable.num_collisions` says how many. With `unique`, items that
    share all levels but the last are spread over distinct codes of the last level, with the least total squared error
    (a linear assignment); that needs no more such items than codes.

    The same input and seed give the same table. Raises ConfigError for a shape, size or value that cannot be used.
    """
    vectors = np.ascontiguousarray(embeddings, dtype=np.float32)
    sizes = [codes] * levels if isinstance(codes, int) else list(codes)
    _check(vectors, sizes, levels)
    codebooks, labels = train_codebooks(vectors, sizes, seed, "scikit-learn")
    if unique:
        labels[:, -1] = _spread(residuals(vectors, codebooks[:-1], labels), codebooks[-1], labels)
    return SidTable(labels.astype(np.int32), tuple(codebooks))


def train_codebooks(
    vectors: np.ndarray, sizes: Sequence[int], seed: int, backend: Backend, *, balance: bool = False
) -> tuple[list[np.ndarray], np.ndarray]:
    """A codebook for each level, by k-means on what the levels before left over; and the codes, int64 [N, levels].

    With `balance` no code of a level gets more than its share of the vectors (see `balance.py`).
    """
    residual = vectors.copy()
    codebooks: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    for level, size in enumerate(sizes):
        book, labels = kmeans(residual, size, seed + level, backend)
        if balance:
            book, labels = refine(residual, book, capacity(len(residual), len(book)))
        residual -= book[labels]
        codebooks.append(book)
        columns.append(labels)
    return codebooks, np.stack(columns, axis=1, dtype=np.int64)


def residuals(vectors: np.ndarray, codebooks: Sequence[np.ndarray], codes: np.ndarray) -> np.ndarray:
    """What those levels leave over of float32 vectors, given all their codes."""
    left = vectors.copy()
    for level, book in enumerate(codebooks):
        left -= book[codes[:, level]]
    return left


def cooccurrence_embeddings(
    sequences: Iterable[Sequence[int]], num_items: int, dim: int = 64, window: int = 5, seed: int = 0
) -> np.ndarray:
    """Item embeddings from interaction sequences; float32 [num_items, dim], rows of length 1.

    Counts how often two items lie at most `window` steps apart (nearer pairs count more: 1 / distance), takes the
    positive pointwise mutual information of the counts, and factorises it by a truncated SVD, each item being its
    left singular vector scaled by the square roots of the singular values (Levy and Goldberg 2014). Items without a
    neighbour get a zero row. `sequences` hold item numbers 0 .. num_items - 1, oldest first.
    """
    sparse = need("scipy.sparse")
    extmath = need("sklearn.utils.extmath")
    if not 1 <= dim < num_items or window < 1:
        raise ConfigError(f"need 1 <= dim < num_items and window >= 1, got {dim=}, {num_items=}, {window=}")
    parts = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    items = np.concatenate([*parts, np.empty(0, np.int64)])
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    if items.size and not 0 <= items.min() <= items.max() < num_items:
        raise ConfigError(f"sequences hold item numbers outside 0 .. {num_items - 1}")
    counts = sparse.csr_matrix((num_items, num_items), dtype=np.float64)
    for step in range(1, window + 1):
        left, right = items[:-step], items[step:]
        same = (owner[:-step] == owner[step:]) & (left != right)
        weight = np.full(int(same.sum()), 1.0 / step)
        counts = counts + sparse.csr_matrix((weight, (left[same], right[same])), shape=counts.shape)
    ppmi = _positive_pmi((counts + counts.T).tocoo(), sparse)
    left_vectors, singular, _ = extmath.randomized_svd(ppmi, n_components=dim, n_iter=7, random_state=seed)
    embeddings = left_vectors * np.sqrt(singular)
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return (embeddings / np.where(norms > 1e-9, norms, 1.0)).astype(np.float32)


def _positive_pmi(counts: Any, sparse: Any) -> Any:
    """max(0, log(p(x, y) / (p(x) p(y)))) of a symmetric COO count matrix, as CSR."""
    totals = np.asarray(counts.sum(axis=1)).ravel()
    ratio = counts.data * totals.sum() / (totals[counts.row] * totals[counts.col])
    return sparse.csr_matrix((np.maximum(np.log(ratio), 0.0), (counts.row, counts.col)), shape=counts.shape)


def _spread(points: np.ndarray, book: np.ndarray, sids: np.ndarray) -> np.ndarray:
    """Last-level labels [num_points] with which no two rows of `sids` (int64 [num_points, levels]) are equal."""
    optimize = need("scipy.optimize")
    labels = sids[:, -1].copy()
    _, group, group_size = np.unique(sids[:, :-1], axis=0, return_inverse=True, return_counts=True)
    if group_size.max() > len(book):
        raise ConfigError(
            f"unique: {group_size.max()} items share all levels but the last, which has {counted(len(book), 'code')}; "
            "take larger codebooks or more levels"
        )
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(group_size)[:-1])
    for rows in members:
        if len(np.unique(labels[rows])) < len(rows):
            cost = np.square(points[rows, None] - book[None]).sum(axis=2)
            labels[rows] = optimize.linear_sum_assignment(cost)[1]
    return labels


def _check(vectors: np.ndarray, sizes: list[int], levels: int) -> None:
    if vectors.ndim != 2 or not vectors.size:
        raise ConfigError(f"embeddings must be [num_items, dim] and not empty, got shape {vectors.shape}")
    if not np.isfinite(vectors).all():
        raise ConfigError(f"embeddings of item {int(np.argwhere(~np.isfinite(vectors))[0, 0])} are not finite")
    if not 1 <= levels <= len(LEVEL_LETTERS) or len(sizes) != levels or min(sizes) < 1:
        raise ConfigError(
            f"need 1 .. {len(LEVEL_LETTERS)} levels with a codebook size >= 1 each, got {levels}, {sizes}"
        )
