"""PrefixCache: pages of prompts that later prompts with the same beginning use again. Host bookkeeping, without torch.

A page is found by its key, and used only if its tokens, those of all pages before it and the salt are equal: two
prompts whose keys collide lose a hit, and nothing else. Prompts of different salts never share. It belongs to the GPU
thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection
from typing import NamedTuple

from widebeam.kv.eviction import EVICTION, CachedPage, EvictionPolicy, EvictionQueue
from widebeam.kv.prefix import Prefix


class PrefixStats(NamedTuple):
    """Since the start, but for `cached_pages` and `idle_pages`. Prompts that are not to be shared count nowhere."""

    hit_requests: int
    """Requests that were spared at least a page."""
    miss_requests: int
    hit_tokens: int
    """Prompt tokens that were not computed again."""
    restored_tokens: int
    """Of these, those that had come back from the host's memory for the first who hit them."""
    miss_tokens: int
    entered_pages: int
    evicted_pages: int
    flushed_pages: int
    cached_pages: int
    idle_pages: int
    """Cached, and held by no lease: room for whoever needs it."""


class PrefixCache:
    """The shared pages of one ContextKV, as trees: a page belongs to the page before it.

    A lease that holds a page holds all before it, and a page is never evicted before those that continue it. So the
    cached pages of a prompt are always its first ones, and a page that no lease holds can be evicted sooner or later.

    `policy`: a name in EVICTION, or such a function. `max_pages`: most pages that are cached; None: as many as there
    are. `clock`: what `keep_until` is compared with, in seconds.
    """

    def __init__(
        self,
        page_size: int,
        policy: str | EvictionPolicy = "lru",
        max_pages: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_size, self.max_pages = page_size, max_pages
        self.num_idle = 0
        """Cached pages that no lease holds."""
        self._cached: dict[bytes, CachedPage] = {}
        self._queue = EvictionQueue(EVICTION.get(policy) if isinstance(policy, str) else policy, clock)
        self._turn = 0
        self._hit_requests = self._miss_requests = self._hit_tokens = self._restored_tokens = self._miss_tokens = 0
        self._entered = self._evicted = self._flushed = 0

    def __len__(self) -> int:
        return len(self._cached)

    @property
    def stats(self) -> PrefixStats:
        return PrefixStats(
            self._hit_requests, self._miss_requests, self._hit_tokens, self._restored_tokens, self._miss_tokens,
            self._entered, self._evicted, self._flushed, len(self), self.num_idle,
        )  # fmt: skip

    def peek(self, prefix: Prefix) -> int:
        """How many tokens would be hit now, without side effects, in O(log pages).

        An estimate: it believes keys, and another prompt may evict the pages first.
        """
        return self.page_size * bisect_left(prefix.keys, True, key=lambda key: key not in self._cached)

    def match(self, prefix: Prefix) -> list[CachedPage]:
        """The longest run of cached pages that the prompt begins with, all compared with it. No side effects."""
        pages: list[CachedPage] = []
        for key in prefix.keys:
            page = self._cached.get(key)
            if page is None or not self._continues(page, prefix, pages):
                break
            pages.append(page)
        return pages

    def _continues(self, page: CachedPage, prefix: Prefix, before: list[CachedPage]) -> bool:
        """Whether the page holds the prompt's next tokens after those of the pages `before`."""
        parent = before[-1] if before else None
        tokens = prefix.page(len(before), self.page_size)
        return page.parent is parent and page.salt == prefix.salt and page.tokens == tokens

    def num_idle_beside(self, matched: list[list[CachedPage]]) -> int:
        """Idle pages that are left to evict when these are held."""
        return self.num_idle - len({page for pages in matched for page in pages if not page.leases})

    def hit(self, pages: list[CachedPage]) -> None:
        """Give a prompt's lease what `match` found for it."""
        for page in pages:
            page.hits += 1
            self._restored_tokens += self.page_size * page.restored
            page.restored = False
        self.hold(pages)

    def hold(self, pages: list[CachedPage]) -> None:
        """Give a lease what `match` found, for another purpose than a prompt."""
        for page in pages:
            self._hold(page)

    def _hold(self, page: CachedPage) -> None:
        if not page.leases:
            self.num_idle -= 1
            self._queue.discard(page)
        page.leases += 1

    def count(self, num_tokens: int, num_cached: int) -> None:
        """Note a prompt of which so many tokens are hit."""
        self._hit_requests += num_cached > 0
        self._miss_requests += num_cached == 0
        self._hit_tokens += num_cached
        self._miss_tokens += num_tokens - num_cached

    def enter(self, prefix: Prefix, held: list[CachedPage], pages: list[int], keep_until: float | None) -> list[int]:
        """Cache a lease's pages: `pages` hold the prompt, of which those in `held` are cached already.

        `held` grows by what is cached after it, in place: pages that are new, and pages that another lease has entered
        meanwhile. It ends where keys collide, or where `max_pages` are held. Returns pages that were evicted for it.
        """
        evicted: list[int] = []
        self._turn += 1
        for key in prefix.keys[len(held) :]:
            cached = self._cached.get(key)
            if cached is None:
                if self.max_pages is not None and len(self) >= self.max_pages:
                    if not self._queue:
                        break
                    evicted += self.evict(1)
                held.append(self._enter(key, prefix, held, pages[len(held)]))
            elif self._continues(cached, prefix, held):
                self._hold(cached)
                held.append(cached)
            else:
                break
        if keep_until is not None:
            for cached in held:
                cached.keep_until = max(cached.keep_until, keep_until)
        return evicted

    def _enter(self, key: bytes, prefix: Prefix, before: list[CachedPage], page: int) -> CachedPage:
        parent = before[-1] if before else None
        tokens = prefix.page(len(before), self.page_size)
        cached = CachedPage(key, prefix.salt, parent, tokens, page, self._turn, leases=1)
        if parent is not None:
            parent.children += 1
        self._cached[key] = cached
        self._entered += 1
        return cached

    def let_go(self, pages: list[CachedPage]) -> list[int]:
        """End a lease's hold. Returns pages that are free now, since they were flushed meanwhile."""
        free: list[int] = []
        self._turn += 1
        for page in pages:
            page.leases -= 1
            page.last_used = self._turn
            if page.leases:
                continue
            if self._cached.get(page.key) is page:
                self.num_idle += 1
                self._offer(page)
            else:
                free.append(page.page)
        return free

    def _offer(self, page: CachedPage) -> None:
        if not page.leases and not page.children:
            self._queue.add(page)

    def evict(self, count: int) -> list[int]:
        """Make so many pages free. Raises IndexError if fewer are idle."""
        free: list[int] = []
        for _ in range(count):
            page = self._queue.pop()
            del self._cached[page.key]
            self.num_idle -= 1
            if page.parent is not None:
                page.parent.children -= 1
                self._offer(page.parent)
            free.append(page.page)
        self._evicted += count
        return free

    def flush(self, salt: bytes | None) -> list[int]:
        """Forget all pages, or those of one salt. Returns those that are free now; the others are held by leases, and
        free when these end."""
        return self._remove([page for page in self._cached.values() if salt is None or page.salt == salt])

    def drop(self, page: CachedPage) -> list[int]:
        """Forget a page and all that continue it, as a flush would; in time that grows with all that is cached."""
        gone = dict.fromkeys([page] if self._cached.get(page.key) is page else [])
        for other in self._cached.values():  # a page is entered behind its parent
            if other.parent in gone:
                gone[other] = None
        if gone and page.parent is not None:
            page.parent.children -= 1
        free = self._remove(list(gone))
        if gone and page.parent is not None:
            self._offer(page.parent)
        return free

    def _remove(self, gone: list[CachedPage]) -> list[int]:
        for page in gone:
            del self._cached[page.key]
            self._queue.discard(page)
        free = [page.page for page in gone if not page.leases]
        self.num_idle -= len(free)
        self._flushed += len(gone)
        return free

    def check_integrity(self, leases: Collection[list[CachedPage]]) -> list[int]:
        """The pages that are cached, or held as such by one of the `leases`. Raises RuntimeError if holds, children or
        the queue are not as the pages and the leases say."""
        known = dict.fromkeys(self._cached.values(), 0)
        for held in leases:
            for page in held:
                known[page] = known.get(page, 0) + 1
        children: dict[CachedPage, int] = {}
        for page in self._cached.values():
            if page.parent is not None:
                children[page.parent] = children.get(page.parent, 0) + 1
                if self._cached.get(page.parent.key) is not page.parent:
                    raise RuntimeError(f"cached page {page.page} has lost the page before it")
        for page, holds in known.items():
            if page.leases != holds:
                raise RuntimeError(f"cached page {page.page} counts {page.leases} leases, but {holds} hold it")
            cached = self._cached.get(page.key) is page
            if cached and page.children != children.get(page, 0):
                raise RuntimeError(f"cached page {page.page} counts {page.children} pages behind it wrongly")
            if (page in self._queue) != (cached and not holds and not page.children):
                raise RuntimeError(f"cached page {page.page} is wrongly in the eviction queue, or wrongly not")
        if self.num_idle != sum(not known[page] for page in self._cached.values()):
            raise RuntimeError(f"{self.num_idle} cached pages are said to be idle")
        if any(key != page.key for key, page in self._cached.items()) or len(self._queue) > len(self):
            raise RuntimeError("a cached page has another key, or the eviction queue has one that is not cached")
        return [page.page for page in known]
