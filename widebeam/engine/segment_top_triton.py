"""`segment_top` as Triton kernels and their launcher. Nothing waits for the device; graphs may record it.

It is a radix select over 32-bit keys that rise with the score. Four passes of eight bits each count, for
every segment, the next digit of the candidates that share the digits found so far, and narrow down to the key of the
last candidate taken and to how many of that very key are taken. The last pass also leaves counts for each tile, from
which a fifth pass knows its places, so that it writes the taken in order of position. A sixth ranks them by comparing
each with each of its segment: few are taken, so that this beats a sort. Launches are what separates the passes; within
one, programs meet only in integer additions, whose order does not matter.

A tile is a piece of one segment, one for each program. Kernels are specialised on no size, so that calls of any shape
run what the first one compiled.

Letters: as in `segment_top`; T tiles.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from widebeam.engine import segment_top as plain

MOST = tl.constexpr(plain.MOST)
BLOCK = tl.constexpr(2048)
"""Positions that a program holds at once. Two counts up to this share the halves of an int32."""
BINS = tl.constexpr(256)
LAST = tl.constexpr(0x7FFFFFFF)
"""The last position that 31 bits hold."""
DEAD = tl.constexpr(0x007FFFFF)
"""Key of -inf."""
SIGN = tl.constexpr(0x80000000)
RANKED = tl.constexpr(32)
"""Survivors that a program ranks, against so many at a time:"""
AGAINST = tl.constexpr(128)

MOST_TILES = 1024
"""Tiles are made longer rather than more of them, except that each segment has its own: a program adds up the counts
of those before its own, and all add to the same few bins."""
SEGMENTS = 512
"""Width of the vector of segments in every program, unless there are more."""


@triton.jit
def _tile_of(program: tl.tensor, length: tl.tensor, tile: tl.tensor) -> tl.tensor:
    """(segment of the program's tile, first tile of that segment); segments have these lengths, int32.

    The segment is past the end if there are fewer tiles than programs.
    """
    tiles = (length + tile - 1) // tile
    before = tl.cumsum(tiles, 0) <= program
    return tl.sum(before.to(tl.int32), 0), tl.sum(tl.where(before, tiles, 0), 0)


@triton.jit
def _positions(program: tl.tensor, start: tl.tensor, B: tl.tensor, tile: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """(segment, its first tile, the tile's first position, and past its last); nothing for programs without a tile."""
    index = tl.arange(0, WIDTH)
    begin, end = tl.load(start + index, index < B, 0), tl.load(start + index + 1, index < B, 0)
    segment, first = _tile_of(program, (end - begin).to(tl.int32), tile)
    low = tl.load(start + segment, segment < B, 0).to(tl.int32) + (program - first) * tile
    high = tl.load(start + segment + 1, segment < B, 0).to(tl.int32)
    return segment, first, low, tl.minimum(low + tile, high)


@triton.jit
def _segment_places(limit: tl.tensor, B: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """(places of each segment, the first of them), int64 [WIDTH]."""
    index = tl.arange(0, WIDTH)
    places = tl.minimum(tl.load(limit + index, index < B, 0), MOST)
    return places, tl.cumsum(places, 0) - places


@triton.jit
def _keys(score: tl.tensor, position: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """(uint32 that rises with the score, is it there and alive)."""
    bits = tl.load(score + position, mask, 0.0).to(tl.uint32, bitcast=True)
    bits = tl.where(bits == SIGN, 0, bits)  # -0.0 and 0.0 are one score
    key = bits ^ tl.where(bits >= SIGN, 0xFFFFFFFF, SIGN)
    return key, mask & (key > DEAD)


@triton.jit
def _narrow(histogram: tl.tensor, prefix: tl.tensor, need: tl.tensor) -> tl.tensor:
    """(prefix with the digit of the candidate number `need`, how many are needed of those who share it).

    Digit 0 if there are not so many candidates: in the end the prefix is then 0, a key that nobody living has, and all
    are above it.
    """
    bins = tl.arange(0, BINS)
    count = tl.load(histogram + bins)
    at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    digit = tl.maximum(tl.sum((at_least >= need).to(tl.int32), 0) - 1, 0)
    return (prefix << 8) | digit, need - tl.sum(tl.where(bins > digit, count, 0), 0)


@triton.jit(
    do_not_specialize=["B", "size", "tile"],
    do_not_specialize_on_alignment=["score", "start", "limit", "histogram"],
)
def _count(
    score: tl.tensor, start: tl.tensor, limit: tl.tensor, order: tl.tensor, real: tl.tensor,
    histogram: tl.tensor, state: tl.tensor, table: tl.tensor, B: tl.tensor, size: tl.tensor, tile: tl.tensor,
    LEVEL: tl.constexpr, BY_POSITION: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Add a tile's digits number LEVEL to `histogram` [4, B, BINS], of candidates with the prefix found so far.

    `state` [3, B, 2] is the prefix of LEVEL digits, and how many are needed of those who have it. `table` [T, BINS] is
    written by the last level: how many of the tile have each key in the low half, and how many a higher one in the high
    half. The first level also clears the result.
    """
    program = tl.program_id(0)
    lane, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    if LEVEL == 0:
        for at in range(program * BLOCK, size, tl.num_programs(0) * BLOCK):
            tl.store(order + at + lane, tl.zeros([BLOCK], tl.int64), at + lane < size)
            tl.store(real + at + lane, tl.zeros([BLOCK], tl.int1), at + lane < size)
    segment, first, low, high = _positions(program, start, B, tile, WIDTH)
    if segment < B:
        if LEVEL > 0:
            if LEVEL == 1:
                prefix = 0
                places, begin = _segment_places(limit, B, WIDTH)
                if not BY_POSITION:  # the worst are those dropped, so they need not be found
                    places = tl.maximum(tl.minimum(places, size - begin), 0)
                mine = tl.sum(tl.where(tl.arange(0, WIDTH) == segment, places, 0), 0)
                need = tl.minimum(mine, LAST).to(tl.int32)
            else:
                found = state + ((LEVEL - 2) * B + segment) * 2
                prefix, need = tl.load(found), tl.load(found + 1)
            prefix, need = _narrow(histogram + ((LEVEL - 1) * B + segment) * BINS, prefix, need)
            if program == first:
                tl.store(state + ((LEVEL - 1) * B + segment) * 2, prefix)
                tl.store(state + ((LEVEL - 1) * B + segment) * 2 + 1, need)
        count = tl.zeros([BINS], tl.int32)
        above = tl.zeros([BLOCK], tl.int32)
        for at in range(low, high, BLOCK):
            key, chosen = _keys(score, at + lane, at + lane < high)
            if LEVEL > 0:
                lead = (key >> (32 - 8 * LEVEL)).to(tl.int32)
                above += (chosen & (lead > prefix)).to(tl.int32)
                chosen = chosen & (lead == prefix)
            if tl.max(chosen.to(tl.int32), 0) > 0:  # rare in later levels; a histogram costs more than all the rest
                digit = ((key >> (24 - 8 * LEVEL)) & (BINS - 1)).to(tl.int32)
                count += tl.histogram(digit, BINS, chosen)
        tl.atomic_add(histogram + (LEVEL * B + segment) * BINS + bins, count, count > 0, sem="relaxed")
        if LEVEL == 3:
            higher = tl.sum(above, 0) + tl.sum(count, 0) - tl.cumsum(count, 0)
            tl.store(table + program * BINS + bins, (higher.to(tl.int64) << 32) | count.to(tl.int64))


@triton.jit(
    do_not_specialize=["B", "size", "tile"],
    do_not_specialize_on_alignment=["score", "start", "limit", "histogram"],
)
def _take(
    score: tl.tensor, start: tl.tensor, limit: tl.tensor, order: tl.tensor, real: tl.tensor, survivor: tl.tensor,
    histogram: tl.tensor, state: tl.tensor, table: tl.tensor, B: tl.tensor, size: tl.tensor, tile: tl.tensor,
    BY_POSITION: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write the taken candidates of a tile in order of position: to the result, or to `survivor` [size] for `_rank`.

    A survivor is its key above the inverted position: the better, the larger, and none is 0.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    segment, first, low, high = _positions(program, start, B, tile, WIDTH)
    if segment < B:
        found = state + (2 * B + segment) * 2
        last, need = _narrow(histogram + (3 * B + segment) * BINS, tl.load(found), tl.load(found + 1))
        column = table + (last & (BINS - 1))
        earlier = tl.zeros([BLOCK], tl.int64)
        for at in range(first, program, BLOCK):
            earlier += tl.load(column + (at + lane) * BINS, at + lane < program, 0)
        before, mine = tl.sum(earlier, 0), tl.load(column + program * BINS)
        higher, equal = (before >> 32).to(tl.int32), (before & LAST).to(tl.int32)
        if ((mine >> 32) > 0) | (((mine & LAST) > 0) & (equal < need)):
            threshold = last.to(tl.uint32, bitcast=True)
            _, begin = _segment_places(limit, B, WIDTH)
            begin = tl.sum(tl.where(tl.arange(0, WIDTH) == segment, begin, 0), 0)
            for at in range(low, high, BLOCK):
                position = at + lane
                key, alive = _keys(score, position, position < high)
                better, same = alive & (key > threshold), alive & (key == threshold)
                both = (better.to(tl.int32) << 16) | same.to(tl.int32)
                seen = tl.cumsum(both, 0) - both
                ties = equal + (seen & 0xFFFF)
                place = begin + higher + (seen >> 16) + tl.minimum(ties, need)
                taken = (better | (same & (ties < need))) & (place < size)
                if BY_POSITION:
                    tl.store(order + place, position.to(tl.int64), taken)
                    tl.store(real + place, taken, taken)
                else:
                    tl.store(survivor + place, (key.to(tl.int64) << 31) | (position ^ LAST).to(tl.int64), taken)
                total = tl.sum(both, 0)
                higher, equal = higher + (total >> 16), equal + (total & 0xFFFF)


@triton.jit(do_not_specialize=["B", "size"], do_not_specialize_on_alignment=["limit", "survivor"])
def _rank(
    survivor: tl.tensor,
    limit: tl.tensor,
    order: tl.tensor,
    real: tl.tensor,
    B: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Put the survivors of each segment in order: each one's place is how many of its segment are better."""
    program = tl.program_id(0)
    index = tl.arange(0, WIDTH)
    places, begin = _segment_places(limit, B, WIDTH)
    places = tl.maximum(tl.minimum(places, size - begin), 0).to(tl.int32)
    segment, first = _tile_of(program, places, RANKED)
    if segment < B:
        low = tl.sum(tl.where(index == segment, begin, 0), 0).to(tl.int32)
        high = low + tl.sum(tl.where(index == segment, places, 0), 0)
        row = low + (program - first) * RANKED + tl.arange(0, RANKED)
        mine = tl.load(survivor + row, row < high, 0)
        if tl.max(mine, 0) > 0:
            better = tl.zeros([RANKED, AGAINST], tl.int32)
            for at in range(low, high, AGAINST):
                column = at + tl.arange(0, AGAINST)
                theirs = tl.load(survivor + column, column < high, 0)
                better += (theirs[None, :] > mine[:, None]).to(tl.int32)
            place = low + tl.sum(better, 1)
            tl.store(order + place, (mine & LAST) ^ LAST, mine > 0)
            tl.store(real + place, mine > 0, mine > 0)


def segment_top(score: Tensor, start: Tensor, limit: Tensor, size: int, by_position: bool) -> tuple[Tensor, Tensor]:
    """As the plain op."""
    M, B = score.shape[0], limit.shape[0]
    order, real = score.new_empty(size, dtype=torch.int64), score.new_empty(size, dtype=torch.bool)
    if not (M and B and size):
        return order.zero_(), real.zero_()
    tile = BLOCK.value * triton.cdiv(M, BLOCK.value * MOST_TILES)
    T = triton.cdiv(M, tile) + B
    kept = 0 if by_position else size
    zeros = order.new_zeros(kept + 4 * B * BINS.value // 2)
    survivor, histogram = zeros[:kept], zeros[kept:].view(torch.int32)
    state = score.new_empty(3 * B * 2, dtype=torch.int32)
    table = order.new_empty(T * BINS.value)
    width = max(SEGMENTS, triton.next_power_of_2(B))
    with torch.cuda.device_of(score):
        for level in range(4):
            _count[T,](
                score, start, limit, order, real, histogram, state, table, B, size, tile,
                LEVEL=level, BY_POSITION=by_position, WIDTH=width, num_warps=8,
            )  # fmt: skip
        _take[T,](
            score, start, limit, order, real, survivor, histogram, state, table, B, size, tile,
            BY_POSITION=by_position, WIDTH=width, num_warps=8,
        )  # fmt: skip
        if not by_position:
            ranks = triton.cdiv(size, RANKED.value) + B
            _rank[ranks,](survivor, limit, order, real, B, size, WIDTH=width, num_warps=4)
    return order, real
