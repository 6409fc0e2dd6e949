"""Shared pages of prompts in any order of events: every hit is right, nothing is shared across salts, nothing is lost.

The oracle is a plain dict from (salt, tokens from the beginning) to how a page was used, searched from end to end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kv.cached_prompts import (
    PROMPT,
    Beginning,
    S,
    pages_of,
    pool_with,
    shareable,
    tokens,
)
from widebeam.kv.context import ContextLease
from widebeam.kv.prefix import Prefix
from widebeam.kv.prefix_cache import PrefixCache


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
