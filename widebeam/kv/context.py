"""ContextKV: keys and values of prompts, in pages that prefill writes once and every level reads.

Letters: N layers, P pages, S page size in tokens, K key/value heads, D head size, T packed prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch

from widebeam.kv.eviction import CachedPage
from widebeam.kv.pools import UNSCALED, Scales, make_pools
from widebeam.kv.prefix import Prefix
from widebeam.kv.prefix_cache import PrefixCache
from widebeam.model.config import ModelConfig


@dataclass(eq=False)
class ContextLease:
    """A request's hold on pages. Released exactly once, by the pool that gave it."""

    pages: list[int]
    num_tokens: int
    num_cached: int = field(default=0)
    """The first tokens, whose keys and values are there already: their pages are read, never written."""
    prefix: Prefix | None = field(default=None)
    """Under which its pages can be shared when it ends."""
    shared: list[CachedPage] = field(default_factory=list)
    """The first of its pages, which others may hold as well."""
    released: bool = field(default=False)


class PagePool:
    """Who holds which of the pages 1 .. P, wherever they lie.

    With a `cache`, pages outlive the leases that filled them until somebody needs the room, and leases of prompts that
    begin alike share them. Leases fit whenever their pages, counted as if none were shared, fit beside those of the
    leases that are held.
    """

    def __init__(self, num_pages: int, page_size: int, cache: PrefixCache | None = None) -> None:
        if cache is not None and cache.page_size != page_size:
            raise ValueError(f"a cache of pages of {cache.page_size} tokens in a pool of pages of {page_size}")
        self.page_size = page_size
        self.num_pages = num_pages
        self.cache = cache
        self.high_water = 0
        self._free = list(range(num_pages, 0, -1))
        self._leases: set[ContextLease] = set()

    @property
    def leases(self) -> Set[ContextLease]:
        """Those that are held."""
        return self._leases

    @property
    def pages_used(self) -> int:
        """Held by leases. May be read on any thread."""
        idle = self.cache.num_idle if self.cache is not None else 0
        return self.num_pages - len(self._free) - idle

    def acquire(self, num_tokens: int, prefix: Prefix | None = None) -> ContextLease | None:
        """Pages for so many tokens, or None, with nothing changed, while there is no room.

        `prefix`: what of these tokens can be shared. Pages that are cached already are taken as they are; cached pages
        that nobody holds make room.
        """
        leases = self.acquire_together([(num_tokens, prefix)])
        return leases[0] if leases is not None else None

    def acquire_together(self, wanted: Sequence[tuple[int, Prefix | None]]) -> list[ContextLease] | None:
        """Leases for several prompts, or None, with nothing changed, while there is no room for all of them.

        No page that one of them hits is evicted for another, as could happen one by one.
        """
        shared = [self._match(num_tokens, prefix) for num_tokens, prefix in wanted]
        counts = [self._count(num_tokens) for num_tokens, _ in wanted]
        missing = sum(counts) - sum(map(len, shared))
        if missing > self.spare(*shared):
            return None
        if self.cache is not None:
            for pages in shared:
                self.cache.hit(pages)
            if missing > len(self._free):
                self._free.extend(reversed(self.cache.evict(missing - len(self._free))))
        leases = [self._lease(*prompt, pages) for prompt, pages in zip(wanted, shared, strict=True)]
        self.high_water = max(self.high_water, self.pages_used)
        return leases

    def _count(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _match(self, num_tokens: int, prefix: Prefix | None) -> list[CachedPage]:
        if self.cache is None or prefix is None:
            return []
        if len(prefix.token_ids) != num_tokens or len(prefix.keys) >= max(self._count(num_tokens), 1):
            raise ValueError(f"{len(prefix.keys)} keys of {len(prefix.token_ids)} tokens for a lease of {num_tokens}")
        return self.cache.match(prefix)

    def _lease(self, num_tokens: int, prefix: Prefix | None, shared: list[CachedPage]) -> ContextLease:
        kept = len(self._free) - (self._count(num_tokens) - len(shared))
        fresh = self._free[kept:][::-1]
        del self._free[kept:]
        lease = ContextLease([page.page for page in shared] + fresh, num_tokens)
        if self.cache is not None and prefix is not None:
            lease.num_cached, lease.prefix, lease.shared = len(shared) * self.page_size, prefix, shared
            self.cache.count(num_tokens, lease.num_cached)
        self._leases.add(lease)
        return lease

    def spare(self, *held: list[CachedPage]) -> int:
        """Pages that can be had while these are held."""
        return len(self._free) + (self.cache.num_idle_beside(list(held)) if self.cache is not None else 0)

    def reserve(self, prefix: Prefix, keep_until: float | None = None) -> ContextLease | None:
        """A hold on the pages of all keys of a prefix, or None, with nothing changed, while there is no room.

        Pages that are not cached yet are so from now on, behind the first `num_cached` tokens: who asks for them fills
        them before anybody reads. They are those that were free or unused for longest, in ascending order, so that many
        are neighbours. Where keys collide the lease is shorter.
        """
        assert self.cache is not None
        shared = self.cache.match(prefix)
        known, missing = len(shared), len(prefix.keys) - len(shared)
        if missing > self.spare(shared):
            return None
        self.cache.hold(shared)
        if missing > len(self._free):
            self._free.extend(self.cache.evict(missing - len(self._free)))
        fresh, self._free = sorted(self._free[:missing]), self._free[missing:]
        pages = [page.page for page in shared] + fresh
        self._free.extend(self.cache.enter(prefix, shared, pages, keep_until))
        self._free.extend(pages[len(shared) :])
        lease = ContextLease(pages[: len(shared)], len(shared) * self.page_size, known * self.page_size, shared=shared)
        self._leases.add(lease)
        return lease

    def forget(self, page: CachedPage) -> int:
        """A cached page and all that continue it are not shared with later prompts. How many these are."""
        assert self.cache is not None
        before = len(self.cache)
        self._free.extend(reversed(self.cache.drop(page)))
        return before - len(self.cache)

    def release(self, lease: ContextLease, keep: bool = False, keep_until: float | None = None) -> None:
        """End a lease.

        `keep`: all its pages are written, and may be shared as far as it has keys; wrong after a failure. `keep_until`:
        they are expected to be used before this time of the cache's clock, and evicted after others until then.
        """
        if lease.released:
            raise RuntimeError("a context lease was released twice")
        lease.released = True
        self._leases.remove(lease)
        free = lease.pages
        if self.cache is not None:
            evicted: list[int] = []
            if keep and lease.prefix is not None:
                evicted = self.cache.enter(lease.prefix, lease.shared, lease.pages, keep_until)
            cached = {page.page for page in lease.shared}
            free = [page for page in lease.pages if page not in cached] + self.cache.let_go(lease.shared) + evicted
        self._free.extend(reversed(free))

    def flush(self, salt: bytes | None = None) -> None:
        """Nothing that was computed until now is shared with later prompts; `salt`: nothing of this salt."""
        if self.cache is None:
            return
        self._free.extend(reversed(self.cache.flush(salt)))
        for lease in self._leases:
            if lease.prefix is not None and salt in (None, lease.prefix.salt):
                lease.prefix = None

    def check_integrity(self) -> None:
        """Every page is free, cached, or held by exactly one lease. Raises RuntimeError."""
        own = [page for lease in self._leases for page in lease.pages[len(lease.shared) :]]
        shared = [lease.shared for lease in self._leases]
        cached = self.cache.check_integrity(shared) if self.cache is not None else []
        if sorted(own + cached + self._free) != list(range(1, self.num_pages + 1)):
            counts = f"{len(own)} held, {len(cached)} cached, {len(self._free)} free of {self.num_pages}"
            raise RuntimeError(f"context pages leak: {counts}")
        if any(lease.released for lease in self._leases):
            raise RuntimeError("a released context lease is still held")
        if any(page.page != lease.pages[i] for lease in self._leases for i, page in enumerate(lease.shared)):
            raise RuntimeError("a context lease has other pages than it shares")


class ContextKV(PagePool):
    """The paged pool: the `pools` have P S slots: page p holds slots p S .. p S + S - 1.

    Page 0 belongs to nobody: rows that only fill up a shape write there. Float8 pools come with the `scales` of each
    layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cache: PrefixCache | None = None,
        scales: Sequence[Scales] = (),
    ) -> None:
        super().__init__(num_pages, page_size, cache)
        self.pools = make_pools(config, (num_pages + 1) * page_size, dtype, device)
        self._scales = tuple(scales)

    def scales(self, layer: int) -> Scales:
        """What to multiply a layer's keys and values by."""
        return self._scales[layer] if self._scales else UNSCALED

    @property
    def page_bytes(self) -> int:
        """What a page takes, with the keys and values of all layers."""
        return sum(pool.nbytes for pool in self.pools) // (self.num_pages + 1)
