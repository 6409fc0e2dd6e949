"""Sorted arrays with a few places changed: where rows go, and the arrays without some and with others. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Splice:
    """Takes rows out of arrays of one length and puts others in, at the speed of a copy where few rows change."""

    size: int
    """Rows afterwards."""
    place: np.ndarray
    """int64 [new rows]; where each comes to lie."""
    runs: np.ndarray
    """int64 [3, runs]: of rows that stay and lie together before and afterwards, the first, one past the last, and
    where the first comes to lie."""

    @classmethod
    def of(cls, size: int, gone: np.ndarray, at: np.ndarray) -> Splice:
        """Of arrays of `size` rows: without the rows `gone`, and with a new row before each of `at` (ascending, 0 to
        `size`). Both count as the rows lie before."""
        gone = np.unique(gone)
        cuts = np.unique(np.concatenate([[0, size], gone, gone + 1, at]).astype(np.int64))
        first, last = cuts[:-1], cuts[1:]
        stays = ~np.isin(first, gone)
        first, last = first[stays], last[stays]
        moved = first - np.searchsorted(gone, first) + np.searchsorted(at, first, side="right")
        place = at - np.searchsorted(gone, at) + np.arange(at.size)
        return cls(size - gone.size + at.size, place, np.stack((first, last, moved)))

    def apply(self, old: np.ndarray, new: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The array afterwards, in `out` if that is given; `new` has a value for each new row."""
        spliced = np.empty(self.size, old.dtype) if out is None else out
        for first, last, moved in zip(*self.runs.tolist(), strict=True):
            spliced[moved : moved + last - first] = old[first:last]
        spliced[self.place] = new
        return spliced


def equal_ranges(columns: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and one past the last of the rows that equal each wanted one, int64; the place where it belongs if none do.

    The rows of `columns`, [columns, rows], are in lexicographic order; `wanted` is [columns, wanted rows]; all are
    integers. By binary search, column after column, for all wanted rows at once.
    """
    lo = np.zeros(wanted.shape[1], np.int64)
    hi = np.full_like(lo, columns[0].size)
    for column, values in zip(columns, wanted, strict=True):
        lo, hi = _first_at_least(column, lo, hi, values), _first_at_least(column, lo, hi, values + 1)
    return lo, hi


def _first_at_least(column: np.ndarray, lo: np.ndarray, hi: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each value the first place in lo .. hi - 1, where the column ascends, that holds it or more; else hi."""
    lo, hi = lo.copy(), hi.copy()
    while (open_ := lo < hi).any():
        middle = (lo + hi) >> 1
        less = open_ & (column[np.minimum(middle, column.size - 1)] < values)
        lo = np.where(less, middle + 1, lo)
        hi = np.where(open_ & ~less, middle, hi)
    return lo
