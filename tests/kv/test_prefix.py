"""Shared pages of prompts: every hit is right, nothing is shared across salts, nothing is lost.

The oracle is a plain dict from (salt, tokens from the beginning) to how a page was used, searched from end to end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.model.test_attention import CONFIG
from widebeam.kv.context import ContextKV, ContextLease
from widebeam.kv.prefix import Prefix, prefix_keys
from widebeam.kv.prefix_cache import PrefixCache

CPU = torch.device("cpu")
S = 2
Beginning = tuple[bytes, tuple[int, ...]]
"""A salt and the tokens up to the end of a page: all that keys and values of the page depend on."""


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def pool_with(cache: PrefixCache, num_pages: int = 6) -> ContextKV:
    return ContextKV(CONFIG, num_pages, cache.page_size, torch.float32, CPU, cache)


def visit(pool: ContextKV, prompt: np.ndarray, salt: bytes = b"", keep_until: float | None = None) -> int:
    """Search once and keep the pages. Returns the tokens that were cached."""
    lease = pool.acquire(len(prompt), Prefix.of(prompt, pool.page_size, salt))
    assert lease is not None
    pool.release(lease, keep=True, keep_until=keep_until)
    pool.check_integrity()
    return lease.num_cached


def cached_tokens(pool: ContextKV, prompt: np.ndarray, salt: bytes = b"") -> int:
    assert pool.cache is not None
    prefix = Prefix.of(prompt, pool.page_size, salt)
    found = len(pool.cache.match(prefix)) * pool.page_size
    assert pool.cache.peek(prefix) == found
    return found


def pages_of(salt: bytes, ids: tuple[int, ...]) -> list[Beginning]:
    return [(salt, ids[: (i + 1) * S]) for i in range(-(-len(ids) // S))]


def shareable(salt: bytes, ids: tuple[int, ...]) -> list[Beginning]:
    """All pages but the one with the last token."""
    return pages_of(salt, ids)[:-1]


@dataclass
class Entry:
    """What the oracle knows of a cached page."""

    last_used: int
    hits: int = 0
    holds: int = 0
    keep_until: float = -math.inf


@dataclass(eq=False)
class Held:
    lease: ContextLease
    salt: bytes
    ids: tuple[int, ...]
    chain: list[Entry]
    forgotten: bool = False

    @property
    def pages(self) -> list[Beginning]:
        return pages_of(self.salt, self.ids)


PROMPT = st.tuples(
    st.sampled_from([b"a", b"a", b"b"]),
    st.builds(lambda pages, end: tuple(np.repeat(pages, S)) + end, st.lists(st.integers(0, 2), max_size=3).map(tuple),
              st.sampled_from([(3,), (3, 3)])),
)  # fmt: skip
"""A salt and a few tokens: pages of one of three kinds, and an end."""
TTL = st.sampled_from([None, None, None, 2.0, 5.0])


class PrefixMachine(RuleBasedStateMachine):
    """Waves of random prompts of few tokens, so that many begin alike; `device` is what prefill has written."""

    collide = False
    num_pages = 8

    def __init__(self) -> None:
        super().__init__()
        self.now, self.turn = 0.0, 0
        self.held: list[Held] = []
        self.entries: dict[Beginning, Entry] = {}
        self.device: dict[int, Beginning] = {}

    @initialize(policy=st.sampled_from(["lru", "lfu"]), limit=st.sampled_from([None, 4]))
    def start(self, policy: str, limit: int | None) -> None:
        self.policy, self.limit = policy, limit
        self.cache = PrefixCache(S, policy, limit, lambda: self.now)
        self.pool = pool_with(self.cache, self.num_pages)

    def prefix(self, salt: bytes, ids: tuple[int, ...]) -> Prefix:
        prefix = Prefix.of(tokens(*ids), S, salt)
        if not self.collide:
            return prefix
        return replace(prefix, keys=tuple(bytes([int(sum(ids)) % 5]) for _, ids in shareable(salt, ids)))

    def matched(self, salt: bytes, ids: tuple[int, ...]) -> list[Entry]:
        chain: list[Entry] = []
        for beginning in shareable(salt, ids):
            if beginning not in self.entries:
                break
            chain.append(self.entries[beginning])
        return chain

    def evict(self) -> None:
        """The page that goes first, of all that nobody holds or continues."""

        def order(beginning: Beginning) -> tuple[float, ...]:
            entry = self.entries[beginning]
            rank = entry.hits if self.policy == "lfu" else entry.last_used
            kept = entry.keep_until > self.now
            return kept, entry.keep_until if kept else rank, entry.last_used

        def continued(salt: bytes, ids: tuple[int, ...]) -> bool:
            return any(other[0] == salt and other[1][: len(ids)] == ids != other[1] for other in self.entries)

        free = [one for one, entry in self.entries.items() if not entry.holds and not continued(*one)]
        del self.entries[min(free, key=order)]

    @rule(prompts=st.lists(PROMPT, min_size=1, max_size=3))
    def acquire(self, prompts: list[tuple[bytes, tuple[int, ...]]]) -> None:
        self.try_to_acquire(prompts)

    @rule(prompts=st.lists(PROMPT, min_size=2, max_size=8), ttl=TTL)
    def visit(self, prompts: list[tuple[bytes, tuple[int, ...]]], ttl: float | None) -> None:
        """One after the other, as most requests come."""
        for prompt in prompts:
            if self.try_to_acquire([prompt]):
                self.release_one(self.held.pop(), True, ttl)
                self.every_lease_sees_its_own_tokens()

    def try_to_acquire(self, prompts: list[tuple[bytes, tuple[int, ...]]]) -> bool:
        chains = [self.matched(*prompt) for prompt in prompts]
        before = (self.cache.stats, list(self.pool._free))
        peeked = [self.cache.peek(self.prefix(*prompt)) for prompt in prompts]
        wanted = [(len(ids), self.prefix(salt, ids)) for salt, ids in prompts]
        leases = self.pool.acquire_together(wanted)
        cold = sum(-(-len(ids) // S) for _, ids in prompts)
        fits = cold + sum(len(one.lease.pages) for one in self.held) <= self.num_pages
        if leases is None:
            assert not fits and before == (self.cache.stats, self.pool._free)
        if not self.collide:
            needed = cold - sum(map(len, chains))
            taken = {id(entry) for chain in chains for entry in chain}
            idle = sum(not entry.holds and id(entry) not in taken for entry in self.entries.values())
            free = self.num_pages - len({page for one in self.held for page in one.lease.pages}) - self.idle()
            assert (leases is not None) == (needed <= free + idle)
            if leases is None:
                return False
            assert peeked == [lease.num_cached for lease in leases] == [len(chain) * S for chain in chains]
            for entry in (entry for chain in chains for entry in chain):
                entry.hits, entry.holds = entry.hits + 1, entry.holds + 1
            for _ in range(needed - free):
                self.evict()
        for lease, prompt, chain in zip(leases or [], prompts, chains, strict=bool(leases)):
            self.write(Held(lease, *prompt, chain))
        return leases is not None

    def idle(self) -> int:
        return sum(not entry.holds for entry in self.entries.values())

    def write(self, new: Held) -> None:
        """Prefill: what is cached is there, the rest goes to pages that nobody else holds."""
        assert len(new.lease.pages) == len(new.pages) and new.lease.num_cached < len(new.ids)
        cached = new.lease.num_cached // S
        assert all(self.device[page] == one for page, one in zip(new.lease.pages[:cached], new.pages, strict=False))
        others = {page for one in self.held for page in one.lease.pages}
        for page, beginning in list(zip(new.lease.pages, new.pages, strict=True))[cached:]:
            assert page not in others
            self.device[page] = beginning
        self.held.append(new)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.sampled_from([True, True, True, False]), ttl=TTL)
    def release(self, data: st.DataObject, keep: bool, ttl: float | None) -> None:
        self.release_one(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))), keep, ttl)

    def release_one(self, one: Held, keep: bool, ttl: float | None) -> None:
        keep_until = None if ttl is None else self.now + ttl
        self.pool.release(one.lease, keep, keep_until)
        with pytest.raises(RuntimeError, match="twice"):
            self.pool.release(one.lease)
        if self.collide:
            return
        self.turn += 1
        if keep and not one.forgotten:
            self.enter(one, keep_until)
        for entry in one.chain:
            entry.holds, entry.last_used = entry.holds - 1, self.turn

    def enter(self, one: Held, keep_until: float | None) -> None:
        for beginning in shareable(one.salt, one.ids)[len(one.chain) :]:
            if beginning not in self.entries:
                if self.limit is not None and len(self.entries) >= self.limit:
                    if not self.idle():
                        break
                    self.evict()
                self.entries[beginning] = Entry(self.turn)
            self.entries[beginning].holds += 1
            one.chain.append(self.entries[beginning])
        for entry in one.chain:
            entry.keep_until = max(entry.keep_until, -math.inf if keep_until is None else keep_until)

    @rule(salt=st.sampled_from([None, b"a", b"b"]))
    def flush(self, salt: bytes | None) -> None:
        self.pool.flush(salt)
        self.entries = {one: entry for one, entry in self.entries.items() if salt not in (None, one[0])}
        for one in self.held:
            one.forgotten |= salt in (None, one.salt)

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def every_lease_sees_its_own_tokens(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        for one in self.held:
            assert [self.device[page] for page in one.lease.pages] == one.pages
        assert self.pool.pages_used == len({page for one in self.held for page in one.lease.pages})
        stats = self.cache.stats
        assert stats.cached_pages == stats.entered_pages - stats.evicted_pages - stats.flushed_pages
        if not self.collide:
            assert {self.device[page.page] for page in self.cache._cached.values()} == set(self.entries)
            assert (stats.cached_pages, stats.idle_pages) == (len(self.entries), self.idle())

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for one in self.held:
            self.pool.release(one.lease, keep=True)
        self.pool.flush()
        self.pool.check_integrity()
        assert sorted(self.pool._free) == list(range(1, self.num_pages + 1)) and not self.cache.stats.cached_pages


class CollidingMachine(PrefixMachine):
    """Keys that say nearly nothing: hits become fewer, and are right all the same."""

    collide = True


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=120, stateful_step_count=40)
TestCollisions = CollidingMachine.TestCase
TestCollisions.settings = settings(max_examples=60, stateful_step_count=40)


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
