"""Recall and NDCG of the next item, computed in one way for every method.

A method gives each user a ranked list. Movies that the user has already watched are removed from it (nobody rates a
movie twice here, so they cannot be right), and the position of the one held-out movie among the rest is its rank.
The whole catalog competes: no negative sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

MISSING = np.iinfo(np.int64).max
"""Rank of a target that is not in the list."""


def target_rank(ranked: Iterable[int], seen: Iterable[int], target: int) -> int:
    """0-based position of `target` in `ranked` once the items of `seen` are removed; MISSING if it is not there."""
    watched = set(seen)
    fresh = (item for item in ranked if item not in watched)
    return next((rank for rank, item in enumerate(fresh) if item == target), MISSING)


def ranks_of(rankings: Sequence[Iterable[int]], histories: Sequence[np.ndarray], targets: Sequence[int]) -> np.ndarray:
    """`target_rank` of every user; int64 [users]."""
    users = zip(rankings, histories, targets, strict=True)
    return np.array([target_rank(ranked, history.tolist(), target) for ranked, history, target in users])


def rankings_of(scores: np.ndarray) -> list[list[int]]:
    """All items of each row of `scores` [users, items], best first; equal scores by item number."""
    return np.argsort(-scores, axis=1, kind="stable").tolist()


def recall(ranks: np.ndarray, k: int) -> float:
    """Share of users whose target is among the first `k`."""
    return float((ranks < k).mean())


def ndcg(ranks: np.ndarray, k: int) -> float:
    """Mean of 1 / log2(rank + 2) over users, 0 where the target is not among the first `k` (one relevant item)."""
    gains = np.where(ranks < k, 1.0 / np.log2(np.minimum(ranks, k) + 2.0), 0.0)
    return float(gains.mean())


def summary(ranks: np.ndarray, k: int = 10) -> dict[str, float]:
    return {f"recall@{k}": round(recall(ranks, k), 4), f"ndcg@{k}": round(ndcg(ranks, k), 4)}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Methods against metrics, as text with aligned columns."""
    columns = list(next(iter(rows.values())))
    width = max(map(len, rows))
    lines = [" " * width + "".join(f"{column:>12}" for column in columns)]
    for name, values in rows.items():
        lines.append(f"{name:<{width}}" + "".join(f"{values[column]:>12.4f}" for column in columns))
    return "\n".join(lines)
