"""What a model has to beat: the most popular items, and item-based nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import metrics
import numpy as np
from data import Log
from scipy import sparse


def user_item_matrix(histories: Sequence[np.ndarray], num_items: int, recent: int | None = None) -> sparse.csr_matrix:
    """Binary [users, items]: which items a user has, or has among the last `recent`."""
    kept = [np.unique(history if recent is None else history[-recent:]) for history in histories]
    rows = np.repeat(np.arange(len(kept)), [len(items) for items in kept])
    columns = np.concatenate(kept)
    return sparse.csr_matrix((np.ones(len(columns)), (rows, columns)), shape=(len(kept), num_items))


def most_popular(histories: Sequence[np.ndarray], num_items: int) -> np.ndarray:
    """How many users have each item; float64 [items]. The same ranking for everybody."""
    return np.asarray(user_item_matrix(histories, num_items).sum(axis=0)).ravel()


@dataclass(frozen=True)
class ItemKnn:
    """Item-based top-N recommendation (Deshpande and Karypis 2004) with binary cosine similarity.

    An item's score is the sum of its similarities to the items of the history, where each item of the history speaks
    for its `neighbours` most similar items only. `recent` restricts the history to its newest items.
    """

    similarity: sparse.csr_matrix
    """[items, items]; row j holds the neighbours of item j."""
    recent: int | None

    @classmethod
    def fit(
        cls, histories: Sequence[np.ndarray], num_items: int, neighbours: int = 20, recent: int | None = None
    ) -> ItemKnn:
        matrix = user_item_matrix(histories, num_items)
        together = (matrix.T @ matrix).toarray()
        norms = np.sqrt(np.maximum(together.diagonal(), 1.0))
        cosine = together / (norms[:, None] * norms[None, :])
        np.fill_diagonal(cosine, 0.0)
        nearest = np.argsort(-cosine, axis=1, kind="stable")[:, :neighbours]
        kept = np.zeros_like(cosine)
        np.put_along_axis(kept, nearest, np.take_along_axis(cosine, nearest, axis=1), axis=1)
        return cls(sparse.csr_matrix(kept), recent)

    def scores(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """float64 [users, items]"""
        return (user_item_matrix(histories, self.similarity.shape[0], self.recent) @ self.similarity).toarray()


def tuned_knn(log: Log, recents: Sequence[int | None]) -> ItemKnn:
    """The ItemKnn with the best NDCG@10 on the validation events, over `recents` and a few neighbourhood sizes."""
    histories, targets = log.validation()

    def quality(knn: ItemKnn) -> float:
        rankings = metrics.rankings_of(knn.scores(histories))
        return metrics.ndcg(metrics.ranks_of(rankings, histories, targets), 10)

    sizes = (10, 20, 50, 100, 200)
    tried = [ItemKnn.fit(log.train(), len(log.movies), size, recent) for recent in recents for size in sizes]
    return max(tried, key=quality)


def evaluate(log: Log) -> dict[str, dict[str, float]]:
    """Recall@10 and NDCG@10 of the baselines on the test events; fitted on the training events alone."""
    histories, targets = log.test()
    popular = np.tile(most_popular(log.train(), len(log.movies)), (len(histories), 1))
    whole = tuned_knn(log, recents=[None])
    recent = tuned_knn(log, recents=[1, 2, 3, 5, 10])
    scores = {
        "most popular": popular,
        "item-kNN, whole history": whole.scores(histories),
        f"item-kNN, last {recent.recent} movies": recent.scores(histories),
    }
    return {
        name: metrics.summary(metrics.ranks_of(metrics.rankings_of(values), histories, targets))
        for name, values in scores.items()
    }
