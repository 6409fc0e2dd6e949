"""How many items two versions of a catalog differ in: for the log, where nobody wants to read them one by one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from widebeam.constraints.catalog import Catalog


class Difference(NamedTuple):
    """Numbers of items."""

    came: int
    changed: int
    went: int


def difference(before: Catalog | None, after: Catalog | None) -> Difference:
    """Between two versions, of which None has no items. An item has changed if its SID is another, as token ids."""
    if before is None or after is None:
        return Difference(after.num_items if after else 0, 0, before.num_items if before else 0)
    rows, rows_after = before._ids.matched(after._ids)
    rows, rows_after = before._rank[rows], after._rank[rows_after]
    changed = np.zeros(rows.size, bool)
    for level in range(max(before.depth, after.depth)):
        changed |= _tokens(before, level, rows) != _tokens(after, level, rows_after)
    return Difference(after.num_items - rows.size, int(changed.sum()), before.num_items - rows.size)


def _tokens(catalog: Catalog, level: int, rows: np.ndarray) -> np.ndarray:
    """int64 [rows]; token ids at a level, -1 behind a SID's end."""
    if level >= catalog.depth:
        return np.full(rows.size, -1)
    codes = catalog._codes[level, rows]
    return np.where(codes < 0, -1, catalog.codebooks[level].token_ids[codes])
