"""What each multiprocessor runs of FlashInfer's FlashAttention-3: tiles of 128 queries of a head, one after another.

FlashInfer makes these lists in a compiled planner, tile by tile with a heap: 0.4 us each, a millisecond for 20,000
prompt tokens with 16 heads, before the device may begin. Here they follow from rules that leave nothing to search for,
so that the device makes them itself; and they come out more even, since tiles of all requests are sorted by their cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from widebeam.model.planning import ANOTHER_WAY, DeviceArrays

TILES = {64: 192}
"""Queries of a tile by head size; 128 for others."""
INDPTR = 6
"""Place among the lists of where each multiprocessor's tiles begin; all others have an element for each tile."""


class Shape(NamedTuple):
    """What stays the same from plan to plan."""

    heads: int
    tile: int
    """Most queries of a tile."""
    causal: bool
    processors: int


def work_lists(rows: np.ndarray, keys: np.ndarray, lengths: np.ndarray, shape: Shape) -> list[np.ndarray]:
    """int32 each, in the kernel's order: number of the tile in its request, where the request's queries and its keys
    (or pages) begin, how many of each it has, the head, where each multiprocessor's tiles begin and the last one's end
    [processors + 1], and the request. `rows`, `keys` and `lengths` as in `Planner.plan`; if causal, no request has
    more queries than keys.

    Tiles are dealt out in turns, upwards and then downwards, those that see most keys first and each for all heads.
    """
    heads, tile, causal, processors = shape
    sizes = np.diff(rows)
    tiles = -(-sizes // tile)
    request = np.repeat(np.arange(len(sizes), dtype=np.int32), tiles)
    number = np.arange(len(request), dtype=np.int32) - (tiles.cumsum() - tiles)[request]
    seen = lengths[request]
    if causal:
        seen = np.minimum(seen - sizes[request] + (number + 1) * tile, seen)
    order = np.argsort(-seen, kind="stable")
    turn, place = np.divmod(np.arange(len(order) * heads), processors)
    place = np.where(turn % 2, processors - 1 - place, place)
    rank, head = np.divmod(np.arange(len(order) * heads), heads)
    taken = np.lexsort((rank, head, place))  # head by head, as all multiprocessors do: these keys are in the cache
    work, head = order[rank[taken]], head[taken]
    request = request[work]
    begins = np.concatenate(([0], np.bincount(place, minlength=processors).cumsum()))
    lists = number[work], rows[request], keys[request], sizes[request], lengths[request], head, begins, request
    return [each.astype(np.int32, copy=False) for each in lists]


class ListPlanner:
    """`planning.Planner` of a wrapper that runs FlashAttention-3: the device makes the lists, from the same arrays."""

    def __init__(
        self, wrapper: Any, arrays: DeviceArrays, heads: int, head_dim: int, *, causal: bool, processors: int
    ) -> None:
        self._wrapper, self._arrays = wrapper, arrays
        self._shape = Shape(heads, TILES.get(head_dim, 128), causal, processors)
        self._learned: tuple[Tensor, Tensor] | None = None
        """The workspace as int32, and where each list begins in it."""

    def plan(
        self, first: Callable[[], None], rows: np.ndarray, keys: np.ndarray, lengths: np.ndarray, *others: np.ndarray
    ) -> None:
        """As `planning.Planner.plan`."""
        if self._learned is None:
            first()
            begins = self._learn(work_lists(rows, keys, lengths, self._shape))
            room = self._wrapper._int_workspace_buffer.view(torch.int32)
            self._learned = room, torch.tensor(begins, dtype=torch.int32, device=room.device)
            return
        self._arrays.send((rows, keys, lengths, *others))
        most = int(rows[-1]) // self._shape.tile + len(lengths)
        rows_, keys_, lengths_, *_ = self._arrays.views
        write_lists(*self._learned, rows_, keys_, lengths_, most, self._shape)

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


def write_lists(
    room: Tensor, begins: Tensor, rows: Tensor, keys: Tensor, lengths: Tensor, most: int, shape: Shape
) -> None:
    """`work_lists` of arrays on the device, `most` tiles at most, each list from its begin in the int32 room on."""
    if room.is_cuda:
        from widebeam.model.work_lists_triton import write_lists as write

        write(room, begins, rows, keys, lengths, most, *shape)
        return
    lists = work_lists(rows.numpy(), keys.numpy(), lengths.numpy(), shape)
    for begin, each in zip(begins.tolist(), lists, strict=True):
        room[begin : begin + len(each)] = torch.from_numpy(each)


def tiles_of(lists: Sequence[np.ndarray]) -> np.ndarray:
    """All tiles [tiles, 7] in an order that is the same whoever runs them."""
    columns = [each for place, each in enumerate(lists) if place != INDPTR]
    return np.stack(columns, axis=1)[np.lexsort(columns)]
