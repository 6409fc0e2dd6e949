"""In how many items two versions differ, against dictionaries."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.constraints.catalog_files import write_jsonl
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.difference import Difference, difference

SIDS = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
ITEMS = st.dictionaries(st.integers(1, 12), SIDS, min_size=1)


@given(ITEMS, ITEMS, st.sampled_from([int, str]), st.sampled_from([int, str]))
@settings(max_examples=60)
def test_what_came_changed_and_went(
    tmp_path_factory: pytest.TempPathFactory, old: dict[int, tuple[int]], new: dict[int, tuple[int]],
    kind: type, other_kind: type,
) -> None:  # fmt: skip
    """Ids as numbers and as texts, SIDs of several depths, codebooks of their own."""
    folder: Path = tmp_path_factory.getbasetemp()
    before, after = (
        Catalog.load(write_jsonl(folder / "x.jsonl", [{"item_id": of(key), "sid": sid} for key, sid in items.items()]))
        for items, of in ((old, kind), (new, other_kind))
    )
    both = old.keys() & new.keys()
    wanted = Difference(len(new) - len(both), sum(old[key] != new[key] for key in both), len(old) - len(both))
    assert difference(before, after) == wanted
    assert difference(None, after) == (len(new), 0, 0) and difference(before, None) == (0, 0, len(old))
