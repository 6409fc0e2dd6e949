"""`work_lists` as one Triton kernel: nothing of it is left to the host, however many tiles there are.

A program writes the entries of one tile, one for each head. It finds the tile's rank, and how many tiles of each
multiprocessor come before each entry, by counting what the rules of `work_lists` say of all others, so that programs
need nothing of each other.

Letters: B requests.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

LEAST = 32
"""Width of the vector of requests in every program, unless there are more."""


@triton.jit
def _costlier(
    seen: tl.tensor, size_B: tl.tensor, length_B: tl.tensor, TILE: tl.constexpr, CAUSAL: tl.constexpr
) -> tl.tensor:
    """Tiles of each request that see more keys than that; they are its last ones."""
    tiles = (size_B + TILE - 1) // TILE
    if CAUSAL:
        tiles -= tl.minimum(tiles, tl.maximum(seen - length_B + size_B, 0) // TILE)
    return tl.where(length_B > seen, tiles, 0)


@triton.jit
def _before(place: tl.tensor, entries: tl.tensor, PROCESSORS: tl.constexpr) -> tl.tensor:
    """Entries of all multiprocessors before that one: of full turns, and of the last one, upwards or downwards."""
    turns, rest = entries // PROCESSORS, entries % PROCESSORS
    more = tl.where(turns % 2 == 0, tl.minimum(place, rest), tl.maximum(place + rest - PROCESSORS, 0))
    return place * turns + more


@triton.jit(do_not_specialize=["B"])
def _write(
    room: tl.tensor, begins: tl.tensor, rows: tl.tensor, keys: tl.tensor, lengths: tl.tensor, B: tl.tensor,
    HEADS: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, PROCESSORS: tl.constexpr,
    REQUESTS: tl.constexpr, WIDE_HEADS: tl.constexpr, WIDE_PROCESSORS: tl.constexpr,
) -> None:  # fmt: skip
    b = tl.arange(0, REQUESTS)
    size_B = tl.load(rows + b + 1, b < B, 0) - tl.load(rows + b, b < B, 0)
    length_B = tl.load(lengths + b, b < B, 0)
    tiles_B = (size_B + TILE - 1) // TILE
    end_B, entries = tl.cumsum(tiles_B, 0), tl.sum(tiles_B, 0) * HEADS
    mine = tl.program_id(0)
    if mine == 0:
        places = tl.arange(0, WIDE_PROCESSORS)
        tl.store(room + tl.load(begins + 6) + places, _before(places, entries, PROCESSORS), places <= PROCESSORS)

    request = tl.sum((end_B <= mine).to(tl.int32), 0)
    is_tile = request < B  # there may be fewer tiles than programs
    start, end = tl.load(rows + request, is_tile, 0), tl.load(rows + request + 1, is_tile, 0)
    size, length = end - start, tl.load(lengths + request, is_tile, 0)
    number = mine - tl.sum(tl.where(b == request, end_B - tiles_B, 0), 0)
    seen = tl.minimum(length - size + (number + 1) * TILE, length) if CAUSAL else length
    more_B = _costlier(seen, size_B, length_B, TILE, CAUSAL)
    same_B = _costlier(seen - 1, size_B, length_B, TILE, CAUSAL) - more_B
    rank = number - tl.sum(tl.where(b == request, tiles_B - more_B - same_B, 0), 0)
    rank += tl.sum(more_B, 0) + tl.sum(tl.where(b < request, same_B, 0), 0)

    head = tl.arange(0, WIDE_HEADS)
    turn, place = (rank * HEADS + head) // PROCESSORS, (rank * HEADS + head) % PROCESSORS
    place = tl.where(turn % 2 == 0, place, PROCESSORS - 1 - place)
    entry = _before(place, entries, PROCESSORS)
    for other in range(entries // PROCESSORS + 1):  # those of the same multiprocessor
        dealt = other * PROCESSORS + tl.where(other % 2 == 0, place, PROCESSORS - 1 - place)
        first = (dealt % HEADS < head) | ((dealt % HEADS == head) & (dealt // HEADS < rank))
        entry += (first & (dealt < entries)).to(tl.int32)

    there = (head < HEADS) & is_tile
    tl.store(room + tl.load(begins) + entry, number, there)
    tl.store(room + tl.load(begins + 1) + entry, start, there)
    tl.store(room + tl.load(begins + 2) + entry, tl.load(keys + request, is_tile, 0), there)
    tl.store(room + tl.load(begins + 3) + entry, size, there)
    tl.store(room + tl.load(begins + 4) + entry, length, there)
    tl.store(room + tl.load(begins + 5) + entry, head, there)
    tl.store(room + tl.load(begins + 7) + entry, request, there)


def write_lists(
    room: Tensor, begins: Tensor, rows: Tensor, keys: Tensor, lengths: Tensor,
    most: int, heads: int, tile: int, causal: bool, processors: int,
) -> None:  # fmt: skip
    """As `work_lists.write_lists`. Graphs may record it."""
    B, power = len(lengths), triton.next_power_of_2
    _write[(most,)](
        room, begins, rows, keys, lengths, B, heads, tile, causal, processors, max(LEAST, power(B)), power(heads),
        power(processors + 1), num_warps=1,
    )  # fmt: skip
