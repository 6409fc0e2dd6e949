"""Filters of a request against a plain reading of the same items; ranks, the cache, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from tests.constraints.filter_oracle import passes
from widebeam.constraints import filters as module
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.catalogs import Catalogs
from widebeam.constraints.filter_spec import MAX_FILTER_IDS, MAX_PREDICATES, MAX_VALUES, Filters, Predicate
from widebeam.constraints.filters import ItemMask, MaskCache, allowed_items
from widebeam.constraints.item_ids import INT64, ItemIds
from widebeam.errors import CatalogError, InvalidRequest

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


def predicate(column: str, op: str, value: Any) -> Predicate:
    return Predicate(column=column, op=op, value=value)  # type: ignore[arg-type]


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
                text = f"{len(unknown)} items of filters.{field} are not in the catalog: {unknown[:5]}"
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


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """200 items under few SIDs, with columns of many kinds."""
    rng = np.random.default_rng(5)
    rows = [
        {
            "item_id": i,
            "sid": rng.integers(0, 4, 2).tolist(),
            "price": i % 7,
            "title": f"Title {i}",
            "mixed": [i, "a"][i % 2],
        }
        for i in range(200)
    ]
    rows[0]["deep"], rows[1]["huge"] = {"a": 1}, 2**70
    write_header(tmp_path, {"filters": {"in_stock": [{"column": "price", "op": ">", "value": 3}]}})
    return Catalog.load(write_jsonl(tmp_path / "items.jsonl", rows))


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


@given(st.lists(st.integers(-20, 230), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_deny_is_the_complement_of_allow(catalog: Catalog, ids: list[int]) -> None:
    (denied, _), (allowed, _) = (allowed_items(catalog, Filters(**{field: tuple(ids)})) for field in ("deny", "allow"))
    rows = np.arange(catalog.num_items)
    assert np.array_equal(denied.allows(rows), ~allowed.allows(rows))
    assert denied.num_allowed + allowed.num_allowed == catalog.num_items


def test_equal_conditions_share_one_mask(catalog: Catalog) -> None:
    cheap, titled = predicate("price", "<", 3), predicate("title", "contains", "1")
    both, _ = allowed_items(catalog, Filters(where=(cheap, titled)))
    assert allowed_items(catalog, Filters(where=(titled, cheap, cheap)))[0] is both
    alone, _ = allowed_items(catalog, Filters(where=(cheap,)))
    assert allowed_items(catalog, Filters(where=(cheap, cheap)))[0] is alone is not both
    stocked, _ = allowed_items(catalog, Filters(named=("in_stock",)))
    assert allowed_items(catalog, Filters(where=(predicate("price", ">", 3),)))[0] is stocked
    everything, _ = allowed_items(catalog, Filters())
    assert allowed_items(catalog, Filters(where=(), deny=()))[0] is everything
    assert everything.num_allowed == catalog.num_items
    without, _ = allowed_items(catalog, Filters(where=(cheap, titled), deny=tuple(range(200))))
    assert without.num_allowed == 0 < both.num_allowed


def test_values_that_python_calls_equal_are_told_apart(tmp_path: Path) -> None:
    rows = [{"item_id": i, "sid": [i], "flag": bool(i), "number": i} for i in range(2)]
    catalog = Catalog.load(write_jsonl(tmp_path / "items.jsonl", rows))
    assert allowed_items(catalog, Filters(where=(predicate("flag", "==", True),)))[0].num_allowed == 1
    for value in (1, 1.0):
        with pytest.raises(InvalidRequest, match="true or false"):
            allowed_items(catalog, Filters(where=(predicate("flag", "==", value),)))
    assert allowed_items(catalog, Filters(where=(predicate("number", "==", 1),)))[0].num_allowed == 1
    with pytest.raises(InvalidRequest, match="a number"):
        allowed_items(catalog, Filters(where=(predicate("number", "==", True),)))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_version_never_sees_the_masks_of_another(tmp_path: Path, suffix: str) -> None:
    write = write_jsonl if suffix == ".jsonl" else write_parquet
    filters = Filters(where=(predicate("price", "<", 3),), named=("low",))
    catalogs, versions = Catalogs(), []
    for prices, low in (([1, 2, 3, 4], 4), ([9, 9, 0, 2], 4), ([9, 9, 0, 2], 1)):
        write_header(tmp_path, {"filters": {"low": [{"column": "price", "op": "<", "value": low}]}})
        rows = [{"item_id": i, "sid": [i], "price": price} for i, price in enumerate(prices)]
        catalogs.add(catalogs.next_version(Catalog.load(write(tmp_path / f"items{suffix}", rows))))
        versions.append(catalogs.get("items"))
    for _ in range(2):
        allowed = [allowed_items(version, filters)[0].allows(np.arange(4)).tolist() for version in versions if version]
        assert allowed == [[True, True, False, False], [False, False, True, True], [False, False, True, False]]
    assert versions[2] is not None
    moved = replace(versions[2], _order=versions[2]._order[::-1].copy())
    assert allowed_items(moved, filters)[0].allows(np.arange(4)).tolist() == [False, True, False, False]


def test_the_cache_keeps_what_was_used_last() -> None:
    size = ItemMask.everything(64).nbytes
    cache, built = MaskCache(3 * size), []

    def get(name: str) -> ItemMask:
        return cache.get(name.encode(), lambda: built.append(name) or ItemMask.everything(64))

    for name in "abcabadab":
        assert get(name) is get(name)
    assert "".join(built) == "abcd"
    get("c")
    assert "".join(built) == "abcdc"
    tiny = MaskCache(size - 1)  # too small for any: built every time
    assert tiny.get(b"a", lambda: ItemMask.everything(64)) is not tiny.get(b"a", lambda: ItemMask.everything(64))


def test_threads_build_a_mask_once(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[str] = []
    real, ready = module.matches, threading.Barrier(8)

    def counted(one: Predicate, column: pa.ChunkedArray, where: str) -> np.ndarray:
        evaluated.append(f"{one.op} {one.value}")
        return real(one, column, where)

    monkeypatch.setattr(module, "matches", counted)

    def ask(number: int) -> list[ItemMask]:
        ready.wait()
        pairs = [(predicate("price", "<", (number + i) % 4), predicate("price", ">=", 0)) for i in range(4)]
        return sorted((allowed_items(catalog, Filters(where=pair))[0] for pair in pairs), key=lambda m: m.num_allowed)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(8)))
    assert sorted(evaluated) == ["< 0", "< 1", "< 2", "< 3", ">= 0"]
    assert all(mask is first for answer in answers for mask, first in zip(answer, answers[0], strict=True))
    assert [mask.num_allowed for mask in answers[0]] == [sum(i % 7 < limit for i in range(200)) for limit in range(4)]


def refused(catalog: Catalog, filters: Filters) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        allowed_items(catalog, filters)
    assert caught.value.status == 400
    return caught.value


MANY = tuple(range(MAX_FILTER_IDS + 1))


@pytest.mark.parametrize(
    ("fields", "code", "param", "message"),
    [
        (
            {"where": [("prise", "<", 3)]},
            "unknown_field",
            "where[0].column",
            "'prise' (did you mean 'price'?); it has: ",
        ),
        ({"where": [("price", "<", 3), ("item_id", "==", 3)]}, "unknown_field", "where[1].column", "'item_id'"),
        ({"where": [("price", "<", 3), ("price", "<", "3")]}, "type_mismatch", "where[1].value", "must be a number"),
        ({"where": [("price", "in", [1, "3"])]}, "type_mismatch", "where[0].value[1]", "must be a number"),
        ({"where": [("price", "contains", 1)]}, "type_mismatch", "where[0].op", "does not apply"),
        ({"where": [("mixed", "==", 1)]}, "unsupported_column", "where[0].column", "column 'mixed' has no one type"),
        ({"where": [("huge", "==", 1)]}, "unsupported_column", "where[0].column", "column 'huge' has no one type"),
        (
            {"where": [("deep", "==", 1)]},
            "unsupported_column",
            "where[0].column",
            "holds struct<a: int64>, which filters",
        ),
        (
            {"named": ["in_stock", "instock"]},
            "unknown_filter",
            "named[1]",
            "'instock' (did you mean 'in_stock'?); it has",
        ),
        (
            {"where": [("price", "like", 3)]},
            "invalid_request",
            "where[0].op",
            "filters.where[0].op: 'like' is none of: !=",
        ),
        ({"where": [("price", "<", None)]}, "invalid_request", "where[0].value", "got null"),
        ({"where": [("price", "<", float("nan"))]}, "invalid_request", "where[0].value", "got null"),
        ({"where": [("price", "in", [1.0, float("inf")])]}, "invalid_request", "where[0].value[1]", "got null"),
        ({"where": [("price", "in", [[1]])]}, "invalid_request", "where[0].value[0]", "got array"),
        ({"where": [("price", "<", 2**63)]}, "invalid_request", "where[0].value", "int <= 9223372036854775807"),
        ({"where": [("price", "<", -(2**70))]}, "invalid_request", "where[0].value", "int >= -9223372036854775808"),
        ({"where": [("price", "<", {"a": 1})]}, "invalid_request", "where[0].value", "got object"),
        ({"where": [("", "<", 1)]}, "invalid_request", "where[0].column", "length >= 1"),
        ({"where": [("title", "==", "x" * 4097)]}, "invalid_request", "where[0].value", "length <= 4096"),
        ({"where": [("title", "==", "\ud800")]}, "invalid_request", "", "filters must be values of JSON"),
        ({"where": [("price", "in", range(MAX_VALUES + 1))]}, "invalid_request", "where[0].value", "length <= 10000"),
        ({"where": [("price", "<", 3)] * (MAX_PREDICATES + 1)}, "invalid_request", "where", "length <= 64"),
        ({"named": ["in_stock"] * (MAX_PREDICATES + 1)}, "invalid_request", "named", "length <= 64"),
        ({"allow": MANY}, "invalid_request", "allow", "length <= 100000"),
        ({"deny": MANY}, "invalid_request", "deny", "length <= 100000"),
        ({"deny": [3, 1.5]}, "invalid_request", "deny[1]", "got float"),
        ({"deny": [True]}, "invalid_request", "deny[0]", "got bool"),
        ({"allow": [2**63]}, "invalid_request", "allow[0]", "int <= 9223372036854775807"),
        ({"allow": ["x" * 513]}, "invalid_request", "allow[0]", "length <= 512"),
        ({"allow": 7}, "invalid_request", "allow", "expected array | null, got int"),
        ({"allow": np.arange(3)}, "invalid_request", "", "filters must be values of JSON"),
    ],
)
def test_bad_filters_are_refused(catalog: Catalog, fields: dict[str, Any], code: str, param: str, message: str) -> None:
    where: Sequence[tuple[str, str, Any]] | None = fields.get("where")
    made = [
        predicate(column, op, list(value) if isinstance(value, range) else value) for column, op, value in where or ()
    ]
    filters = Filters(**fields | ({"where": made} if where else {}))
    for _ in range(2):  # what was refused once is not in a cache afterwards
        error = refused(catalog, filters)
        assert (error.code, error.param) == (code, f"filters.{param}".rstrip("."))
        assert message in error.message
    assert allowed_items(catalog, Filters(named=("in_stock",)))[0].num_allowed == sum(i % 7 > 3 for i in range(200))


def test_the_largest_filters_are_taken(catalog: Catalog) -> None:
    values, ids = tuple(range(-MAX_VALUES + 3, 3)), tuple(range(5, 5 + MAX_FILTER_IDS))
    where = (predicate("price", "in", values),) * MAX_PREDICATES
    mask, warnings = allowed_items(catalog, Filters(where=where, allow=ids, deny=tuple(map(str, ids[50:]))))
    assert mask.num_allowed == sum(i % 7 < 3 for i in range(5, 55))
    assert warnings == [
        f"{MAX_FILTER_IDS - 195} items of filters.allow are not in the catalog: [200, 201, 202, 203, 204]",
        f"{MAX_FILTER_IDS - 195} items of filters.deny are not in the catalog: ['200', '201', '202', '203', '204']",
    ]


def test_filters_decode_from_what_a_request_says(catalog: Catalog) -> None:
    body = b'{"allow": [1, "2", 9], "where": [{"column": "price", "op": "in", "value": [1, 2.0]}], "named": null}'
    filters = msgspec.json.decode(body, type=Filters)
    mask, _ = allowed_items(catalog, filters)
    assert [key for key in range(200) if mask.allows(catalog.row_of(key) or 0)] == [1, 2, 9]
    for unknown in (b'{"allowed": []}', b'{"where": [{"column": "a", "op": "<", "value": 1, "or": 2}]}'):
        with pytest.raises(msgspec.ValidationError, match="unknown field"):
            msgspec.json.decode(unknown, type=Filters)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (
            {"a": [{"column": "prise", "op": "<", "value": 1}]},
            "filters.a[0].column: no metadata column 'prise' (did you",
        ),
        (
            {"a": [], "b": [{"column": "price", "op": "<", "value": "1"}]},
            "filters.b[0].value: column 'price' holds int64:",
        ),
        ({"a": [{"column": "mixed", "op": "<", "value": 1}]}, "filters.a[0].column: column 'mixed' has no one type"),
        (
            {"a": [{"column": "price", "op": "~", "value": 1}]},
            "filters[...][0].op: '~' is none of: !=, <, <=, ==, >, >=",
        ),
        ({"": []}, "filters: a key: expected str of length >= 1"),
        ({"a": [{"column": "price", "op": "<", "value": 1}] * 65}, "filters[...]: expected array of length <= 64"),
        ({str(i): [] for i in range(65)}, "filters: expected object of length <= 64"),
    ],
)
def test_a_header_with_a_bad_filter_is_refused(tmp_path: Path, filters: Any, message: str) -> None:
    rows = [{"item_id": i, "sid": [i], "price": i, "mixed": [1, "a"][i]} for i in range(2)]
    paths = [write_jsonl(tmp_path / "items.jsonl", rows)]
    if "mixed" not in message:  # a parquet column has one type
        paths.append(write_parquet(tmp_path / "items.parquet", [{**row, "mixed": 1} for row in rows]))
    write_header(tmp_path, {"filters": filters})
    for path in paths:
        with pytest.raises(CatalogError) as caught:
            Catalog.load(path)
        assert str(caught.value).startswith("catalog.json: ")
        assert message in str(caught.value)


def test_a_json_column_is_read_once(catalog: Catalog) -> None:
    assert catalog.column("title") is catalog.column("title")
    assert catalog.column("title").to_pylist() == [f"Title {i}" for i in range(200)]
    for name in ("mixed", "huge"):
        reasons = set()
        for _ in range(2):
            with pytest.raises(pa.ArrowInvalid) as caught:
                catalog.column(name)
            reasons.add(str(caught.value))
        assert len(reasons) == 1


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
