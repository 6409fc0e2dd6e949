"""k-means and the nearest centroid against plain arithmetic; bounded clusters against Gale and Shapley."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from widebeam.constraints import kmeans
from widebeam.constraints.balance import balanced, capacity, refine
from widebeam.errors import ConfigError

cluster = pytest.importorskip("sklearn.cluster")
BACKENDS: list[kmeans.Backend] = ["faiss", "scikit-learn"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> kmeans.Backend:
    if request.param == "faiss":
        pytest.importorskip("faiss")
    return request.param


@pytest.fixture(scope="module")
def points() -> np.ndarray:
    """400 points in 12 clouds."""
    rng = np.random.default_rng(7)
    return (rng.normal(size=(12, 8))[rng.integers(0, 12, 400)] + 0.3 * rng.normal(size=(400, 8))).astype(np.float32)


def squares(points: np.ndarray, book: np.ndarray) -> np.ndarray:
    """float64 [N, K]."""
    return np.square(points[:, None].astype(np.float64) - book[None].astype(np.float64)).sum(axis=2)


def test_inertia_is_that_of_scikit_learn(points: np.ndarray, backend: kmeans.Backend) -> None:
    book, labels = kmeans.kmeans(points, 12, 3, backend)
    distances = squares(points, book)
    np.testing.assert_array_equal(labels, distances.argmin(axis=1))
    best = cluster.KMeans(12, n_init=20, random_state=0).fit(points).inertia_
    assert distances.min(axis=1).sum() == pytest.approx(best, rel=0.02)


def test_one_seed_gives_one_result(points: np.ndarray, backend: kmeans.Backend) -> None:
    (first, labels), (again, _), (other, _) = (kmeans.kmeans(points, 30, seed, backend) for seed in (3, 3, 4))
    assert first.dtype == np.float32 and labels.dtype == np.int64
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_there_are_no_more_centroids_than_distinct_points(backend: kmeans.Backend) -> None:
    points = np.repeat(np.eye(5, dtype=np.float32), [1, 40, 2, 30, 1], axis=0)
    book, labels = kmeans.kmeans(points, 8, 0, backend)
    assert len(book) == 5
    np.testing.assert_allclose(book[labels], points, atol=1e-6)


def test_a_library_is_chosen_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    assert [kmeans.choose_backend(name) for name in ("auto", "faiss", "scikit-learn")] == [*BACKENDS[:1], *BACKENDS]
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert kmeans.choose_backend("auto") == "scikit-learn"
    with pytest.raises(ConfigError, match=r"faiss: pip install -e '.\[faiss\]'"):
        kmeans.choose_backend("faiss")
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ConfigError, match=r"faiss: .*\[faiss\]'.*, or scikit-learn: .*\[demo\]'"):
        kmeans.choose_backend("auto")


@given(
    seed=st.integers(0, 999), count=st.integers(1, 40), codes=st.integers(1, 20), dim=st.integers(1, 9),
    offset=st.sampled_from([0.0, 1.0, 1000.0]), grid=st.booleans(),
)  # fmt: skip
def test_nearest_is_the_exact_minimum(seed: int, count: int, codes: int, dim: int, offset: float, grid: bool) -> None:
    """Ties, which a grid has many of, go to the lower code; far from the origin the product alone would be wrong."""
    rng = np.random.default_rng(seed)
    draw = (lambda *shape: rng.integers(0, 3, shape)) if grid else (lambda *shape: rng.normal(size=shape))
    points, book = ((draw(n, dim) + offset).astype(np.float32) for n in (count, codes))
    labels, distances = kmeans.nearest(points, book)
    expected = squares(points, book)
    np.testing.assert_array_equal(labels, expected.argmin(axis=1))
    np.testing.assert_allclose(distances, expected.min(axis=1), rtol=1e-12)


def test_a_vector_has_the_same_code_alone_and_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """On points that lie as good as in the middle between two centroids, where rounding decides."""
    rng = np.random.default_rng(0)
    book = rng.normal(size=(64, 24)).astype(np.float32)
    pairs = rng.integers(0, 64, (300, 2))
    points = ((book[pairs[:, 0]] + book[pairs[:, 1]]) / 2 * (1 + 1e-7 * rng.normal(size=(300, 24)))).astype(np.float32)
    together, _ = kmeans.nearest(points, book)
    alone = [int(kmeans.nearest(point[None], book)[0][0]) for point in points]
    assert together.tolist() == alone
    monkeypatch.setattr(kmeans, "BLOCK", 700)
    np.testing.assert_array_equal(kmeans.nearest(points, book)[0], together)


# Clusters of bounded size


def gale_shapley(distances: np.ndarray, places: int) -> list[int]:
    """Points apply one at a time, each to its centroids from the nearest on."""
    preferences = [list(np.argsort(row)) for row in distances]
    held: list[list[int]] = [[] for _ in distances.T]
    free = list(range(len(distances)))
    while free:
        point = free.pop()
        code = preferences[point].pop(0)
        held[code].append(point)
        if len(held[code]) > places:
            worst = max(held[code], key=lambda one: distances[one, code])
            held[code].remove(worst)
            free.append(worst)
    return [next(code for code, points in enumerate(held) if point in points) for point in range(len(distances))]


@given(seed=st.integers(0, 999), count=st.integers(1, 40), codes=st.integers(1, 9), spare=st.integers(0, 2))
def test_balanced_is_the_stable_matching(seed: int, count: int, codes: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(count, 3)).astype(np.float32)
    book = 0.3 * rng.normal(size=(codes, 3)).astype(np.float32)
    places = -(-count // codes) + spare
    labels = balanced(points, book, places)
    assert np.bincount(labels).max() <= places
    assert labels.tolist() == gale_shapley(squares(points, book), places)


def test_many_equal_points_are_spread(points: np.ndarray) -> None:
    crowd = np.concatenate([np.tile(points[:1], (200, 1)), points[:40]])
    labels = balanced(crowd, points[:24], 10)
    assert np.bincount(labels, minlength=24).tolist() == [10] * 24


def test_moving_centroids_pays(points: np.ndarray) -> None:
    """And costs little: bounded clusters are not much worse than free ones."""
    book, labels = kmeans.kmeans(points, 12, 0, "scikit-learn")
    places = capacity(400, 12)
    assert places == 42 and np.bincount(labels).max() > places

    def error(centroids: np.ndarray, codes: np.ndarray) -> float:
        return float(np.square(points - centroids[codes]).sum())

    before = error(book, balanced(points, book, places))
    after = error(*refine(points, book, places))
    assert error(book, labels) < after < before
    assert after < 1.5 * error(book, labels)
