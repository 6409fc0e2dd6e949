"""Filters of a request against a plain reading of the same items, and their masks against a recount."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.constraints import strategies
from tests.constraints.catalog_files import write_header, write_jsonl, write_parquet
from tests.constraints.filter_oracle import passes, predicate
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filter_spec import Filters, Predicate
from widebeam.constraints.filters import ItemMask, allowed_items
from widebeam.constraints.item_ids import INT64

NAMED = {
    "cheap": [{"column": "price", "op": "<=", "value": 2}, {"column": "price", "op": ">=", "value": 0}],
    "stocked": [{"column": "stock", "op": "==", "value": True}],
    "anything": [],
}
PREDICATES = {name: msgspec.convert(value, tuple[Predicate, ...]) for name, value in NAMED.items()}
COLUMNS = {
    "price": st.none() | st.integers(-3, 5),
    "rating": st.none() | st.sampled_from([0.0, 0.5, 2.25, 4.0]),
    "title": st.none() | st.sampled_from(["", "ant", "Ant", "bee", "anthem", "ähre"]),
    "stock": st.none() | st.booleans(),
    "tags": st.none() | st.lists(st.sampled_from(["x", "y", "zz"]), max_size=3),
}


@st.composite
def predicates(draw: st.DrawFn) -> Predicate:
    column = draw(st.sampled_from(list(COLUMNS)))
    if column == "tags":
        return predicate(column, "contains", draw(st.sampled_from(["x", "y", "z"])))
    ops = (
        ["==", "!=", "in", "not_in"] + ["<", "<=", ">", ">="] * (column != "stock") + ["contains"] * (column == "title")
    )
    op = draw(st.sampled_from(ops))
    some = COLUMNS[column].filter(lambda value: value is not None)
    if column in ("price", "rating"):
        some |= st.sampled_from([1, 0.5, -2.0, 2**40])
    return predicate(column, op, draw(st.lists(some, max_size=3).map(tuple) if op in ("in", "not_in") else some))


@st.composite
def requests(draw: st.DrawFn, ids: list[int | str]) -> Filters:
    """Integers beyond 64 bits are sent as text."""
    ids = [key if isinstance(key, str) or key in INT64 else str(key) for key in ids]
    known = st.sampled_from(ids)
    some = st.lists(known | known.map(str) | st.sampled_from([-77, "nobody", "007"]), max_size=8).map(tuple)
    return Filters(
        allow=draw(st.none() | some | st.just(tuple(ids[::2]))),
        deny=draw(st.none() | some),
        where=draw(st.none() | st.lists(predicates(), max_size=3).map(tuple)),
        named=draw(st.none() | st.lists(st.sampled_from(list(NAMED)), max_size=2).map(tuple)),
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@given(data=st.data())
def test_allowed_are_the_items_that_pass(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    ids = (
        strategies.ITEM_IDS if suffix == ".jsonl" else data.draw(st.sampled_from([st.integers(-9, 9), st.text("ab1")]))
    )
    items = [(key, sid) for key, sid in data.draw(strategies.items(ids=ids)) if key != ""] or [(1, [2])]
    metadata = {str(key): {name: data.draw(values) for name, values in COLUMNS.items()} for key, _ in items}
    header: dict[str, Any] = {"filters": NAMED}
    if data.draw(st.booleans()):
        header["order"] = {"column": "price", "descending": True}
    folder = tmp_path_factory.mktemp("filters")
    rows = [{"item_id": key, "sid": sid, **metadata[str(key)]} for key, sid in items]
    write_header(folder, header)
    if suffix == ".jsonl":
        catalog = Catalog.load(write_jsonl(folder / "items.jsonl", rows))
    else:
        catalog = Catalog.load(
            write_parquet(folder / "items.parquet", rows, row_group_size=data.draw(st.integers(1, 9)))
        )
    for filters in data.draw(st.lists(requests([key for key, _ in items]), min_size=1, max_size=4)):
        mask, warnings = allowed_items(catalog, filters)
        passing = [key for key, _ in items if passes(key, metadata[str(key)], filters, PREDICATES)]
        allowed = np.flatnonzero(mask.allows(np.arange(catalog.num_items)))
        assert sorted(str(catalog.item_id(row)) for row in allowed) == sorted(map(str, passing))
        assert mask.num_allowed == len(passing)
        expected = ["the filters leave no item"] if not passing else []
        for field, listed in (("deny", filters.deny), ("allow", filters.allow)):
            unknown = [key for key in listed or () if str(key) not in metadata]
            if unknown:
                noun, verb = ("item", "is") if len(unknown) == 1 else ("items", "are")
                text = f"{len(unknown)} {noun} of filters.{field} {verb} not in the catalog: {unknown[:5]}"
                expected.insert(0, text)
        assert warnings == expected


@given(st.integers(1, 200), st.data())
def test_counts_are_those_of_a_recount(num_items: int, data: st.DataObject) -> None:
    bits = np.array(data.draw(st.lists(st.booleans(), min_size=num_items, max_size=num_items)), np.uint8)
    mask = ItemMask.of_bits(bits)
    check_mask(mask, bits)
    rows = np.array(data.draw(st.lists(st.integers(0, num_items - 1), max_size=20)), np.int32)
    chosen = np.zeros(num_items, np.uint8)
    chosen[rows] = 1
    check_mask(ItemMask.of_rows(rows, num_items), chosen)
    check_mask(mask.without(rows), bits & (1 - chosen))
    check_mask(mask & ItemMask.of_rows(rows, num_items), bits & chosen)
    check_mask(ItemMask.everything(num_items), np.ones(num_items, np.uint8))


def check_mask(mask: ItemMask, bits: np.ndarray) -> None:
    """Everything that a mask says, against the same bits one by one."""
    num_items = bits.size
    spelled = [int(mask.words[row // 64]) >> (row % 64) & 1 for row in range(64 * mask.words.size)]
    assert spelled == bits.tolist() + [0] * (-num_items % 64)
    assert mask.before.tolist() == [sum(spelled[: 64 * word]) for word in range(mask.words.size + 1)]
    assert (mask.words.dtype, mask.before.dtype) == (np.uint64, np.int32)
    assert mask.num_allowed == sum(spelled)
    assert mask.allows(np.arange(num_items)).tolist() == [bool(bit) for bit in bits]
    assert [bool(mask.allows(row)) for row in (0, num_items - 1)] == [bool(bits[0]), bool(bits[-1])]
    lo, hi = np.triu_indices(num_items + 1)
    sums = np.append(0, np.cumsum(bits, dtype=np.int64))
    assert np.array_equal(mask.count(lo, hi), sums[hi] - sums[lo])
    assert int(mask.count(0, num_items)) == mask.num_allowed
    for array in (mask.words, mask.before):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@given(st.lists(st.integers(-20, 230), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_deny_is_the_complement_of_allow(catalog: Catalog, ids: list[int]) -> None:
    (denied, _), (allowed, _) = (allowed_items(catalog, Filters(**{field: tuple(ids)})) for field in ("deny", "allow"))
    rows = np.arange(catalog.num_items)
    assert np.array_equal(denied.allows(rows), ~allowed.allows(rows))
    assert denied.num_allowed + allowed.num_allowed == catalog.num_items


def test_a_million_items_equal_a_recount(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    ids, price = rng.permutation(1_000_000), rng.integers(0, 1000, 1_000_000)
    sids = pa.FixedSizeListArray.from_arrays(pa.array(rng.integers(0, 200, 3_000_000)), 3)
    brand = pa.array(rng.integers(0, 90, 1_000_000)).cast(pa.string()).dictionary_encode()
    header = {b"widebeam": json.dumps({"order": {"column": "price"}}).encode()}
    table = pa.table({"item_id": ids, "sid": sids, "price": price, "brand": brand}).replace_schema_metadata(header)
    pq.write_table(table, tmp_path / "items.parquet", row_group_size=300_000)
    catalog = Catalog.load(tmp_path / "items.parquet")
    seen = rng.choice(1_000_000, 5000, replace=False)
    where = (predicate("price", "<", 500), predicate("brand", "not_in", ("7", "8")))
    mask, _ = allowed_items(catalog, Filters(where=where, deny=tuple(seen.tolist())))
    brands = np.array(brand.to_pylist())
    expected = np.sort(ids[(price < 500) & (brands != "7") & (brands != "8") & ~np.isin(ids, seen)])
    rows = np.flatnonzero(mask.allows(np.arange(1_000_000)))
    assert mask.num_allowed == rows.size == expected.size
    assert np.array_equal(np.sort(catalog.rows_of(expected.tolist())), rows)
    allowed = np.cumsum(np.append(0, mask.allows(np.arange(1_000_000))))
    lo, hi = catalog.index.item_lo, catalog.index.item_hi
    assert np.array_equal(mask.count(lo, hi), allowed[hi] - allowed[lo])
