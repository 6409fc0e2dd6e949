"""Updates of a catalog against one that is loaded from the same rows."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.constraints.catalog_files import write_header, write_jsonl
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.codebooks import Vocabulary
from widebeam.constraints.filter_spec import Filters, Predicate
from widebeam.constraints.filters import allowed_items
from widebeam.constraints.splice import Splice, equal_ranges
from widebeam.constraints.updates import updated
from widebeam.errors import InvalidRequest

Row = dict[str, Any]
CODES = 5
VOCABULARY = Vocabulary(lambda token: int(token[1:]) if token[1:].isdigit() else None, 100)
"""Tokens t0 .. t99."""
SCHEMA = {"price": pa.int32(), "title": pa.dictionary(pa.int32(), pa.string()), "tags": pa.list_(pa.string())}
FILTERS = [
    Filters(where=(Predicate(column="price", op="<", value=3),)),
    Filters(where=(Predicate(column="title", op="==", value="b"), Predicate(column="tags", op="contains", value="x"))),
    Filters(named=("dear",)),
]


def spelled(form: str, sid: Sequence[int]) -> list[int | str]:
    """Codes of a level as the form writes them; token ids of level l are 20 l + code."""
    token_ids = [20 * level + code for level, code in enumerate(sid)]
    return list(sid) if form == "codes" else [f"t{token}" for token in token_ids] if form == "tokens" else token_ids


def header(form: str, order: str | None, declared: bool) -> Row:
    """`order` begins with - to descend."""
    size = {"codes": CODES} if declared else {}
    tokens = [{"token": token} if form == "tokens" else {} for token in ("t{code}", "t2{code}", "t4{code}")]
    levels = [(tokens[level] or {"first_token_id": 20 * level}) | size for level in range(3)]
    return {
        "sid": form,
        **({"levels": levels} if declared or form == "codes" else {}),
        **({"order": {"column": order.removeprefix("-"), "descending": order[0] == "-"}} if order else {}),
        "filters": {"dear": [{"column": "price", "op": ">=", "value": 4}]},
    }


def load(folder: Path, rows: Sequence[Row], suffix: str) -> Catalog:
    path = folder / f"items{suffix}"
    if suffix == ".jsonl":
        write_jsonl(path, rows)
    else:
        columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in SCHEMA.items()}
        ids, sids = [row["item_id"] for row in rows], [row["sid"] for row in rows]
        pq.write_table(pa.table({"item_id": ids, "sid": sids, **columns}), path)
    return Catalog.load(path, token_id=VOCABULARY.token_id, vocab_size=VOCABULARY.size)


def check_equal(found: Catalog, wanted: Catalog, ids: Sequence[int | str]) -> None:
    """Everything that anybody can see, but for codes that a codebook keeps although no item has them any more."""
    rows = range(wanted.num_items)
    assert found.num_items == wanted.num_items
    for read in (Catalog.item_id, Catalog.sid, Catalog.token_ids, lambda one, row: one.metadata(row, one.fields)):
        assert [read(found, row) for row in rows] == [read(wanted, row) for row in rows]
    a, b = found.index, wanted.index
    assert (a.depth, a.mixed_depth, found.fields) == (b.depth, b.mixed_depth, wanted.fields)
    for name in ("level_start", "first_child", "item_lo", "item_hi", "num_terminal"):
        assert getattr(a, name).dtype == getattr(b, name).dtype
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    for depth in range(a.depth):
        nodes = slice(*a.level_start[depth + 1 : depth + 3])
        tokens, expected = found.level_token_ids[depth], wanted.level_token_ids[depth]
        assert np.array_equal(tokens[a.code[nodes]], expected[b.code[nodes]])
        assert np.isin(expected, tokens).all() and (np.diff(tokens) > 0).all()
        assert [a.widest(depth, width) for width in range(5)] == [b.widest(depth, width) for width in range(5)]
    known = [*ids, *map(str, ids), "nobody", -1]
    assert [found.row_of(one) for one in known] == [wanted.row_of(one) for one in known]
    assert found.rows_of(known).tolist() == wanted.rows_of(known).tolist()
    for filters in FILTERS:
        assert np.array_equal(allowed_items(found, filters)[0].words, allowed_items(wanted, filters)[0].words)


def applied(rows: list[Row], upsert: Sequence[Row], remove: Sequence[int | str]) -> list[Row]:
    """The same on a list: what is replaced keeps its place, what is new comes last."""
    changed = {str(row["item_id"]): row for row in upsert}
    gone = set(map(str, remove))
    rows = [changed.pop(str(row["item_id"]), row) for row in rows if str(row["item_id"]) not in gone]
    return rows + list(changed.values())


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Row], list[tuple[list[Row], list[int | str]]], str, Row]:
    """Rows of a file, batches for them, the file's ending and its header."""
    form = draw(st.sampled_from(["codes", "token_ids", "tokens"]))
    declared = draw(st.booleans())
    key = draw(st.sampled_from([int, "item-{}".format]))
    lengths = draw(st.sampled_from([(3,), (1, 2, 3)]))
    few = st.none() | st.integers(0, 5)

    def row(number: int) -> Row:
        codes = draw(st.lists(st.integers(0, CODES - 1), min_size=3, max_size=3))
        sid = spelled(form, codes[: draw(st.sampled_from(lengths))])
        tags = draw(st.none() | st.lists(st.sampled_from("xyz"), max_size=2))
        title = draw(st.none() | st.sampled_from("abc"))
        return {"item_id": key(number), "sid": sid, "price": draw(few), "title": title, "tags": tags}

    numbers = st.lists(st.integers(0, 20), unique=True, max_size=8)
    full = {"price": 1, "title": "a", "tags": ["x"]}  # so that a JSON column has a type, and lengths are known
    rows = [{"item_id": key(100 + n), "sid": spelled(form, (0, 1, 2)[:n]), **full} for n in lengths]
    rows += [{"item_id": key(200 + code), "sid": spelled(form, [code] * 3), **full} for code in range(CODES)]
    rows += [row(number) for number in draw(numbers)]
    there = {one["item_id"] for one in rows[len(lengths) :]}
    batches = []
    for _ in range(draw(st.integers(1, 5))):
        upsert = [row(number) for number in draw(numbers)]
        named = {one["item_id"] for one in upsert}
        left = sorted(there - named)
        remove = draw(st.lists(st.sampled_from(left), unique=True)) if left else []
        there = (there | named) - set(remove)
        if upsert or remove:
            batches.append((upsert, remove))
    suffix = draw(st.sampled_from([".jsonl", ".parquet"]))
    order = draw(st.sampled_from([None, "price", "-price"]))
    return rows, batches, suffix, header(form, order, declared)


@settings(max_examples=30)
@given(histories())
def test_a_catalog_after_updates_is_the_one_loaded_from_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory,
    history: tuple[list[Row], list[tuple[list[Row], list[int | str]]], str, Row],
) -> None:
    rows, batches, suffix, head = history
    folder = tmp_path_factory.mktemp("updates")
    write_header(folder, head)
    loaded = catalog = load(folder, rows, suffix)
    for upsert, remove in batches:
        rows = applied(rows, upsert, remove)
        catalog = updated(catalog, upsert, remove, VOCABULARY)
        assert catalog.version == loaded.version and catalog.sid_form == head["sid"]
        for found, wanted in zip(catalog.level_token_ids, loaded.level_token_ids, strict=True):
            assert found.tolist() == wanted.tolist()
        check_equal(catalog, load(folder, rows, suffix), [row["item_id"] for row in rows])


# What a batch may not be


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """A parquet file with a column of every kind."""
    kinds: dict[str, tuple[pa.DataType, Any]] = {
        "flag": (pa.bool_(), True),
        "small": (pa.int8(), 1),
        "whole": (pa.uint64(), 2**63),
        "half": (pa.float32(), 1.5),
        "exact": (pa.decimal128(6, 2), None),
        "day": (pa.date32(), None),
        "moment": (pa.timestamp("ms", "UTC"), None),
        "local": (pa.timestamp("s"), None),
        "pair": (pa.list_(pa.int32(), 2), [1, 2]),
        "object": (pa.struct({"a": pa.int8()}), {"a": 1}),
        "nothing": (pa.null(), None),
    }
    columns = {name: pa.array([value] * 2, kind) for name, (kind, value) in kinds.items()}
    path = tmp_path_factory.mktemp("typed") / "typed.parquet"
    pq.write_table(pa.table({"item_id": [1, 2], "sid": [[1, 20], [2, 21]], **columns}), path)
    return Catalog.load(path, vocab_size=100)


GOOD_VALUES = [
    ("flag", False, False),
    ("small", -128.0, -128),
    ("whole", 2**64 - 1, 2**64 - 1),
    ("half", 2, 2.0),
    ("exact", 0.1, Decimal("0.10")),
    ("day", "2030-01-31", date(2030, 1, 31)),
    ("moment", "2030-01-31T12:00:00.001+01:00", datetime(2030, 1, 31, 11, 0, 0, 1000, UTC)),
    ("local", "2030-01-31T12:00:00", datetime(2030, 1, 31, 12)),
    ("pair", [3, None], [3, None]),
    ("nothing", None, None),
]
BAD_VALUES = [
    ("flag", 1),
    ("small", 128),
    ("small", 1.5),
    ("small", True),
    ("small", "1"),
    ("whole", -1),
    ("half", 1e39),
    ("half", False),
    ("exact", 0.123),
    ("exact", 10_000),
    ("day", "31.1.2030"),
    ("day", 5),
    ("moment", 5),
    ("local", "2030-01-31T12:00:00Z"),
    ("local", "2030-01-31T12:00:00.0005"),
    ("pair", [1]),
    ("pair", 1),
    ("pair", [1, "x"]),
    ("nothing", 1),
]


@pytest.mark.parametrize(("column", "value", "kept"), GOOD_VALUES)
def test_values_become_those_of_the_column(typed: Catalog, column: str, value: Any, kept: Any) -> None:
    changed = updated(typed, [{"item_id": 3, "sid": [1, 20], column: value}], [], VOCABULARY)
    row = changed.row_of(3)
    assert row is not None and changed.metadata(row, [column]) == {column: kept}
    assert changed.column(column).type == typed.column(column).type
    assert sum(one is not None for one in changed.metadata(row, changed.fields).values()) == (kept is not None)


@pytest.mark.parametrize(("column", "value"), BAD_VALUES)
def test_values_of_another_type_are_refused(typed: Catalog, column: str, value: Any) -> None:
    rows = [{"item_id": 3, "sid": [1, 20], "flag": True}, {"item_id": 4, "sid": [1, 20], column: value}]
    with pytest.raises(InvalidRequest, match=rf"upsert\[1\]: column '{column}'") as caught:
        updated(typed, rows, [], VOCABULARY)
    assert (caught.value.code, caught.value.param) == ("type_mismatch", f"upsert[1].{column}")


@pytest.mark.parametrize("index", [pa.int8(), pa.uint8(), pa.int32(), pa.uint64()])
def test_a_dictionary_takes_more_values_than_its_file_had_room_for(tmp_path: Path, index: pa.DataType) -> None:
    texts = [f"v{number}" for number in range(120)]
    kind = pa.dictionary(index, pa.string())
    columns = {
        "text": pa.array(texts, pa.string()).dictionary_encode().cast(kind),
        "list": pa.array([[text] for text in texts], pa.list_(kind)),
        "pair": pa.array([[text, "x"] for text in texts], pa.list_(kind, 2)),
        "rank": pa.array(texts, pa.string()).dictionary_encode().cast(pa.dictionary(index, pa.string(), True)),
    }
    sids = [[1, 20] for _ in texts]
    pq.write_table(pa.table({"item_id": range(120), "sid": sids, **columns}), tmp_path / "x.parquet")
    catalog = Catalog.load(tmp_path / "x.parquet", vocab_size=100)
    new = [f"w{number}" for number in range(200)]
    for at in (0, 100):
        rows = [
            {"item_id": 1000 + number, "sid": [1, 20], "text": text, "list": [text], "pair": [text, None], "rank": text}
            for number, text in list(enumerate(new))[at : at + 100]
        ]
        catalog = updated(catalog, rows, [], VOCABULARY)
    for number, text in enumerate(new):
        row = catalog.row_of(1000 + number)
        assert row is not None
        assert catalog.metadata(row, catalog.fields) == {
            "text": text, "list": [text], "pair": [text, None], "rank": text
        }  # fmt: skip
    where = Filters(where=(Predicate(column="text", op="==", value="w150"),))
    assert allowed_items(catalog, where)[0].before[-1] == 1 and catalog.column("text").to_pylist() == texts + new


def test_what_json_cannot_give_is_refused(typed: Catalog) -> None:
    with pytest.raises(InvalidRequest, match="cannot be given as JSON") as caught:
        updated(typed, [{"item_id": 3, "sid": [1, 20], "object": {"a": 1}}], [], VOCABULARY)
    assert caught.value.code == "unsupported_column"


def test_ids_are_of_the_kind_that_the_catalog_has(typed: Catalog) -> None:
    changed = updated(typed, [{"item_id": "1", "sid": [2, 21]}, {"item_id": "7", "sid": [2, 21]}], ["2"], VOCABULARY)
    assert [changed.item_id(row) for row in range(2)] == [1, 7]
    for item_id in ("x", "007", 2**63):
        with pytest.raises(InvalidRequest, match="64-bit integers") as caught:
            updated(typed, [{"item_id": item_id, "sid": [2, 21]}], [], VOCABULARY)
        assert caught.value.param == "upsert[0].item_id"


@pytest.mark.parametrize("form", ["codes", "token_ids", "tokens"])
@pytest.mark.parametrize("declared", [False, True])
def test_a_codebook_is_the_one_that_the_catalog_began_with(tmp_path: Path, form: str, declared: bool) -> None:
    write_header(tmp_path, header(form, None, declared))
    rows = [
        {"item_id": i, "sid": spelled(form, (0, code, 2)), "price": 1, "title": "a"} for i, code in enumerate((1, 3))
    ]
    catalog = load(tmp_path, rows, ".jsonl")
    shown = {"codes": "code {}", "token_ids": "token id {}", "tokens": "token 't{}'"}[form]
    book = rf"the declared codebook of {CODES} codes$"
    if not declared:
        book = (
            "the codebook of 2 codes, .* load a whole file, .* or declare the level's `codes` in the catalog's header$"
        )
    for code in (7, 90) if declared else (0, 2, 4, 7, 90):
        number = code if form == "codes" else 20 + code
        match = rf"^upsert\[1\]: item 2: level 1: {shown.format(number)} is outside {book}"
        with pytest.raises(InvalidRequest, match=match) as caught:
            updated(catalog, [rows[1], {"item_id": 2, "sid": spelled(form, (0, code, 2))}], [], VOCABULARY)
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_item", "upsert[1].sid")
    without = updated(catalog, [], [1], VOCABULARY)
    again = updated(without, [rows[1]], [], VOCABULARY)  # with a code that no item has had meanwhile
    assert [again.sid(row) for row in range(2)] == [row["sid"] for row in rows]
    for one in (without, again):
        assert [tokens.tolist() for tokens in one.level_token_ids] == [t.tolist() for t in catalog.level_token_ids]


def test_the_longest_sids_stay(tmp_path: Path) -> None:
    write_header(tmp_path, {})
    catalog = load(tmp_path, [{"item_id": 1, "sid": [1]}, {"item_id": 2, "sid": [1, 2]}], ".jsonl")
    assert updated(catalog, [{"item_id": 3, "sid": [1]}], [1], VOCABULARY).num_items == 2
    for upsert, remove, code in (
        ([], [2], "depth_mismatch"),
        ([{"item_id": 3, "sid": [3, 4, 5]}], [], "depth_mismatch"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            updated(catalog, upsert, remove, VOCABULARY)
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("before", "value", "kind"),
    [
        ([1, None], 2.5, pa.float64()),
        ([1.5, None], 2, pa.float64()),
        ([None, None], "x", pa.string()),
        ([[], None], ["x"], pa.list_(pa.string())),
        ([[1], None], [1.5], pa.list_(pa.float64())),
        ([{"a": 1}, None], {"b": "x"}, None),
        ([1, "x"], 2, None),
        ([1, None], "x", "refused"),
        (["x", None], 1, "refused"),
        ([True, None], 1, "refused"),
        ([[1], None], ["x"], "refused"),
        ([2**53 + 1, None], 0.5, "refused"),
    ],
)
def test_columns_of_json_take_the_type_that_all_values_have(tmp_path: Path, before: Any, value: Any, kind: Any) -> None:
    write_header(tmp_path, {})
    rows = [{"item_id": i, "sid": [i], "x": one} for i, one in enumerate(before)]
    catalog = load(tmp_path, rows, ".jsonl")
    new = {"item_id": 9, "sid": [1], "x": value}
    if kind == "refused":
        with pytest.raises(InvalidRequest) as caught:
            updated(catalog, [new], [], VOCABULARY)
        assert (caught.value.code, caught.value.param) == ("type_mismatch", "upsert[0].x")
        return
    changed = updated(catalog, [new], [], VOCABULARY)
    assert [changed.metadata(row, ["x"])["x"] for row in range(3)] == [*before, value]
    if kind is not None:
        assert changed.column("x").type == kind and changed.column("x").to_pylist() == [*before, value]
    if before == [1, "x"]:  # a mixed column is of one type again when the item at fault is gone
        assert updated(changed, [], [1], VOCABULARY).column("x").drop_null().to_pylist() == [1, 2]


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 3)), max_size=30), st.data())
def test_ranges_and_splices_against_lists(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    rows.sort()
    wanted = data.draw(st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 4)), min_size=1, max_size=8))
    columns = np.array(rows, np.int32).reshape(-1, 2).T
    lo, hi = equal_ranges(columns, np.array(wanted, np.int32).T)
    for one, first, end in zip(wanted, lo.tolist(), hi.tolist(), strict=True):
        assert (first, end) == (bisect.bisect_left(rows, one), bisect.bisect_right(rows, one))
    gone = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True)) if rows else []
    new = sorted(wanted)
    at = [bisect.bisect_left(rows, one) for one in new]
    splice = Splice.of(len(rows), np.array(gone, np.int64), np.array(at))
    left = [one for place, one in enumerate(rows) if place not in gone]
    found = [
        splice.apply(column, np.array(values)) for column, values in zip(columns, zip(*new, strict=True), strict=True)
    ]
    assert list(zip(*(column.tolist() for column in found), strict=True)) == sorted(left + new)
