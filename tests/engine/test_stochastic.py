"""Sampled beams: the sample is the one that its noise determines, and its distribution is the model's."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.engine.table_search import Table, run
from tests.engine.test_selection import VOCAB, assert_identical, catalogs, float32_logprobs, make_catalog, make_search
from tests.oracle import Prefix, goes_on, legal
from widebeam.constraints.filters import ItemMask
from widebeam.engine import vocabulary
from widebeam.engine.noise import gumbel, mix
from widebeam.engine.wave import narrowed
from widebeam.policies import LevelPlan

COLUMN = 5
WORD = (1 << 64) - 1
NONE: frozenset[int] = frozenset()


@pytest.fixture(autouse=True)
def narrow_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "COLUMN", COLUMN)


# The noise and the sample, written plainly


def splitmix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def below(key: int, number: int) -> int:
    return splitmix((key + (number + 1) * 0x9E3779B97F4A7C15) & WORD)


def noise(key: int) -> float:
    return -math.log(-math.log(((key >> 11) + 0.5) * 2.0**-53))


def children(
    table: Table, prefix: Prefix, share: float, perturbed: float, key: int, tokens: list[int], columns: bool
) -> list[tuple[int, float, float, int]]:
    """(token, log-probability among what is legal, the same with noise, key) of a node's children, in float64."""

    def conditioned(shares: list[float], keys: list[int], parent: float) -> list[float]:
        noised = [share + noise(key) for share, key in zip(shares, keys, strict=True)]
        most = max(noised)
        return [-math.log(math.exp(-parent) - math.exp(-most) + math.exp(-one)) for one in noised]

    logits = table.row(prefix).double()
    shares = {t: share + float(logits[t] - logits[tokens].logsumexp(0)) for t in tokens}
    groups = [(perturbed, tokens)]
    if columns:  # a level of the tree between a row and its tokens
        cut = {n: [t for t in tokens if t // COLUMN == n] for n in sorted({t // COLUMN for t in tokens})}
        together = [float(logits[some].logsumexp(0) - logits[tokens].logsumexp(0)) + share for some in cut.values()]
        above = conditioned(together, [below(key, VOCAB + n) for n in cut], perturbed)
        groups = list(zip(above, cut.values(), strict=True))
    found = []
    for parent, some in groups:
        keys = [below(key, t) for t in some]
        values = conditioned([shares[t] for t in some], keys, parent)
        found += [(t, shares[t], value, own) for t, value, own in zip(some, values, keys, strict=True)]
    return found


def whole_tree(
    table: Table, levels: int, seed: int, items: set[Prefix] | None, stops: frozenset[int], never: frozenset[int] = NONE
) -> list[tuple[float, float, Prefix]]:
    """(perturbed, log-probability among what is legal) of every sequence that there is, the largest first."""
    ended = []
    live: list[tuple[Prefix, float, float, int]] = [((), 0.0, 0.0, splitmix(seed & WORD))]
    for level in range(levels):
        following = []
        for prefix, share, perturbed, key in live:
            tokens = legal(prefix, [token for token in range(VOCAB) if token not in never], items)
            for token, own, value, below_it in children(table, prefix, share, perturbed, key, tokens, items is None):
                sequence = (*prefix, token)
                if level == levels - 1 or (sequence in items if items is not None else token in stops):
                    ended.append((value, own, sequence))
                elif goes_on(sequence, items, stops):
                    following.append((sequence, own, value, below_it))
        live = following
    return sorted(ended, reverse=True)


uniform_catalogs = st.sets(st.tuples(*[st.integers(0, VOCAB - 1)] * 3), min_size=1, max_size=40)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["plain", "stops", "suppressed", "catalog", "filter"]),
    items=uniform_catalogs,
    seeds=st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
    width=st.integers(1, 9),
    table_seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_the_sample_is_the_best_of_the_whole_tree_by_its_noise(
    kind: str, items: set[Prefix], seeds: list[int | None], width: int, table_seed: int, data: st.DataObject
) -> None:
    """Beside searches that want none, which find what they find alone, to the last bit."""
    constrained = kind in ("catalog", "filter")
    catalog, stops = make_catalog(items) if constrained else None, (1,) if kind == "stops" else ()
    levels, n = 3, data.draw(st.integers(1, width))
    tables = [Table(VOCAB, table_seed + b, step=0.37) for b in range(len(seeds))]
    searches, allowed = [], [items] * len(seeds)
    for b, seed in enumerate(seeds):
        plan = None if seed is None else LevelPlan((), noise=True, seed=seed)
        normalizer = "level" if constrained else "vocab"
        search = make_search((width,) * levels, n, catalog=catalog, stop_token_ids=stops, normalizer=normalizer)
        never = (0, 3, 10, 11) if kind == "suppressed" else ()
        searches.append(replace(search, plan=plan, length_penalty=0.0, special_token_ids=never))
        if kind == "filter":
            assert catalog is not None
            rows = data.draw(st.sets(st.integers(0, len(items) - 1), min_size=1))
            searches[b] = narrowed(searches[b], ItemMask.of_rows(np.array(sorted(rows)), len(items)))
            allowed[b] = {tuple(catalog.token_ids(row)) for row in rows}
    results = run(tables, searches, catalog)
    for table, search, seed, mine, found in zip(tables, searches, seeds, allowed, results, strict=True):
        scores = [one.score for one in found]
        assert scores == sorted(scores, reverse=True)
        assert_identical(found, run([table], [search], catalog)[0])
        if seed is None:
            continue
        every = whole_tree(table, levels, seed, mine if constrained else None, frozenset(stops), frozenset(never))
        if len(every) > n and every[n - 1][0] - every[n][0] < 1e-4:
            continue
        assert {one.tokens for one in found} == {tokens for *_, tokens in every[:n]}
        if not constrained:
            logprobs = float32_logprobs(table)
            for one in found:
                expected = sum(float(logprobs(one.tokens[:k])[token]) for k, token in enumerate(one.tokens))
                assert one.cum == pytest.approx(expected, abs=1e-5)


@settings(max_examples=60)
@given(items=catalogs, seed=st.integers(0, 10**6), width=st.integers(1, 9))
def test_items_that_end_at_different_levels_compete_by_noise(items: set[Prefix], seed: int, width: int) -> None:
    """Only where no SID is the beginning of another: an item that also goes on is a leaf and a node at once."""
    items = {item for item in items if not any(other != item and other[: len(item)] == item for other in items)}
    catalog, table = make_catalog(items), Table(VOCAB, seed, step=0.37)
    plan = LevelPlan((), noise=True, seed=seed)
    search = replace(make_search((width,) * catalog.depth, width, catalog=catalog), plan=plan)
    every = whole_tree(table, catalog.depth, seed, items, frozenset())
    if len(every) <= width or every[width - 1][0] - every[width][0] >= 1e-4:
        found = run([table], [search], catalog)[0]
        assert {one.tokens for one in found} == {tokens for *_, tokens in every[:width]}


def test_noise_is_gumbel_and_depends_on_seed_path_and_token() -> None:
    keys = [below(below(splitmix(seed & WORD), first), token) for seed in (7, 8, -1) for first in range(2)
            for token in range(3000)]  # fmt: skip
    made = gumbel(torch.tensor([key - (key >> 63 << 64) for key in keys])).view(6, 3000)
    assert made.flatten()[:50].tolist() == pytest.approx([noise(key) for key in keys[:50]], rel=1e-12)
    for one in made:
        assert stats.kstest(one.numpy(), stats.gumbel_r.cdf).pvalue > 0.01
    assert float((torch.corrcoef(made) - torch.eye(6)).abs().max()) < 0.05
    assert int(mix(torch.tensor(12345))) & WORD == splitmix(12345)


# The distribution

ITEMS = {(0, 3), (0, 4), (0, 5), (1, 3), (1, 6), (2, 7)}
DRAWS = 1600


def drawn(n: int, width: int) -> tuple[dict[Prefix, float], list[set[Prefix]]]:
    """Probability of each item, and the samples of many seeds."""
    catalog, table = make_catalog(ITEMS), Table(VOCAB, 5)
    shares = {tokens: math.exp(share) for _, share, tokens in whole_tree(table, 2, 0, ITEMS, frozenset())}
    samples = []
    for start in range(0, DRAWS, 16):
        search = make_search((width, width), n, catalog=catalog, normalizer="level")
        seeds = range(start, start + 16)
        searches = [replace(search, plan=LevelPlan((), noise=True, seed=seed)) for seed in seeds]
        samples += [{one.tokens for one in found} for found in run([table] * 16, searches, catalog)]
    assert sum(shares.values()) == pytest.approx(1)
    return shares, samples


@pytest.mark.parametrize("width", [1, 4])
def test_one_drawn_item_follows_the_models_distribution(width: int) -> None:
    """Whatever the width: by a chi-square test over fixed seeds."""
    shares, samples = drawn(1, width)
    counts = [sum(sample == {item} for sample in samples) for item in shares]
    assert sum(counts) == DRAWS
    assert stats.chisquare(counts, [share * DRAWS for share in shares.values()]).pvalue > 0.01


def test_three_are_drawn_without_replacement() -> None:
    """Every set of three as often as drawing one after another among those left gives it."""
    shares, samples = drawn(3, 3)
    sets = {frozenset(some): 0.0 for some in itertools.combinations(shares, 3)}
    for first, second, third in itertools.permutations(shares, 3):
        a, b, c = shares[first], shares[second], shares[third]
        sets[frozenset((first, second, third))] += a * b / (1 - a) * c / (1 - a - b)
    common = [some for some, share in sets.items() if share * DRAWS >= 5]
    counts = [sum(sample == some for sample in samples) for some in common]
    rare = 1 - sum(sets[some] for some in common)
    observed, expected = [*counts, DRAWS - sum(counts)], [*(sets[some] * DRAWS for some in common), rare * DRAWS]
    assert all(len(sample) == 3 for sample in samples)
    assert stats.chisquare(observed, expected).pvalue > 0.01
