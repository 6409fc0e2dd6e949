"""k-means by faiss or scikit-learn, and the nearest centroid of a vector. Both libraries are imported when called.

Letters: N points, K centroids, D dimensions.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from widebeam.errors import ConfigError, how_to_install

Backend = Literal["faiss", "scikit-learn"]
MANY_POINTS = 200_000
"""Points from which scikit-learn runs on mini-batches: full passes over more gain little and take minutes."""
ITERATIONS = 25
"""Passes of faiss over the points at each start, as its authors take."""
STARTS, CHEAP = 10, 1 << 28
"""Starts, where points times centroids times dimensions are no more than this; otherwise one."""
START_POINTS = 8
"""For each centroid, points among which it is enough to look for a start."""
BLOCK = 1 << 22
"""Elements of a block of points times centroids, or times dimensions: 16 MB of float32."""


FAISS, SCIKIT_LEARN = f"faiss: {how_to_install('faiss')}", f"scikit-learn: {how_to_install('demo')}"
EITHER = f"{FAISS}, or {SCIKIT_LEARN}"


def need(module: str, install: str = SCIKIT_LEARN) -> Any:
    """Import an optional dependency, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"building SIDs needs {install} ({error})") from None


def choose_backend(name: Literal["auto"] | Backend) -> Backend:
    """`auto` is faiss where it is installed, else scikit-learn. Raises ConfigError for one that is not installed."""
    if name == "faiss" or (name == "auto" and importlib.util.find_spec("faiss") is not None):
        need("faiss", FAISS)
        return "faiss"
    need("sklearn.cluster", EITHER if name == "auto" else SCIKIT_LEARN)
    return "scikit-learn"


def kmeans(points: np.ndarray, size: int, seed: int, backend: Backend) -> tuple[np.ndarray, np.ndarray]:
    """Centroids float32 [K, D] and labels int64 [N] of `points` (float32 [N, D]), K = min(size, distinct points)."""
    distinct = _distinct(points, size)
    size = min(size, len(distinct))
    if backend == "faiss":
        book = distinct if len(distinct) == size else _faiss(points, size, seed)
        return book, nearest(points, book)[0].astype(np.int64)
    cluster = need("sklearn.cluster")
    if len(points) < MANY_POINTS:
        model = cluster.KMeans(size, n_init=4, random_state=seed)
    else:
        model = cluster.MiniBatchKMeans(size, n_init=3, batch_size=8192, random_state=seed)
    labels = model.fit_predict(points)
    return model.cluster_centers_.astype(np.float32), labels.astype(np.int64)


def _faiss(points: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Centroids: the best of some starts."""
    faiss = need("faiss", FAISS)
    rng = np.random.default_rng(seed)
    best, least = np.empty(0), np.inf
    for _ in range(STARTS if points.size * size <= CHEAP else 1):
        model = faiss.Kmeans(
            points.shape[1], size, niter=ITERATIONS, seed=seed,
            min_points_per_centroid=1, max_points_per_centroid=len(points),
        )  # fmt: skip
        error = model.train(points, init_centroids=_start(points, size, rng))
        if not best.size or error < least:
            best, least = np.array(model.centroids), error
    return best


def _start(points: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Points to begin with, by k-means++ (Arthur and Vassilvitskii 2007), greedy: the best of some draws at each step.

    A point is drawn with the probability of its squared distance to those before. faiss has a k-means++ of one draw a
    step, which misses clusters that this finds.
    """
    some = max(START_POINTS * size, CHEAP // (size * points.shape[1]))
    if some < len(points):
        points = points[rng.choice(len(points), some, replace=False)]
    draws = 2 + int(np.log(size))
    norms = np.square(points).sum(axis=1)
    chosen = [int(rng.integers(len(points)))]
    least = square_distances(points, points[chosen], norms)[:, 0]
    while len(chosen) < size:
        mass = np.cumsum(least, dtype=np.float64)
        drawn = np.searchsorted(mass, rng.random(draws) * mass[-1]).clip(max=len(points) - 1)
        distances = np.minimum(square_distances(points, points[drawn], norms), least[:, None])
        best = int(distances.sum(axis=0).argmin())
        chosen.append(int(drawn[best]))
        least = distances[:, best]
    return points[chosen]


def _distinct(points: np.ndarray, limit: int) -> np.ndarray:
    """The distinct points, or more than `limit` of them: a growing part is looked at until it has as many."""
    part = 2 * limit
    while True:
        found = np.unique(points[:part], axis=0)
        if len(found) > limit or part >= len(points):
            return found
        part *= 4


def square_distances(points: np.ndarray, book: np.ndarray, norms: np.ndarray | None = None) -> np.ndarray:
    """float32 [N, K] by a matrix product: as exact as float32 permits, and never below 0; `norms` are |points|^2."""
    distances = points @ (-2 * book.T)
    distances += (np.square(points).sum(axis=1) if norms is None else norms)[:, None]
    distances += np.square(book).sum(axis=1)
    return np.maximum(distances, 0, out=distances)


def nearest(points: np.ndarray, book: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest centroid of each point, int32 [N], and its squared distance, float64 [N]; ties go to the lower code.

    It does not depend on the other points: a matrix product rounds differently in other company, so those centroids
    that its rounding cannot tell apart are compared once more, one by one in float64.
    """
    labels = np.empty(len(points), np.int32)
    distances = np.empty(len(points), np.float64)
    centre = book.mean(axis=0)
    around = book - centre  # small numbers round less
    reach = np.sqrt(np.square(around).sum(axis=1).max())
    error = (points.shape[1] + 4) * np.finfo(np.float32).eps
    for rows in blocks(len(points), max(book.shape)):
        block = points[rows]
        approximate = square_distances(block - centre, around)
        # twice the bound on the rounding of |x|^2 - 2xc + |c|^2, which has D + 3 roundings of half an eps each
        slack = error * np.square(np.sqrt(np.square(block - centre).sum(axis=1)) + reach)
        row, code = np.nonzero(approximate <= (approximate.min(axis=1) + slack)[:, None])
        exact = _exact(block, book, row, code)
        start = np.searchsorted(row, np.arange(len(block)))
        least = np.minimum.reduceat(exact, start)
        best = np.flatnonzero(exact == least[row])
        first = best[np.searchsorted(row[best], np.arange(len(block)))]
        labels[rows], distances[rows] = code[first], least
    return labels, distances


def _exact(points: np.ndarray, book: np.ndarray, row: np.ndarray, code: np.ndarray) -> np.ndarray:
    """float64 squared distance of each pair of a point and a centroid."""
    exact = np.empty(row.size, np.float64)
    for pairs in blocks(row.size, book.shape[1]):
        difference = points[row[pairs]].astype(np.float64) - book[code[pairs]]
        exact[pairs] = np.square(difference).sum(axis=1)
    return exact


def blocks(count: int, width: int) -> Iterator[slice]:
    """Slices of 0 .. count - 1 of as many rows of `width` elements as a block has room for."""
    step = max(1, BLOCK // width)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
