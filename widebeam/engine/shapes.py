"""The shape ladder: which sizes exist, so that few shapes serve every wave. Imports no torch.

What differs between waves is data where possible (lengths, widths, how rows divide among requests) and otherwise a
rung: the number of rows, of requests, of decoded tokens, of candidates. No rung is 0 or 1, which a compiler would take
for a constant.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from widebeam.engine.request import Normalizer

LEAST_ROWS = 16
REQUEST_RUNGS = (16, 64, 256)
DEPTH_RUNGS = (8, 32, 128, 512)
GROUP_TOKENS = 20_480
"""Prompt tokens that go through the network together."""
COMMON_TOKENS = 8192
"""Up to here there are few numbers of prompt tokens, and kernels so short that only a graph launches them in time."""
TILE = 160
LARGE_STEP = 8 * TILE
"""Between the larger numbers of prompt tokens behind prefixes that have graphs."""
CONTEXT_SPLITS, SPLIT_ROWS, SPLIT_CONTEXT = (1, 4), 384, 2048


Size = tuple[int, int, int]
"""Of prompts that a graph is for: rungs of requests and of prompt tokens, and in how many parts attention cuts prefixes
that are used again, 0 if none is."""


class LevelShape(NamedTuple):
    """Everything about one level that is not data. Two levels of equal shape run the same code on the same sizes."""

    requests: int
    """B, requests in the wave, padded."""
    rows_in: int
    """R, places of rows whose children are candidates: beams, or the prompts themselves at level 0."""
    rows_out: int
    """Places for the next level's rows; 0 at the last level."""
    finished: int
    """F, finished sequences that the wave can return."""
    depth: int
    """J, decoded tokens that a row can look back on."""
    candidates: int
    """With a catalog, slots for the children of all rows; without one, columns of the vocabulary that are looked at."""
    ranked: int
    """P, candidates that are put in order: the best of each request that can matter."""
    codes: int
    """C, codes of the level's codebook, padded; 0 without a catalog."""
    normalizer: Normalizer
    finishing: bool
    """Some sequence may end at this level."""
    stops: bool
    """Some request has stop tokens."""

    @property
    def path_columns(self) -> int:
        """Columns of BeamPath in use: the tokens looked back on, and the one chosen now."""
        return 2 * self.depth


def rung(size: int, limit: int | None = None) -> int:
    """The next size of the ladder 16, 24, 32, 48, 64, .., never beyond `limit`: at most a third is padding."""
    size = max(size, LEAST_ROWS)
    power = 1 << (size - 1).bit_length()
    padded = power * 3 // 4 if size <= power * 3 // 4 else power
    return padded if limit is None else min(padded, limit)


def candidate_rung(size: int) -> int:
    """The next power of two: catalogs differ, and slots that hold nothing cost little."""
    return 1 << (max(size, LEAST_ROWS) - 1).bit_length()


def code_rung(codes: int) -> int:
    """The next multiple of 256: a catalog may get a few more codes, and the usual sizes are such multiples."""
    return -(-codes // 256) * 256


def token_rung(tokens: int) -> int:
    """The next number of prompt tokens that a graph is captured for: steps of a sixteenth at most, or 128; and beyond
    COMMON_TOKENS, where each token more costs most, of 160.

    On an H200 cuBLAS is fastest with 160 rows to a tile, and takes other kernels where they do not come out even: 4 x
    5000 tokens took 110 ms of prefill as 20,000 rows and 114 as 20,032 or 20,096.
    """
    step = max(128, 1 << max(0, (tokens - 1).bit_length() - 4)) if tokens <= COMMON_TOKENS else TILE
    return -(-tokens // step) * step


def token_rungs(limit: int) -> list[int]:
    """All rungs of prompt tokens, the last one cut to the limit."""
    rungs = [token_rung(1)]
    while rungs[-1] < limit:
        rungs.append(token_rung(rungs[-1] + 1))
    return [min(tokens, limit) for tokens in rungs]


def request_rung(requests: int) -> int:
    """The next number of requests in a wave: coarse, since a request that is not there costs next to nothing."""
    return REQUEST_RUNGS[bisect_left(REQUEST_RUNGS, requests)]


def context_splits(rows: int, shortest_context: int) -> int:
    """In how many parts attention over the contexts runs: few rows over long contexts would leave the device idle.

    Measured on an H200 with 16 query heads: 256 rows over 5000 tokens take 44 us in four parts, 84 in one; at four
    times the rows, or at 1000 tokens, parts gain nothing.
    """
    return CONTEXT_SPLITS[rows <= SPLIT_ROWS and shortest_context >= SPLIT_CONTEXT]


def depth_rung(decoded: int) -> int:
    """The next number of decoded tokens that a row can look back on."""
    return DEPTH_RUNGS[bisect_left(DEPTH_RUNGS, decoded)]
