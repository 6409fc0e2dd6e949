"""Which cached page goes first when room is needed. Imports no torch.

A page can go while no lease holds it and no cached page continues it, so that a prefix is lost from its end. Among
these a policy chooses: it is a function by name that ranks a page, lowest first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from widebeam.registry import Registry


@dataclass(eq=False, slots=True)
class CachedPage:
    """A full page of a prompt that others may use."""

    key: bytes
    salt: bytes
    parent: CachedPage | None
    """Of the page before; None: the prompt begins here."""
    tokens: bytes
    """Its token ids, as int32."""
    page: int
    last_used: int
    """When a lease on it last ended, in turns of the cache."""
    hits: int = field(default=0)
    """Leases that were spared computing it."""
    leases: int = field(default=0)
    """That hold it now."""
    children: int = field(default=0)
    """Cached pages that continue it."""
    restored: bool = field(default=False)
    """It came back from the host's memory, and nobody has hit it yet."""
    keep_until: float = field(default=-math.inf)
    """It is expected to be used before; in time of the cache's clock."""


EvictionPolicy = Callable[[CachedPage], float]
"""The lowest goes first; of equals the least recently used. Asked when the page can go from now on."""

EVICTION: Registry[EvictionPolicy] = Registry("eviction policy", group="widebeam.eviction")
EVICTION.add("lru", "widebeam.kv.eviction:lru")
EVICTION.add("lfu", "widebeam.kv.eviction:lfu")


def lru(page: CachedPage) -> float:
    """The least recently used goes first."""
    return page.last_used


def lfu(page: CachedPage) -> float:
    """The page with the fewest hits goes first."""
    return page.hits


class EvictionQueue:
    """The pages that can go, in the order in which they do.

    Pages that are to be kept until later go last: first the one whose time comes first.
    """

    def __init__(self, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        self._policy, self._clock = policy, clock
        self._turns: dict[CachedPage, int] = {}
        """The valid turn of each; entries of the heaps with another one are stale."""
        self._next_turn = 0
        self._ranked: list[tuple[float, int, int, CachedPage]] = []
        """By rank, last use and turn."""
        self._kept: list[tuple[float, int, int, CachedPage]] = []
        """By end of the time to keep, last use and turn."""

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, page: CachedPage) -> bool:
        return page in self._turns

    def add(self, page: CachedPage) -> None:
        self._next_turn += 1
        self._turns[page] = self._next_turn
        if page.keep_until > self._clock():
            self._push(self._kept, page.keep_until, page)
        else:
            self._push(self._ranked, self._policy(page), page)

    def discard(self, page: CachedPage) -> None:
        self._turns.pop(page, None)

    def pop(self) -> CachedPage:
        """Remove and return the one that goes first. Raises IndexError if there is none."""
        while (page := self._first(self._kept)) is not None and page.keep_until <= self._clock():
            heapq.heappop(self._kept)
            self._push(self._ranked, self._policy(page), page)
        heap = self._ranked if self._first(self._ranked) is not None else self._kept
        page = heapq.heappop(heap)[-1]
        del self._turns[page]
        return page

    def _first(self, heap: list[tuple[float, int, int, CachedPage]]) -> CachedPage | None:
        while heap and not self._valid(heap[0]):
            heapq.heappop(heap)
        return heap[0][-1] if heap else None

    def _push(self, heap: list[tuple[float, int, int, CachedPage]], rank: float, page: CachedPage) -> None:
        heapq.heappush(heap, (rank, page.last_used, self._turns[page], page))
        if len(heap) > 64 + 2 * len(self._turns):  # mostly stale: a page that is used often leaves an entry at each use
            heap[:] = filter(self._valid, heap)
            heapq.heapify(heap)

    def _valid(self, entry: tuple[float, int, int, CachedPage]) -> bool:
        *_, turn, page = entry
        return self._turns.get(page) == turn
