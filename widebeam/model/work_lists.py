"""What each multiprocessor runs of FlashInfer's FlashAttention-3: tiles of 128 queries of a head, one after another.

FlashInfer makes these lists in a compiled planner, tile by tile with a heap: 0.4 us each, a millisecond for 20,000
prompt tokens with 16 heads, before the device may begin. Heads are alike, so that here they are made for all heads at
once; and come out more even, since tiles of all requests are sorted by what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from widebeam.model.planning import ANOTHER_WAY, DeviceArrays

TILES = {64: 192}
"""Queries of a tile by head size; 128 for others."""
LAST = 2
"""Heads that level out what the others leave uneven."""
INDPTR = 6
"""Place among the lists of where each multiprocessor's tiles begin; all others have an element for each tile."""


def work_lists(
    rows: np.ndarray, keys: np.ndarray, lengths: np.ndarray, heads: int, tile: int, causal: bool, processors: int
) -> list[np.ndarray]:
    """int32 each, in the kernel's order: number of the tile in its request, where the request's queries and its keys
    (or pages) begin, how many of each it has, the head, where each multiprocessor's tiles begin and the last one's end
    [processors + 1], and the request. `rows`, `keys` and `lengths` as in `Planner.plan`."""
    sizes = np.diff(rows)
    tiles = -(-sizes // tile)
    request = np.repeat(np.arange(len(sizes), dtype=np.int32), tiles)
    number = np.arange(len(request), dtype=np.int32) - (tiles.cumsum() - tiles)[request]
    seen = lengths[request]
    if causal:
        seen = np.clip(seen - sizes[request] + (number + 1) * tile, 0, seen)
    cost = 2 * tile + seen
    order = np.argsort(-cost, kind="stable")
    place = assign(cost[order], heads, processors).ravel()
    taken = np.argsort(place, kind="stable")  # head by head, as all multiprocessors do: these keys are in the cache
    head, rank = np.divmod(taken, max(len(order), 1))
    work = order[rank]
    request = request[work]
    begins = np.concatenate(([0], np.bincount(place, minlength=processors).cumsum()))
    lists = number[work], rows[request], keys[request], sizes[request], lengths[request], head, begins, request
    return [each.astype(np.int32, copy=False) for each in lists]


def assign(cost: np.ndarray, heads: int, processors: int) -> np.ndarray:
    """Multiprocessor of each tile of each head, int16 [heads, tiles], given what tiles cost, the largest first.

    Each pair of heads goes round the multiprocessors upwards and downwards, and begins where the one before did, moved
    by the pair's part of the way round: each multiprocessor gets tiles from everywhere in the order. The last heads'
    go to whichever has least, the largest first (LPT, Graham 1969).
    """
    head, rank = np.arange(heads)[:, None], np.arange(len(cost))
    place = (np.where(head % 2, -1 - rank, rank) + head // 2 * 2 * processors // heads) % processors
    first, last = place[:-LAST], place[-LAST:].T
    load = np.bincount(first.ravel(), np.broadcast_to(cost, first.shape).ravel(), processors)
    for begin in range(0, len(cost), processors // LAST):
        some = last[begin : begin + processors // LAST]
        least = np.argsort(load, kind="stable")[: some.size]
        some[:] = least.reshape(some.shape)
        load[least] += np.repeat(cost[begin : begin + len(some)], some.shape[1])
    return place.astype(np.int16)


class ListPlanner:
    """`planning.Planner` of a wrapper that runs FlashAttention-3: the same arrays, and lists of its own."""

    def __init__(
        self, wrapper: Any, arrays: DeviceArrays, heads: int, head_dim: int, *, causal: bool, processors: int
    ) -> None:
        self._wrapper, self._arrays = wrapper, arrays
        self._shape = heads, TILES.get(head_dim, 128), causal, processors
        self._begins: list[int] | None = None
        """Where each list begins in the workspace, in elements."""

    def plan(
        self, first: Callable[[], None], rows: np.ndarray, keys: np.ndarray, lengths: np.ndarray,
        arrays: Sequence[np.ndarray],
    ) -> None:  # fmt: skip
        """As `planning.Planner.plan`."""
        lists = work_lists(rows, keys, lengths, *self._shape)
        if self._begins is None:
            first()
            self._begins = self._learn(lists)
            return
        self._arrays.send(arrays)
        pinned, device = self._wrapper._pin_memory_int_workspace_buffer, self._wrapper._int_workspace_buffer
        host = pinned.numpy().view(np.int32)
        for begin, each in zip(self._begins, lists, strict=True):
            host[begin : begin + len(each)] = each
        end = 4 * max(begin + len(each) for begin, each in zip(self._begins, lists, strict=True))
        device[:end].copy_(pinned[:end], non_blocking=True)

    def _learn(self, lists: list[np.ndarray]) -> list[int]:
        """Where the wrapper's own method has put its lists. Raises RuntimeError unless they are of the same tiles."""
        places = [*map(int, self._wrapper._plan_info)]
        if len(places) != len(lists) + 1 or places[-1]:  # the last one: heads share the lists
            raise RuntimeError(ANOTHER_WAY)
        begins = [place // 4 for place in places[:-1]]
        host = self._wrapper._pin_memory_int_workspace_buffer.numpy().view(np.int32)
        found = [host[begin : begin + len(each)] for begin, each in zip(begins, lists, strict=True)]
        same = np.array_equal(tiles_of(found), tiles_of(lists)) and found[INDPTR][-1] == lists[INDPTR][-1]
        if not same:
            raise RuntimeError(ANOTHER_WAY)
        return begins


def tiles_of(lists: Sequence[np.ndarray]) -> np.ndarray:
    """All tiles [tiles, 7] in an order that is the same whoever runs them."""
    columns = [each for place, each in enumerate(lists) if place != INDPTR]
    return np.stack(columns, axis=1)[np.lexsort(columns)]
