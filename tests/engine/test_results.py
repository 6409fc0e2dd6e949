"""From sequences to items: the order within a SID, the catalog's limit on it, and n."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.constraints.catalog_files import write_header, write_jsonl
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filters import ItemMask
from widebeam.engine.request import Sequence
from widebeam.engine.results import ranked_items

SIDS = {"a": [5, 1], "b": [5, 1], "c": [5, 1], "d": [5, 1], "e": [5, 2], "f": [6, 1], "g": [6, 1]}
SOLD = {"a": 3, "b": 9, "c": 1, "d": 7, "e": 0, "f": 2, "g": 4}
BEST_FIRST = {(6, 1): ["g", "f"], (5, 1): ["b", "d", "a", "c"], (5, 2): ["e"]}


@pytest.fixture(params=[None, 1, 2, 4, 9])
def limit(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.fixture
def catalog(tmp_path: Path, limit: int | None) -> Catalog:
    header = {"sid": "token_ids", "order": {"column": "sold", "descending": True}}
    write_header(tmp_path, header if limit is None else header | {"max_items_per_sid": limit})
    rows = [{"item_id": item, "sid": sid, "sold": SOLD[item]} for item, sid in SIDS.items()]
    return Catalog.load(write_jsonl(tmp_path / "items.jsonl", rows))


def sequences(catalog: Catalog) -> list[Sequence]:
    """One for each SID, the best first."""
    by_tokens = {tuple(catalog.token_ids(row)): row for row in range(catalog.num_items)}
    nodes = {
        tokens: next(node for node in range(catalog.index.num_nodes) if row in catalog.items_at(node))
        for tokens, row in by_tokens.items()
    }
    return [
        Sequence(
            token_ids=list(tokens), logprobs=[-1.0, 0.0], cum_logprob=-1.0 - place, score=-1.0 - place,
            finish_reason="item", node=nodes[tokens],
        )
        for place, tokens in enumerate(BEST_FIRST)
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 3, 5, 99])
@pytest.mark.parametrize("allowed", [None, "acdf"])
def test_n_counts_items_of_which_each_sid_gives_its_best(
    catalog: Catalog, limit: int | None, n: int, allowed: str | None
) -> None:
    """A filter comes before the limit: the places of a SID go to items that pass."""
    mask = None
    if allowed is not None:
        bits = np.array([catalog.item_id(row) in allowed for row in range(catalog.num_items)], np.uint8)
        mask = ItemMask.of_bits(bits)
    passing = [[item for item in items if allowed is None or item in allowed] for items in BEST_FIRST.values()]
    expected = [item for items in passing for item in items[:limit]][:n]
    found = ranked_items(catalog, sequences(catalog), n, ["sold"], mask)
    assert [item.id for item in found] == expected
    for item in found:
        assert item.sid == SIDS[str(item.id)] and item.metadata == {"sold": SOLD[str(item.id)]}
        assert item.score == -1.0 - list(BEST_FIRST).index(tuple(item.token_ids))
