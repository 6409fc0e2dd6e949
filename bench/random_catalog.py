"""Write a parquet catalog of random SIDs over consecutive token ids.

python bench/random_catalog.py /tmp/items.parquet --items 1000000 --levels 3 --codes 8192 --first-token 100000
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_catalog(path: Path, items: int, levels: int, codes: int, first_token: int) -> Path:
    """`items` rows of distinct uniform SIDs, from a fixed seed; level l owns tokens first_token + l * codes onwards."""
    drawn = np.random.default_rng(0).integers(0, codes, (items, levels))
    tokens = np.unique(drawn, axis=0) + first_token + np.arange(levels) * codes
    sids = pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel()), levels)
    pq.write_table(pa.table({"item_id": np.arange(len(tokens)), "sid": sids}), path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--codes", type=int, default=8192)
    parser.add_argument("--first-token", type=int, default=100_000)
    chosen = parser.parse_args()
    print(write_catalog(chosen.path, chosen.items, chosen.levels, chosen.codes, chosen.first_token))
