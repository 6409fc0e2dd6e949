"""The waves of a warm-up meet every graph that later waves need.

Some waves still need graphs that warm-up did not meet, which costs time once and is counted. None of those that are
drawn here is of these kinds:

- more than 8192 prompt tokens;
- without a catalog, one token or more than eight; stop tokens in some requests only, if numbers of tokens differ or
  those with stop tokens are greedy text;
- over a catalog, the normalisers `legal` and `vocab` (met with --warmup full); more sequences to return than it has;
- more than 16 requests; a beam pool with fewer slots than rows times levels.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.engine.warm_waves import (
    draw_wave,
    graph_keys,
    keys_of_all,
    make_search,
    random_integers,
)
from widebeam.constraints.index import CatalogIndex
from widebeam.engine import warmup
from widebeam.engine.scheduler import Load, WaveLimits
from widebeam.engine.wave import Search, Wave
from widebeam.policies import LevelPlan

ROWS = warmup.row_rungs(8192)
seeds = st.integers(0, 10**6)


@dataclass
class Setting:
    """What decides the waves of a warm-up."""

    limits: WaveLimits
    widest: int
    vocab_size: int
    longest: int

    def waves(self, catalog: Any = None) -> Iterator[list[Search]]:
        yield from warmup.waves(self.limits, self.widest, self.vocab_size, self.longest)
        if catalog is not None:
            yield from warmup.catalog_waves(self.limits, self.widest, self.vocab_size, catalog, ("level",))


@st.composite
def any_settings(draw: st.DrawFn) -> Setting:
    """Whatever a user may set, but for pools that hold not even one small request."""
    page_size, tokens, rows = draw(st.integers(1, 256)), draw(st.integers(1, 30_000)), draw(st.integers(1, 8192))
    longest = draw(st.integers(64, 40_960))
    limits = WaveLimits(
        requests=draw(st.integers(1, 256)),
        tokens=tokens,
        rows=rows,
        context_pages=-(-max(tokens, longest) // page_size) + draw(st.integers(0, 100)),
        beam_slots=draw(st.integers(2 * min(rows, 16), 6 * rows)),
        mask_places=1000,
        page_size=page_size,
    )
    return Setting(limits, draw(st.integers(1, rows)), draw(st.integers(2, 200_000)), longest)


@st.composite
def covered_settings(draw: st.DrawFn, most_rows: int = 8192, least_slots: int = 2) -> Setting:
    """Those of which warm-up meets all rungs, see above. `least_slots`: beam slots for each row."""
    rows, requests = draw(st.sampled_from(ROWS[: ROWS.index(most_rows) + 1])), draw(st.integers(1, 16))
    narrowest = max(16, -(-rows // requests))
    tokens = draw(st.sampled_from([128, 384, 512, 2048, 5120, 8192, 20_480, 30_720]))
    page_size = draw(st.sampled_from([16, 64, 256]))
    limits = WaveLimits(
        requests=requests,
        tokens=tokens,
        rows=rows,
        context_pages=-(-tokens // page_size) + requests + draw(st.integers(0, 500)),
        beam_slots=rows * draw(st.integers(least_slots, 6)),
        mask_places=1000,
        page_size=page_size,
    )
    return Setting(
        limits,
        widest=draw(st.integers(narrowest, max(narrowest, rows))),
        vocab_size=draw(st.integers(narrowest, 2 * rows) | st.just(151_936)),
        longest=tokens + warmup.LEVELS + draw(st.integers(0, 9999)),
    )


def make_catalog(sizes: list[int], items: int, seed: int) -> Any:
    """Random SIDs of so many codes a level; all codes of the first level are in use."""
    rng = np.random.default_rng(seed)
    codes = np.stack([rng.integers(0, size, items + sizes[0]) for size in sizes], axis=1).astype(np.int32)
    codes[: sizes[0], 0] = np.arange(sizes[0])
    index, _ = CatalogIndex.build(codes)
    tokens = [np.arange(size) for size in sizes]
    return SimpleNamespace(index=index, depth=len(sizes), level_token_ids=tokens, num_items=index.num_items)


def catalogs(deepest: int) -> st.SearchStrategy[Any]:
    return st.builds(
        make_catalog, st.lists(st.integers(1, 300), min_size=1, max_size=deepest), st.integers(1, 3000), seeds
    )


@settings(max_examples=300)
@given(any_settings(), catalogs(9))
def test_every_wave_is_one_that_the_scheduler_may_form(setting: Setting, catalog: Any) -> None:
    limits = replace(setting.limits, tokens=max(setting.limits.tokens, setting.longest))  # a long prompt runs alone
    for searches in setting.waves(catalog):
        load = Load()
        for search in searches[: limits.requests]:
            assert 0 < search.num_tokens <= setting.longest - search.levels
            load = load.plus(search, limits)
        assert load.fits(limits), load


def assert_met(setting: Setting, seed: int, *, widest: int | None = None, catalog: Any = None, **kind: Any) -> None:
    """Random waves need no graphs but those of the warm-up."""
    limits, vocab_size = setting.limits, setting.vocab_size
    met = keys_of_all(setting.waves(catalog), limits)
    uncut = min(setting.widest, vocab_size) < min(384, limits.rows)
    longest_prompt = min(limits.tokens, warmup.SPLIT_CONTEXT - 1) if uncut else limits.tokens
    integer = random_integers(seed)
    for _ in range(40):
        searches = draw_wave(
            integer, limits, widest or setting.widest, vocab_size, longest_prompt, catalog=catalog, **kind
        )
        missed = graph_keys(searches, limits) - met if searches else ()
        assert not missed, [(search.num_tokens, search.widths, search.num_returned) for search in searches]


@settings(max_examples=200)
@given(covered_settings(), st.booleans(), seeds)
def test_any_token(setting: Setting, stops: bool, seed: int) -> None:
    assert_met(setting, seed, stops=stops)


@settings(max_examples=200)
@given(covered_settings(most_rows=512, least_slots=4), catalogs(5), seeds)
def test_catalogs_that_can_fill_the_widest_beam(setting: Setting, catalog: Any, seed: int) -> None:
    widest = min(setting.widest, setting.vocab_size)
    assume(make_search([1], widest, catalog=catalog).rows == widest)
    assert_met(setting, seed, catalog=catalog)


@settings(max_examples=200)
@given(covered_settings(most_rows=512, least_slots=4), catalogs(5), seeds)
def test_any_catalog_with_one_request_at_a_time(setting: Setting, catalog: Any, seed: int) -> None:
    widest = max(size for size in ROWS if size <= min(setting.widest, setting.vocab_size))
    assert_met(setting, seed, widest=widest, catalog=catalog, most=1)


def test_what_policies_need_is_met_if_that_is_wanted() -> None:
    limits = WaveLimits(
        requests=16, tokens=20_480, rows=1024, context_pages=9999, beam_slots=8192, mask_places=0, page_size=64
    )
    forms = [
        {Wave(searches, limits.rows).form for searches in warmup.waves(limits, 256, 151_936, 5000, policies)}
        for policies in (False, True)
    ]
    asked = [{"margin": 1.0}, {"mass": 0.5}, {"cap": 3}, {"noise": True}]
    searches = [replace(make_search(np.zeros(5), 9), plan=LevelPlan((9,) * 3, **fields)) for fields in asked]  # type: ignore[arg-type]
    needed = {Wave([search], limits.rows).form for search in searches}
    assert len(needed) == 3 and not needed & forms[0] and needed <= forms[1]


def test_later_versions_warm_up_what_is_new_about_them() -> None:
    """Of 30,000 items under 256 codes a level, 1,000 change; then another catalog has as many children elsewhere."""
    limits = WaveLimits(
        requests=16, tokens=20_480, rows=2048, context_pages=9999, beam_slots=8192, mask_places=9999, page_size=64
    )

    def unmet(codes: np.ndarray) -> list[list[Search]]:
        index, _ = CatalogIndex.build(codes)
        books = [np.arange(codes[:, level].max() + 1) for level in range(codes.shape[1])]
        catalog: Any = SimpleNamespace(
            index=index, depth=codes.shape[1], level_token_ids=books, num_items=index.num_items
        )
        waves = list(warmup.catalog_waves(limits, 512, 151_936, catalog, ("level",)))
        found = list(warmup.unmet(waves, met, limits))
        assert keys_of_all(waves, limits) >= keys_of_all(found, limits)
        assert {key for key in keys_of_all(waves, limits) if key[0] != "prompts"} <= met  # type: ignore[index]
        return found

    rng, met = np.random.default_rng(0), set[Hashable]()
    codes = rng.integers(0, 256, (30_000, 3)).astype(np.int32)
    assert len(unmet(codes)) > 5
    codes[rng.choice(30_000, 1000, replace=False)] = rng.integers(0, 256, (1000, 3))
    assert not unmet(codes)
    codes[:100, 2] = 256  # one code more than a rung holds: the last level alone is new, and so is every wave
    more = unmet(codes)
    assert more and not unmet(codes)
    deeper = np.concatenate([codes, rng.integers(0, 3, (30_000, 1)).astype(np.int32)], axis=1)
    assert unmet(deeper) and not unmet(deeper) and not unmet(codes)
