"""Shared pages of prompts, case by case; any order of events: test_prefix_machine.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kv.cached_prompts import (
    CPU,
    S,
    cached_tokens,
    pool_with,
    tokens,
    visit,
)
from tests.model.test_attention import CONFIG
from widebeam.kv.context import ContextKV
from widebeam.kv.prefix import Prefix, prefix_keys
from widebeam.kv.prefix_cache import PrefixCache


def test_keys_depend_on_all_tokens_before_and_on_the_salt() -> None:
    prompt = np.arange(40, dtype=np.int32)
    keys = prefix_keys(prompt, 8, b"a")
    assert keys == prefix_keys(prompt, 8, b"a") and len(set(keys)) == 4 and {len(key) for key in keys} == {16}
    for changed in range(40):
        other = prompt.copy()
        other[changed] += 1
        same = [a == b for a, b in zip(keys, prefix_keys(other, 8, b"a"), strict=True)]
        assert same == [page < changed // 8 for page in range(4)]
    assert not set(keys) & set(prefix_keys(prompt, 8, b"b"))
    assert not set(prefix_keys(prompt, 8, b"")) & set(prefix_keys(prompt, 8, b"\0"))


@pytest.mark.parametrize(("length", "count"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_the_page_of_the_last_token_has_no_key(length: int, count: int) -> None:
    keys = prefix_keys(np.zeros(length, np.int32), 8, b"")
    assert len(keys) == count and keys == prefix_keys(np.zeros(100, np.int32), 8, b"")[:count]


def test_a_forged_key_hits_nothing() -> None:
    """Equal keys are not enough: neither for other tokens, nor another beginning, nor another salt."""
    pool = pool_with(PrefixCache(S))
    visit(pool, tokens(1, 2, 3, 4, 5), b"a")
    good = Prefix.of(tokens(1, 2, 3, 4, 5), S, b"a")
    assert pool.cache is not None and len(pool.cache.match(good)) == 2
    for prompt, salt, keys, hits in [
        ((1, 2, 3, 9, 5), b"a", good.keys, 1),
        ((9, 2, 3, 4, 5), b"a", good.keys, 0),
        ((1, 2, 3, 4, 5), b"b", good.keys, 0),
        ((3, 4, 3, 4, 5), b"a", (good.keys[1], good.keys[1]), 0),
    ]:
        forged = Prefix(tokens(*prompt), salt, keys)
        lease = pool.acquire(5, forged)
        assert lease is not None and lease.num_cached == hits * S
        pool.release(lease, keep=True)
        pool.check_integrity()
        assert len(pool.cache.match(good)) == 2


def test_lru_and_lfu_choose_differently() -> None:
    a, b, c = tokens(1, 1, 0), tokens(2, 2, 0), tokens(3, 3, 0)
    kept = {}
    for policy in ("lru", "lfu"):
        pool = pool_with(PrefixCache(S, policy, max_pages=2))
        for prompt in (a, a, b, c):
            visit(pool, prompt)
        kept[policy] = [cached_tokens(pool, prompt) > 0 for prompt in (a, b, c)]
    assert kept == {"lru": [False, True, True], "lfu": [True, False, True]}
    with pytest.raises(KeyError, match="did you mean 'lru'"):
        PrefixCache(S, "lruu")


def test_a_prefix_is_lost_from_its_end() -> None:
    pool = pool_with(PrefixCache(S))
    prompt = tokens(*range(9))
    visit(pool, prompt)
    for used, left in [(2, 8), (3, 6), (4, 4), (5, 2), (6, 0)]:
        lease = pool.acquire(used * S)
        assert lease is not None and cached_tokens(pool, prompt) == left
        pool.release(lease)
    assert pool.cache is not None and pool.cache.stats.evicted_pages == 4


def test_pages_warmed_ahead_go_last_until_their_time() -> None:
    now = [0.0]
    pool = pool_with(PrefixCache(S, max_pages=2, clock=lambda: now[0]))
    warm, a, b = tokens(1, 1, 0), tokens(2, 2, 0), tokens(3, 3, 0)
    visit(pool, warm, keep_until=10.0)
    for prompt in (a, b, a):
        visit(pool, prompt)
    assert cached_tokens(pool, warm) and cached_tokens(pool, a) and not cached_tokens(pool, b)
    now[0] = 10.0
    visit(pool, b)
    assert not cached_tokens(pool, warm)
    visit(pool, a, keep_until=30.0)
    visit(pool, b, keep_until=20.0)
    visit(pool, warm)
    assert cached_tokens(pool, a) and not cached_tokens(pool, b), "of those to keep, the first to expire goes"


def test_what_one_prompt_of_a_wave_hits_is_not_evicted_for_another() -> None:
    pool = pool_with(PrefixCache(S), num_pages=7)
    returning, other = tokens(*range(7)), tokens(*range(10, 15))
    visit(pool, returning)
    visit(pool, other)
    cold = pool.acquire_together([(3, None), (7, Prefix.of(returning, S))])
    assert cold is not None and cold[1].num_cached == 6
    assert cached_tokens(pool, other) == 2


def test_a_flush_ends_what_is_shared_but_no_lease() -> None:
    pool = pool_with(PrefixCache(S))
    prompt = tokens(1, 2, 3, 4, 5)
    visit(pool, prompt)
    lease = pool.acquire(5, Prefix.of(prompt, S))
    assert lease is not None and lease.num_cached == 4
    pool.flush()
    assert pool.pages_used == 3 and visit(pool, prompt) == 0
    pool.release(lease, keep=True)
    pool.check_integrity()
    assert pool.pages_used == 0 and cached_tokens(pool, prompt) == 4


def test_counters_and_bytes() -> None:
    pool = pool_with(PrefixCache(S))
    for prompt in (tokens(1, 2, 3, 4, 5), tokens(1, 2, 3, 4, 5), tokens(1, 2, 9)):
        visit(pool, prompt)
    lease = pool.acquire(4)
    assert lease is not None and lease.num_cached == 0 and pool.cache is not None
    stats = pool.cache.stats
    assert (stats.hit_requests, stats.miss_requests, stats.hit_tokens, stats.miss_tokens) == (2, 1, 6, 7)
    assert (stats.cached_pages, stats.idle_pages, stats.entered_pages, stats.evicted_pages) == (2, 2, 2, 0)
    assert pool.page_bytes == 2 * CONFIG.num_layers * S * CONFIG.num_kv_heads * CONFIG.head_dim * 4


def test_many_uses_of_a_page_take_no_memory() -> None:
    pool = pool_with(PrefixCache(S))
    for _ in range(300):
        visit(pool, tokens(1, 2, 3))
    assert pool.cache is not None and len(pool.cache._queue._ranked) <= 70


def test_integrity_notices_what_is_wrong() -> None:
    for attribute, wrong, message in [
        ("leases", 1, "counts 1 leases"),
        ("children", 1, "behind it wrongly"),
        ("key", b"x", "queue, or wrongly"),
    ]:
        pool = pool_with(PrefixCache(S))
        visit(pool, tokens(1, 2, 3))
        assert pool.cache is not None
        setattr(pool.cache.match(Prefix.of(tokens(1, 2, 3), S))[0], attribute, wrong)
        with pytest.raises(RuntimeError, match=message):
            pool.check_integrity()
    pool = pool_with(PrefixCache(S))
    visit(pool, tokens(1, 2, 3))
    lease = pool.acquire(3, Prefix.of(tokens(1, 2, 3), S))
    assert lease is not None
    lease.pages.reverse()
    with pytest.raises(RuntimeError, match=r"leak|other pages"):
        pool.check_integrity()


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(ValueError, match="pages of 4 tokens in a pool of pages of 2"):
        ContextKV(CONFIG, 4, 2, torch.float32, CPU, PrefixCache(4))
    pool = pool_with(PrefixCache(4))
    for num_tokens, prefix in [(8, Prefix.of(tokens(*range(9)), 4)), (9, Prefix.of(tokens(*range(9)), 2))]:
        with pytest.raises(ValueError, match="keys of 9 tokens"):
            pool.acquire(num_tokens, prefix)


def test_without_a_cache_nothing_is_kept() -> None:
    pool = ContextKV(CONFIG, 4, S, torch.float32, CPU)
    for _ in range(2):
        lease = pool.acquire(5, Prefix.of(tokens(1, 2, 3, 4, 5), S))
        assert lease is not None and lease.num_cached == 0 and lease.pages == [1, 2, 3]
        pool.release(lease, keep=True)
        pool.flush()
        assert pool.pages_used == 0
        pool.check_integrity()
