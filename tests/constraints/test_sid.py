"""SIDs from embeddings: the quantiser against its definition, embeddings against naive counts."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from widebeam.constraints.sid import SidTable, build_sids, cooccurrence_embeddings, sid_token
from widebeam.errors import ConfigError

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def embeddings() -> np.ndarray:
    """300 items in 12 clouds, so that the first level has something to find."""
    rng = np.random.default_rng(7)
    return (rng.normal(size=(12, 16))[rng.integers(0, 12, 300)] + 0.3 * rng.normal(size=(300, 16))).astype(np.float32)


def squared_error(table: SidTable, embeddings: np.ndarray, levels: int | None = None) -> float:
    return float(np.square(embeddings - table.reconstruct(levels)).sum())


def test_codes_and_codebooks_have_the_promised_shapes(embeddings: np.ndarray) -> None:
    table = build_sids(embeddings, levels=3, codes=[12, 8, 16])
    assert table.codes.shape == (300, 3) and table.codes.dtype == np.int32
    assert [book.shape for book in table.codebooks] == [(12, 16), (8, 16), (16, 16)]
    assert all(book.dtype == np.float32 for book in table.codebooks)
    assert (table.codes >= 0).all() and (table.codes < [12, 8, 16]).all()


def test_every_code_is_the_nearest_centroid_of_what_the_levels_before_left(embeddings: np.ndarray) -> None:
    table = build_sids(embeddings, levels=3, codes=8)
    for level, book in enumerate(table.codebooks):
        before = table.reconstruct(level) if level else np.zeros_like(embeddings)
        distance = np.linalg.norm((embeddings - before)[:, None] - book[None], axis=2)
        np.testing.assert_allclose(distance[np.arange(300), table.codes[:, level]], distance.min(axis=1), rtol=1e-4)


def test_reconstruction_error_falls_with_every_level(embeddings: np.ndarray) -> None:
    table = build_sids(embeddings, levels=4, codes=8)
    errors = [squared_error(table, embeddings, levels) for levels in (1, 2, 3, 4)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < np.square(embeddings - embeddings.mean(axis=0)).sum() / 3
    assert errors[3] < errors[0] / 2


def test_one_seed_gives_one_table(embeddings: np.ndarray) -> None:
    first, again, other = (build_sids(embeddings, codes=8, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.codes, again.codes)
    for one, two in zip(first.codebooks, again.codebooks, strict=True):
        np.testing.assert_array_equal(one, two)
    assert (first.codes != other.codes).any()


def test_collisions_are_counted(embeddings: np.ndarray) -> None:
    table = build_sids(embeddings, levels=2, codes=4)
    distinct = len({tuple(sid) for sid in table.codes.tolist()})
    assert table.num_sids == distinct <= 16
    assert table.num_collisions == 300 - distinct


def test_unique_moves_only_last_codes_and_costs_less_than_a_greedy_choice(embeddings: np.ndarray) -> None:
    plain, unique = (build_sids(embeddings, levels=2, codes=[12, 64], unique=flag) for flag in (False, True))
    assert plain.num_collisions > 0 and unique.num_collisions == 0
    np.testing.assert_array_equal(plain.codes[:, 0], unique.codes[:, 0])
    residual = embeddings - plain.reconstruct(1)
    greedy = 0.0
    for first in range(12):
        free = list(range(64))
        for row in np.flatnonzero(plain.codes[:, 0] == first):
            costs = np.square(residual[row] - plain.codebooks[1][free]).sum(axis=1)
            greedy += float(costs.min())
            free.pop(int(costs.argmin()))
    assert squared_error(plain, embeddings) <= squared_error(unique, embeddings) <= greedy * (1 + 1e-6)


def test_unique_refuses_what_cannot_be_made_unique(embeddings: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="share all levels but the last, which has 4 codes"):
        build_sids(embeddings, levels=2, codes=4, unique=True)


def test_a_codebook_is_no_larger_than_the_distinct_vectors() -> None:
    embeddings = np.repeat(np.eye(3, dtype=np.float32), 5, axis=0)
    table = build_sids(embeddings, levels=2, codes=8)
    assert [len(book) for book in table.codebooks] == [3, 1]
    assert table.num_sids == 3
    np.testing.assert_allclose(table.reconstruct(), embeddings, atol=1e-6)


def test_a_token_names_level_and_code() -> None:
    assert [sid_token(level, code) for level, code in enumerate([12, 5, 77])] == ["<a_12>", "<b_5>", "<c_77>"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embeddings": np.zeros(5, np.float32)}, r"must be \[num_items, dim\].*\(5,\)"),
        ({"embeddings": np.zeros((0, 4), np.float32)}, "not empty"),
        ({"embeddings": np.array([[0.0], [np.nan]], np.float32)}, "item 1 are not finite"),
        ({"levels": 0}, "1 .. 26 levels"),
        ({"codes": [4, 4]}, r"got 3, \[4, 4\]"),
        ({"codes": 0}, "codebook size >= 1"),
    ],
)
def test_bad_input_is_named(embeddings: np.ndarray, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_sids(**({"embeddings": embeddings, "levels": 3} | change))  # type: ignore[arg-type]


def naive_ppmi(sequences: list[list[int]], num_items: int, window: int) -> np.ndarray:
    counts = np.zeros((num_items, num_items))
    for sequence in sequences:
        for i, one in enumerate(sequence):
            for j, two in enumerate(sequence):
                if 0 < abs(i - j) <= window and one != two:
                    counts[one, two] += 1 / abs(i - j)
    total = counts.sum()
    ppmi = np.zeros_like(counts)
    for one in range(num_items):
        for two in range(num_items):
            if counts[one, two]:
                ppmi[one, two] = max(0.0, np.log(counts[one, two] * total / counts[one].sum() / counts[two].sum()))
    return ppmi


def test_cooccurrence_embeddings_are_the_svd_of_naively_counted_ppmi() -> None:
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 20, rng.integers(1, 15)).tolist() for _ in range(30)] + [[]]
    found = cooccurrence_embeddings(sequences, num_items=21, dim=6, window=3)
    left, singular, _ = np.linalg.svd(naive_ppmi(sequences, 21, 3))
    expected = left[:, :6] * np.sqrt(singular[:6])
    norms = np.linalg.norm(expected, axis=1, keepdims=True)
    expected = np.divide(expected, norms, out=np.zeros_like(expected), where=norms > 1e-9)
    assert found.dtype == np.float32 and found.shape == (21, 6)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-4)  # up to the signs of the axes
    np.testing.assert_array_equal(found[20], np.zeros(6))  # an item without a neighbour


@pytest.mark.parametrize("arguments", [{"dim": 5}, {"dim": 0}, {"window": 0}, {"sequences": [[0, 5]]}])
def test_cooccurrence_arguments_are_checked(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        cooccurrence_embeddings(**({"sequences": [[0, 1, 2]], "num_items": 5, "dim": 2} | arguments))  # type: ignore[arg-type]


def test_without_scikit_learn_the_message_says_what_to_install(
    embeddings: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ConfigError, match=r"scikit-learn: pip install -e '.\[demo\]'"):
        build_sids(embeddings)
