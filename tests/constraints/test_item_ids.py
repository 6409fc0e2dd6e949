"""Rows of many item ids at once, against one at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.constraints import strategies
from widebeam.constraints.item_ids import ItemIds


@given(ids=st.lists(strategies.ITEM_IDS, unique_by=str, max_size=20), asked=st.lists(strategies.ITEM_IDS, max_size=20))
def test_many_ids_are_found_as_one_is(ids: list[int | str], asked: list[int | str]) -> None:
    known = ItemIds.of(ids)
    every = [*asked, *ids, *map(str, ids), "042", "-0", 2**70]
    expected = [-1 if (row := known.find(key)) is None else row for key in every]
    assert known.find_many(every).tolist() == expected
    assert known.find_many([]).tolist() == []


def test_many_ids_are_told_apart_when_their_hashes_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widebeam.constraints.item_ids.hash", len, raising=False)
    known = ItemIds.of(["a", "bb", "c", 5, "dd", "e"])
    found = known.find_many(["dd", "e", 5, "x", "ccc", "bb", "5", "a", "yy", "e"])
    assert found.tolist() == [4, 5, 3, -1, -1, 1, 3, 0, -1, 5]
