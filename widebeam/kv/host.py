"""The host tier of the prefix cache: pages that others pushed off the device, and their way back.

Pages are saved as soon as they are computed, so that nothing is left to copy when they are evicted; they are restored
for a request that waits. Neither is waited for: pages at both ends of a copy are held until it is over, which is looked
at between waves. It belongs to the GPU thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

import torch

from widebeam.faults import counted
from widebeam.kv.context import ContextKV, ContextLease, PagePool
from widebeam.kv.copies import LastUses, PageCopies
from widebeam.kv.eviction import CachedPage
from widebeam.kv.flights import Flight, Flights
from widebeam.kv.prefix import Prefix, Waits
from widebeam.kv.prefix_cache import PrefixCache
from widebeam.kv.rates import HostStats, PrefillRate, restore_pays

log = logging.getLogger(__name__)
SAVING_SHARE = 4
"""Saves in flight hold at most a quarter of the device's pages."""


class Unsaved(NamedTuple):
    """A prompt whose pages wait to be saved."""

    prefix: Prefix
    keep_until: float | None
    num_pages: int
    """That were not saved when it came."""


class HostTier:
    """Pages in the host's memory, with an index of their own, behind the prefix cache of a ContextKV.

    `policy`: which of them goes first, as in PrefixCache.
    """

    def __init__(self, context: ContextKV, copies: PageCopies, policy: str = "lru") -> None:
        assert context.cache is not None
        self._context, self._cache, self._copies = context, context.cache, copies
        self._index = PrefixCache(context.page_size, policy)
        self._host = PagePool(copies.num_pages, context.page_size, self._index)
        self._queue: deque[Unsaved] = deque()
        self._flights = Flights(context, self._host)
        self._uses = LastUses(context.num_pages, copies.device)
        self.prefill_rate = PrefillRate()
        self._stats = HostStats()

    @property
    def stats(self) -> HostStats:
        """May be read on any thread."""
        return self._stats._replace(
            pages=len(self._index),
            page_bytes=self._copies.page_bytes,
            size_bytes=self._copies.page_bytes * self._host.num_pages,
            evicted=self._index.stats.evicted_pages,
            restore_bytes_per_s=self._copies.bytes_per_s,
            prefill_tokens_per_s=self.prefill_rate.tokens_per_s,
        )

    @property
    def busy(self) -> bool:
        """Whether copies run: `look` says when they are over."""
        return bool(self._flights)

    @property
    def pages_in_flight(self) -> int:
        """Pages of the device that copies hold."""
        return self._flights.device_pages

    def _count(self, **amounts: float) -> None:
        self._stats = self._stats._replace(**{name: getattr(self._stats, name) + n for name, n in amounts.items()})

    # Around waves

    def begin_wave(self, leases: Iterable[ContextLease]) -> None:
        """What is launched from now on runs behind the restores of these leases' pages."""
        self._flights.precede(leases)

    def end_wave(self, leases: Iterable[ContextLease]) -> None:
        """A wave that used these leases is launched, as far as it was."""
        self._uses.note(lease.pages for lease in leases)

    def look(self) -> None:
        """Let go of what copies hold that are over; waits for none."""
        for flight in self._flights.over():
            size, seconds = flight.transfer.num_bytes, flight.transfer.seconds
            if flight.restores:
                self._count(restored=len(flight.fresh), bytes_to_device=size, seconds_to_device=seconds)
            else:
                self._count(saved=len(flight.fresh), bytes_to_host=size, seconds_to_host=seconds)
                self._copies.note([page.page for page in flight.fresh])

    def settle(self) -> None:
        """Wait for all copies."""
        self._flights.wait()
        self.look()

    def make_room(self) -> None:
        """A wave needs pages that copies hold: wait for them."""
        self._count(waits=bool(self._flights))
        self.settle()

    # Saving

    def offer(self, prefix: Prefix, keep_until: float | None = None) -> None:
        """Pages of this prompt have entered the prefix cache: those that are not saved yet wait for `save`.

        No more wait than the device has pages; the oldest go first.
        """
        known = self._index.match(prefix)
        missing = len(prefix.keys) - len(known)
        if not missing:  # used just now, wherever it was read
            self._index.hit(known)
            self._index.let_go(known)
            return
        self._queue.append(Unsaved(prefix, keep_until, missing))
        waiting = sum(unsaved.num_pages for unsaved in self._queue)
        while waiting > self._context.num_pages:
            dropped = self._queue.popleft().num_pages
            waiting -= dropped
            self._count(dropped=dropped)

    def save(self) -> None:
        """Launch copies of what waits, as far as they may hold pages. They run behind what is launched so far."""
        self.look()
        most = max(1, self._context.num_pages // SAVING_SHARE)
        most -= self._flights.saving
        while self._queue and most > 0:
            most -= self._save(self._queue.popleft(), most)

    def _save(self, unsaved: Unsaved, most: int) -> int:
        """Launch copies of at most so many of its pages; the rest waits. How many these are."""
        prefix, keep_until, _ = unsaved
        known, cached = self._index.match(prefix), len(self._cache.match(prefix))
        missing = cached - len(known)
        count = min(missing, most, self._host.spare(known))
        if count <= 0:
            self._count(dropped=max(0, missing))
            return 0
        host = self._host.reserve(prefix.first(len(known) + count), keep_until)
        device = self._context.reserve(prefix.first(len(known) + count))
        assert host is not None and device is not None
        fresh = host.shared[len(known) :]
        launched = self._launch(host, device, fresh, restores=False)
        left = missing - len(fresh)
        if left and launched == most:
            self._queue.appendleft(unsaved._replace(num_pages=left))
        else:
            self._count(dropped=left)
        return launched

    # Restoring

    def prefetch(self, waiting: Iterable[Waits]) -> None:
        """Restore for prompts that wait, in turn, as far as there is room for them beside those before."""
        self.look()
        room = self._context.num_pages - self._context.pages_used + self.pages_in_flight
        near: list[Prefix] = []
        for search in waiting:
            room -= -(-search.num_tokens // self._context.page_size)
            if room < 0:
                break
            if search.prefix is not None and not search.prefetched:
                search.prefetched = True
                near.append(search.prefix)
        for prefix in near:  # what they need makes room last
            known = self._cache.match(prefix)
            self._cache.hold(known)
            self._cache.let_go(known)
        for prefix in near:
            self.restore(prefix)

    def restore(self, prefix: Prefix) -> None:
        """Bring back what the device has lost of a prompt's pages, if that is faster than computing them, and as far as
        nobody holds the room."""
        cached = self._cache.match(prefix)
        saved = list(takewhile(lambda page: page not in self._flights, self._index.match(prefix)))
        missing = len(saved) - len(cached)
        if missing <= 0:
            return
        num_tokens, num_bytes = missing * self._context.page_size, missing * self._copies.page_bytes
        if not restore_pays(num_tokens, num_bytes, self._copies.bytes_per_s, self.prefill_rate.tokens_per_s):
            self._count(declined=missing)
            return
        intact = self._intact(saved[len(cached) :])
        count = len(cached) + min(intact, self._context.spare(cached))
        host, device = self._host.reserve(prefix.first(count)), self._context.reserve(prefix.first(count))
        assert host is not None and device is not None
        self._launch(host, device, device.shared[len(cached) :], restores=True)

    def _intact(self, pages: list[CachedPage]) -> int:
        """The first of these that are as they were saved; the others are forgotten."""
        count = self._copies.intact([page.page for page in pages])
        if count < len(pages):
            if not self._stats.corrupt:
                log.error("a page in the host's memory is not what was saved: it is computed again")
            self._count(corrupt=self._host.forget(pages[count]))
        return count

    # Either way

    def _launch(self, host: ContextLease, device: ContextLease, fresh: list[CachedPage], restores: bool) -> int:
        """Copy the fresh pages of one of the leases. If that cannot be launched they are forgotten."""
        if not fresh:  # keys collide, or there is no room
            self._context.release(device)
            self._host.release(host)
            return 0
        first = (device if restores else host).num_cached // self._context.page_size
        pages, places = (lease.pages[first : first + len(fresh)] for lease in (device, host))
        try:
            if restores:
                transfer = self._copies.restore(self._context.pools, pages, places, self._uses.of(pages))
            else:
                transfer = self._copies.save(self._context.pools, pages, places)
        except torch.AcceleratorError:
            raise
        except RuntimeError:
            way = "from" if restores else "to"
            log.exception("%s could not be copied %s the host's memory", counted(len(fresh), "page"), way)
            self._copies.fence()
            (self._context if restores else self._host).forget(fresh[0])
            self._context.release(device)
            self._host.release(host)
            self._count(failed=len(fresh))
            return 0
        for page in fresh:
            page.restored = restores
        self._flights.add(Flight(transfer, device, host, fresh, restores))
        return len(fresh)

    def flush(self, salt: bytes | None = None) -> None:
        """Forget all pages, or those of one salt; copies in flight leave nothing."""
        self._host.flush(salt)
        self._queue = deque(one for one in self._queue if salt is not None and one.prefix.salt != salt)

    def check_integrity(self) -> None:
        """Every page of the host's memory is free, indexed, or held by a copy. Raises RuntimeError."""
        self._host.check_integrity()
        self._flights.check_integrity()
