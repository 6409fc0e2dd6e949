"""Clusters of bounded size: who goes where when each centroid takes no more than so many points.

Points and centroids are matched as applicants and colleges of a quota are (deferred acceptance: Gale and Shapley 1962),
both preferring whom they are nearer to. In each round every point without a place applies to the nearest centroid that
would take it; a centroid keeps the nearest of all who applied, as many as it has places, and sends the rest away. What
a full centroid still takes is one number, the distance of the farthest point that it has (a cutoff: Azevedo and Leshno
2016), so nobody's list of preferences is ever stored. In the end no point and centroid would both rather have each
other: nobody is far away for the sake of somebody who could go elsewhere more cheaply.

Not the least total distance, which is a transport problem: that takes all distances at once and minutes at a million.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from tqdm import tqdm

from widebeam.constraints.kmeans import blocks, square_distances

SLACK = 1.25
"""Times its even share that a centroid takes. An even share exactly costs much more error than it evens out."""
REFINEMENTS = 8
"""Times that centroids move to the means of their points and are matched anew."""


class Points(Protocol):
    """Rows of float32 vectors, in memory or made when asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: np.ndarray) -> np.ndarray: ...


def capacity(num_points: int, num_codes: int) -> int:
    """Most points that a centroid takes."""
    return int(np.ceil(SLACK * num_points / num_codes))


def balanced(points: Points, book: np.ndarray, places: int, progress: str | None = None) -> np.ndarray:
    """Label of each point, int32 [N], no label more than `places` times; places times codes must be N at least.

    `progress` names a bar of the points that have a place.
    """
    labels = np.zeros(len(points), np.int32)
    distances = np.zeros(len(points), np.float32)
    cutoffs = np.full(len(book), np.inf, np.float32)
    waiting = np.arange(len(points))
    with tqdm(total=len(points), desc=progress, unit="item", disable=None if progress else True) as bar:
        while waiting.size:
            for part in blocks(waiting.size, max(book.shape)):
                rows = waiting[part]
                labels[rows], distances[rows] = _apply(points[rows], book, cutoffs)
            refused = _decide(labels, distances, waiting, cutoffs, places)
            bar.update(waiting.size - refused.size)
            waiting = refused
    return labels


def refine(points: np.ndarray, book: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray]:
    """Better centroids for clusters of that size, and the labels: points are matched and centroids moved in turn."""
    for _ in range(REFINEMENTS):
        labels = balanced(points, book, places)
        sums = np.zeros(book.shape, np.float64)
        np.add.at(sums, labels, points)
        counts = np.bincount(labels, minlength=len(book))[:, None]
        book = np.where(counts > 0, sums / np.maximum(counts, 1), book).astype(np.float32)
    return book, balanced(points, book, places)


def _apply(points: np.ndarray, book: np.ndarray, cutoffs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest centroid of each point that would take it, and its squared distance."""
    distances = square_distances(points, book)
    distances[distances >= cutoffs] = np.inf
    labels = distances.argmin(axis=1)
    return labels, distances[np.arange(len(points)), labels]


def _decide(
    labels: np.ndarray, distances: np.ndarray, applied: np.ndarray, cutoffs: np.ndarray, places: int
) -> np.ndarray:
    """Rows that are sent away, ascending; sets the cutoffs of full centroids. Ties go to the lower row."""
    asked = np.zeros(len(cutoffs), bool)
    asked[labels[applied]] = True
    rivals = np.flatnonzero(asked[labels])
    rivals = rivals[np.lexsort((distances[rivals], labels[rivals]))]
    codes, first = np.unique(labels[rivals], return_index=True)
    counts = np.diff(np.append(first, rivals.size))
    full = counts >= places
    cutoffs[codes[full]] = distances[rivals[first[full] + places - 1]]
    rank = np.arange(rivals.size) - np.repeat(first, counts)
    return np.sort(rivals[rank >= places])
