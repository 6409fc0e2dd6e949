"""Write a parquet catalog of random SIDs over consecutive token ids.

python bench/random_catalog.py /tmp/items.parquet --items 1000000 --levels 3 --codes 8192 --first-token 100000
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.codebooks import Codebook
from widebeam.constraints.header import Header
from widebeam.constraints.index import CatalogIndex
from widebeam.constraints.item_ids import ItemIds
from widebeam.constraints.markers import Markers
from widebeam.constraints.order import rank_of
from widebeam.constraints.rows import ArrowColumns

GROUPS = 100
"""Values of the metadata column `group`, which filters can ask for: each is a hundredth of the items."""


def random_sids(items: int, levels: int, codes: int) -> np.ndarray:
    """int32 [at most items, levels]: `items` uniform SIDs less those drawn twice, from a fixed seed, in no order.

    `codes ** levels` must fit in int64: SIDs are told apart as numbers, as sorting rows would take minutes.
    """
    rng = np.random.default_rng(0)
    place = codes ** np.arange(levels)[::-1]
    numbers = np.sort(rng.integers(0, codes, (items, levels)) @ place)
    numbers = rng.permutation(numbers[np.append(True, numbers[1:] != numbers[:-1])])
    sids = np.empty((len(numbers), levels), np.int32)
    for level in range(levels):
        sids[:, level] = numbers // place[level] % codes
    return sids


def skewed_sids(codes: int) -> np.ndarray:
    """int32 [2 * codes - 1, 3]: one first code with all second codes behind it, the others with one each."""
    wide = [(0, second, 0) for second in range(codes)]
    return np.array(wide + [(first, 0, 0) for first in range(1, codes)], np.int32)


def make_catalog(sids: np.ndarray, codes: int, first_token: int) -> Catalog:
    """A catalog of these SIDs without a file: level l owns tokens first_token + l * codes onwards; item i has id i."""
    index, order = CatalogIndex.build(sids)
    numbers = np.arange(codes)
    starts = first_token + np.arange(sids.shape[1]) * codes
    return Catalog(
        name="random",
        version=1,
        index=index,
        codebooks=[Codebook(start + numbers, start + numbers, declared=True, resolved=True) for start in starts],
        header=Header(),
        header_place=None,
        sid_form="token_ids",
        markers=Markers(),
        format="parquet",
        sid_lengths=frozenset({sids.shape[1]}),
        source="arrays",
        made_at=0.0,
        _ids=ItemIds(np.arange(len(sids))),
        _metadata=ArrowColumns(pa.table({"group": groups(len(sids))})),
        _codes=np.ascontiguousarray(sids[order].T),
        _order=order,
        _rank=rank_of(order, order.size),
        _place=np.arange(order.size),
    )


def write_catalog(path: Path, items: int, levels: int, codes: int, first_token: int) -> Path:
    """A parquet file of the same items."""
    sids = random_sids(items, levels, codes)
    tokens = sids.astype(np.int64) + first_token + np.arange(levels) * codes
    column = pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel()), levels)
    pq.write_table(pa.table({"item_id": np.arange(len(sids)), "sid": column, "group": groups(len(sids))}), path)
    return path


def groups(items: int) -> np.ndarray:
    """The column `group`, int16 [items]."""
    return (np.arange(items) % GROUPS).astype(np.int16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--codes", type=int, default=8192)
    parser.add_argument("--first-token", type=int, default=100_000)
    chosen = parser.parse_args()
    print(write_catalog(chosen.path, chosen.items, chosen.levels, chosen.codes, chosen.first_token))
