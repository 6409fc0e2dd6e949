"""The shape ladder: which sizes exist, so that few shapes serve every wave. Imports no torch.

What differs between waves is data where possible (lengths, widths, how rows divide among requests) and otherwise a rung:
the number of rows, of requests, of decoded tokens, of candidates.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from widebeam.engine.request import Normalizer

DEPTH_RUNGS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


class LevelShape(NamedTuple):
    """Everything about one level that is not data. Two levels of equal shape run the same code on the same sizes."""

    requests: int
    """B, requests in the wave, padded."""
    rows_in: int
    """R, rows whose children are candidates: beams, or the prompts themselves at level 0."""
    rows_out: int
    """Rows of the next level; 0 at the last."""
    finished: int
    """F, finished sequences that the wave can return."""
    depth: int
    """J, decoded tokens that a row can look back on."""
    candidates: int
    """With a catalog M, candidate slots in all; without one K, best tokens offered by each row."""
    normalizer: Normalizer
    constrained: bool
    """Only children in the catalog are candidates."""
    finishing: bool
    """Some sequence may end at this level."""
    stops: bool
    """Some request has stop tokens."""

    @property
    def path_columns(self) -> int:
        """Columns of BeamPath in use: the tokens looked back on, and the one chosen now."""
        return 2 * self.depth


def rung(size: int, limit: int | None = None) -> int:
    """The next size of the ladder 1, 2, 3, 4, 6, 8, 12, 16, 24, .., never beyond `limit`: at most a third is padding."""
    if size <= 2:
        return max(size, 1)
    power = 1 << (size - 1).bit_length()
    padded = power * 3 // 4 if size <= power * 3 // 4 else power
    return padded if limit is None else min(padded, limit)


def depth_rung(decoded: int) -> int:
    """The next number of decoded tokens that a row can look back on."""
    return DEPTH_RUNGS[bisect_left(DEPTH_RUNGS, decoded)]
