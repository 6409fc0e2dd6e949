"""Catalog files of every format against a plain reading of the same items."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.constraints import strategies
from tests.constraints.catalog_files import write_header, write_jsonl, write_minionerec, write_packed, write_parquet
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.catalogs import Catalogs
from widebeam.constraints.report import inspect
from widebeam.constraints.validation import validate
from widebeam.engine.request import NO_CATALOG
from widebeam.errors import CatalogError, Conflict, InvalidRequest, NotFound

Items = list[tuple[int | str, list[int]]]
FIRST = (500, 40, 300, 7)
"""First token id of each level; not ascending."""
TOKENS = {f"<{'abcd'[level]}_{code}>": 900 - 31 * level - code for level in range(4) for code in range(10)}
"""A vocabulary in which the token ids fall as the codes rise."""
TOKEN_LEVELS = [{"token": f"<{letter}_{{code}}>"} for letter in "abcd"]


def spelled(sid: list[int], form: str) -> list[Any]:
    """A SID of codes as the file gives it."""
    if form == "tokens":
        return [f"<{'abcd'[level]}_{code}>" for level, code in enumerate(sid)]
    return [FIRST[level] + code for level, code in enumerate(sid)] if form == "token_ids" else sid


def check(catalog: Catalog, items: Items, form: str, token_of: Callable[[int, int], int]) -> None:
    """Everything that a catalog says about its items, and the index over their tokens."""
    assert (catalog.num_items, catalog.sid_form, catalog.resolved) == (len(items), form, True)
    tokens = {str(key): [token_of(level, code) for level, code in enumerate(sid)] for key, sid in items}
    expected = sorted(items, key=lambda item: tokens[str(item[0])])  # stable: file order within one SID
    for row, (key, sid) in enumerate(expected):
        assert catalog.item_id(row) == key and type(catalog.item_id(row)) is type(key)
        assert catalog.row_of(key) == catalog.row_of(str(key)) == row
        assert catalog.sid(row) == spelled(sid, form)
        assert catalog.token_ids(row) == tokens[str(key)]
    assert catalog.row_of("no such item") is None and catalog.row_of(2**70) is None
    present = [
        sorted({token_of(level, sid[level]) for _, sid in items if len(sid) > level}) for level in range(catalog.depth)
    ]
    assert [book.tolist() for book in catalog.level_token_ids] == present
    seen = []
    for depth in range(catalog.depth + 1):
        for node in range(*catalog.index.level_start[depth : depth + 2]):
            seen += (rows := catalog.items_at(node))
            assert len({tuple(catalog.token_ids(row)) for row in rows}) == (len(rows) > 0)
            assert all(len(catalog.token_ids(row)) == depth for row in rows)
    assert sorted(seen) == list(range(len(items)))
    assert catalog.num_sids == len({tuple(sid) for _, sid in items})


@pytest.mark.parametrize("form", ["codes", "token_ids", "tokens"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@given(data=st.data())
def test_native_formats(tmp_path_factory: pytest.TempPathFactory, suffix: str, form: str, data: st.DataObject) -> None:
    ids = strategies.ITEM_IDS
    if suffix == ".parquet":  # a column has one type
        ids = data.draw(st.sampled_from([st.integers(0, 2**64 - 1), st.integers(-9, 2**62), ids.map(str)]))
    items: Items = data.draw(strategies.items(ids=ids))
    depth = max(len(sid) for _, sid in items)
    mapped = data.draw(st.booleans())  # codes: by token strings or by first token ids
    header: dict[str, Any] = {"sid": form} if data.draw(st.booleans()) else {}
    if form == "codes":
        header["levels"] = (TOKEN_LEVELS if mapped else [{"first_token_id": first} for first in FIRST])[:depth]
    folder = tmp_path_factory.mktemp("native")
    path = folder / f"items{suffix}"
    rows = [{"item_id": key, "sid": spelled(sid, form)} for key, sid in items]
    if suffix == ".jsonl":
        write_jsonl(path, rows)
        write_header(folder, header)
    else:
        write_parquet(path, rows, header, row_group_size=data.draw(st.integers(1, 40)))
    catalog = Catalog.load(path, token_id=TOKENS.get, vocab_size=1000)
    by_name = form == "tokens" or (form == "codes" and mapped)
    check(
        catalog,
        items,
        form,
        lambda level, code: TOKENS[f"<{'abcd'[level]}_{code}>"] if by_name else FIRST[level] + code,
    )
    assert inspect(catalog).sid_declared == ("sid" in header)
    assert catalog.format == suffix[1:]


@given(
    items=strategies.items(ids=st.text(st.characters(codec="utf-8"), min_size=1, max_size=4)),
    with_metadata=st.booleans(),
)
def test_minionerec(tmp_path_factory: pytest.TempPathFactory, items: Items, with_metadata: bool) -> None:
    rows = [
        {"item_id": key, "sid": spelled(sid, "tokens"), **({"title": f"Title {key}"} if with_metadata else {})}
        for key, sid in items
    ]
    catalog = Catalog.load(write_minionerec(tmp_path_factory.mktemp("mini"), rows), token_id=TOKENS.get)
    check(catalog, items, "tokens", lambda level, code: TOKENS[f"<{'abcd'[level]}_{code}>"])
    assert (catalog.name, catalog.format) == ("Toys", "minionerec")
    assert catalog.fields == (("title",) if with_metadata else ())
    if with_metadata:
        for key, _ in items:
            assert catalog.metadata(catalog.row_of(key) or 0, ["title"]) == {"title": f"Title {key}"}


@given(items=strategies.items(depth=3))
def test_packed(tmp_path_factory: pytest.TempPathFactory, items: Items) -> None:
    by_sid = sorted(items, key=lambda item: item[1])  # a file lists the items of one SID together
    path = write_packed(
        tmp_path_factory.mktemp("packed") / "sid2pid.json", [{"item_id": key, "sid": sid} for key, sid in by_sid]
    )
    write_header(path.parent, {"levels": [{"first_token_id": first} for first in FIRST[:3]]})
    check(Catalog.load(path), by_sid, "codes", lambda level, code: FIRST[level] + code)


def test_packed_key_has_the_published_layout(tmp_path: Path) -> None:
    (tmp_path / "sid2iid.json").write_text('{"68719476737": [17, "x"], "549755813887": 5}')
    levels = [{"first_token_id": first, "codes": 8192} for first in (151669, 159861, 168053)]
    write_header(tmp_path, {"levels": levels}, "sid2iid.catalog.json")
    catalog = Catalog.load(tmp_path / "sid2iid.json", vocab_size=176384)
    assert [catalog.sid(row) for row in range(3)] == [[1024, 0, 1], [1024, 0, 1], [8191, 8191, 8191]]
    assert [catalog.item_id(row) for row in range(3)] == [17, "x", 5]
    assert catalog.token_ids(2) == [159860, 168052, 176244]
    assert [len(book) for book in catalog.level_token_ids] == [8192] * 3


def test_declared_codebooks_hold_all_codes(tmp_path: Path) -> None:
    rows = [{"item_id": i, "sid": sid} for i, sid in enumerate([[3, 0], [1, 2]])]
    write_header(tmp_path, {"levels": [{"token": "<a_{code}>", "codes": 5}, {"first_token_id": 40, "codes": 3}]})
    catalog = Catalog.load(write_jsonl(tmp_path / "codes.jsonl", rows), token_id=TOKENS.get)
    assert [book.tolist() for book in catalog.level_token_ids] == [[896, 897, 898, 899, 900], [40, 41, 42]]
    assert catalog.index.code.tolist() == [0, 1, 3, 0, 2]  # code 3 is token 897, code 1 is token 899
    write_header(tmp_path, {"levels": [{"token": "<a_{code}>", "codes": 5}, {"token": "<b_{code}>", "codes": 9}]})
    rows = [{"item_id": i, "sid": spelled(sid, "tokens")} for i, sid in enumerate([[3, 0], [1, 2]])]
    with_strings = Catalog.load(write_jsonl(tmp_path / "codes.jsonl", rows), token_id=TOKENS.get)
    assert with_strings.sid_form == "tokens"  # strings say so, although there are levels
    assert [len(book) for book in with_strings.level_token_ids] == [5, 9]
    header = {"sid": "token_ids", "levels": [{"first_token_id": 10, "codes": 4}]}
    write_header(tmp_path, header)
    ids = Catalog.load(write_jsonl(tmp_path / "ids.jsonl", [{"item_id": "x", "sid": [12]}]))
    assert [book.tolist() for book in ids.level_token_ids] == [[10, 11, 12, 13]]
    assert (ids.sid(0), ids.token_ids(0), ids.index.code.tolist()) == ([12], [12], [0, 2])


def test_without_a_tokenizer_token_strings_get_made_up_ids(tmp_path: Path) -> None:
    rows = [{"item_id": i, "sid": sid} for i, sid in enumerate([["b", "z"], ["a", "z"], ["b", "a"]])]
    catalog = Catalog.load(write_jsonl(tmp_path / "items.jsonl", rows), vocab_size=3)
    assert not catalog.resolved and not inspect(catalog).resolved
    assert [book.tolist() for book in catalog.level_token_ids] == [[0, 1], [2, 3]]
    assert [catalog.sid(row) for row in range(3)] == [["a", "z"], ["b", "a"], ["b", "z"]]
    assert [catalog.token_ids(row) for row in range(3)] == [[0, 3], [1, 2], [1, 3]]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@given(
    values=st.lists(st.none() | st.sampled_from([1, 2, 2.5, 7]), min_size=1, max_size=25)
    | st.lists(st.none() | st.sampled_from(["a", "b", "ba"]), min_size=1, max_size=25),
    descending=st.booleans(),
)
def test_items_of_one_sid_come_in_the_declared_order(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, values: list[Any], descending: bool
) -> None:
    rows = [{"item_id": i, "sid": [i % 2], "rank": value} for i, value in enumerate(values)]
    folder = tmp_path_factory.mktemp("order")
    write_header(folder, {"order": {"column": "rank", "descending": descending}})
    write = write_jsonl if suffix == ".jsonl" else write_parquet
    catalog = Catalog.load(write(folder / f"items{suffix}", rows))
    expected = []
    for sid in sorted({i % 2 for i in range(len(values))}):
        here = [i for i in range(len(values)) if i % 2 == sid]
        given_rank = [i for i in here if values[i] is not None]
        # Python's reversed sort is stable as well: equal ranks stay in file order
        expected += sorted(given_rank, key=lambda i: values[i], reverse=descending)
        expected += [i for i in here if values[i] is None]
    assert [catalog.item_id(row) for row in range(len(values))] == expected


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_metadata_comes_back_as_written(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"item_id": "b", "sid": [2], "title": "Büro", "tags": ["x", "y"], "price": 1.5},
        {"item_id": "a", "sid": [1], "title": None, "tags": [], "price": None},
    ]
    write = write_jsonl if suffix == ".jsonl" else write_parquet
    catalog = Catalog.load(write(tmp_path / f"items{suffix}", rows))
    assert catalog.fields == ("title", "tags", "price")
    assert catalog.metadata(1, ["price", "title"]) == {"price": 1.5, "title": "Büro"}
    assert catalog.metadata(0, ["title", "tags"]) == {"title": None, "tags": []}
    assert catalog.metadata(0, []) == {}
    catalog.check_fields(["tags"])
    with pytest.raises(InvalidRequest, match=r"no metadata column 'titel' \(did you mean 'title'\?\)") as caught:
        catalog.check_fields(["price", "titel"])
    assert (caught.value.code, caught.value.param) == ("unknown_field", "fields")


def test_jsonl_rows_may_differ_in_columns_and_end_without_a_newline(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(b'\r\n{"item_id": 1, "sid": [1], "a": {"b": 1}}\r\n  \n{"sid": [1], "c": true, "item_id": 2}')
    catalog = Catalog.load(path)
    assert catalog.fields == ("a", "c")
    assert [catalog.metadata(row, ["a", "c"]) for row in (0, 1)] == [{"a": {"b": 1}, "c": None}, {"a": None, "c": True}]


@pytest.mark.parametrize("kind", [pa.list_(pa.int16()), pa.large_list(pa.uint64()), pa.list_(pa.int32(), 2)])
def test_parquet_list_types(tmp_path: Path, kind: pa.DataType) -> None:
    sids = [[3, 1], [2, 2], [3, 0]]
    pq.write_table(pa.table({"sid": pa.array(sids, kind), "item_id": ["a", "b", "c"]}), tmp_path / "x.parquet")
    catalog = Catalog.load(tmp_path / "x.parquet")
    assert [(catalog.item_id(row), catalog.sid(row)) for row in range(3)] == [
        ("b", [2, 2]),
        ("c", [3, 0]),
        ("a", [3, 1]),
    ]


def test_parquet_dictionary_columns_and_a_name_without_ending(tmp_path: Path) -> None:
    text = pa.dictionary(pa.int8(), pa.string())
    sid = pa.array([["<b>"], ["<a>", "<c>"], ["<b>"]], pa.list_(text))
    table = pa.table({"item_id": pa.array(["z", "y", "x"], text), "sid": sid})
    pq.write_table(table, tmp_path / "items", row_group_size=2)
    catalog = Catalog.load(tmp_path / "items", token_id={"<a>": 5, "<b>": 2, "<c>": 1}.get)
    assert [(catalog.item_id(row), catalog.token_ids(row)) for row in range(3)] == [
        ("z", [2]),
        ("x", [2]),
        ("y", [5, 1]),
    ]
    assert (catalog.name, catalog.format) == ("items", "parquet")


def test_text_names_a_number_only_in_its_usual_spelling(tmp_path: Path) -> None:
    ids = [42, -7, 2**63 - 1]
    catalog = Catalog.load(write_jsonl(tmp_path / "items.jsonl", [{"item_id": key, "sid": [1]} for key in ids]))
    assert [catalog.row_of(str(key)) for key in ids] == [0, 1, 2]
    for other in ("042", "+42", " 42", "4_2", "４２", "42.0", "", "-", "--7", "-07", "9" * 19, "9" * 5000, 2**63):
        assert catalog.row_of(other) is None


def test_ids_are_told_apart_when_their_hashes_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widebeam.constraints.item_ids.hash", len, raising=False)
    ids = ["a", "bb", "c", 5, "dd"]
    catalog = Catalog.load(write_jsonl(tmp_path / "items.jsonl", [{"item_id": key, "sid": [1]} for key in ids]))
    assert [catalog.row_of(key) for key in [*ids, "5", "b", "ccc"]] == [0, 1, 2, 3, 4, 3, None, None]


def test_header_precedence(tmp_path: Path) -> None:
    rows = [{"item_id": 1, "sid": [3]}]
    header = {
        place: {"levels": [{"first_token_id": first}]} for place, first in [("own", 10), ("in", 20), ("shared", 30)]
    }
    jsonl = write_jsonl(tmp_path / "items.jsonl", rows)
    parquet = write_parquet(tmp_path / "items.parquet", rows, header["in"])

    def token(path: Path) -> tuple[int, str | None]:
        catalog = Catalog.load(path)
        return catalog.token_ids(0)[0], catalog.header_place

    assert token(jsonl) == (3, None)
    write_header(tmp_path, header["shared"])
    assert token(jsonl) == (33, "catalog.json")
    with pytest.raises(CatalogError, match=r"different things of `levels`\. A header in items\.catalog"):
        token(parquet)
    write_header(tmp_path, header["own"], "items.catalog.json")
    assert token(jsonl) == token(parquet) == (13, "items.catalog.json")


def test_catalog_json_says_what_the_parquet_file_leaves_out_and_may_edit_it(tmp_path: Path) -> None:
    rows = [{"item_id": i, "sid": [3], "a": i, "b": -i} for i in (1, 2)]
    inside = {"sid": "codes", "levels": [{"first_token_id": 20}], "order": {"column": "b"}, "template": {"prefix": "x"}}
    path = write_parquet(tmp_path / "items.parquet", rows, inside)

    def first() -> tuple[object, ...]:
        catalog = Catalog.load(path)
        assert catalog.template is not None
        return catalog.item_id(0), catalog.token_ids(0), catalog.template.prefix, catalog.header_place

    assert first() == (2, [23], "x", "items.parquet (schema metadata)")
    write_header(tmp_path, {"order": {"column": "a"}, "version": 7})
    assert first() == (1, [23], "x", "catalog.json and items.parquet (schema metadata)")
    assert Catalog.load(path).header.version == 7
    for wrong in ({"sid": "token_ids"}, {"levels": [{"first_token_id": 20, "codes": 4}]}):
        write_header(tmp_path, wrong)
        with pytest.raises(CatalogError, match=f"say different things of `{next(iter(wrong))}`"):
            first()


@pytest.mark.parametrize("header", [None, {"order": {"column": "a"}}])
def test_integers_that_nobody_explains_are_warned_of(tmp_path: Path, header: object) -> None:
    path = write_jsonl(tmp_path / "items.jsonl", [{"item_id": 1, "sid": [3], "a": 1}])
    if header is not None:
        write_header(tmp_path, header)
    (warning,) = Catalog.load(path).warnings
    assert "taken for token ids" in warning
    assert f"warning: {warning}" in validate(path).text() and validate(path).fine
    assert warning in inspect(Catalog.load(path)).text()
    write_header(tmp_path, {"sid": "token_ids"})
    assert Catalog.load(path).warnings == () == validate(path).warnings
    assert "warning" not in validate(path).text() + inspect(Catalog.load(path)).text()


def test_report_counts_what_the_items_say(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    sids = [[int(c) for c in rng.integers(0, [3, 8, 8])][: int(rng.integers(2, 4))] for _ in range(120)]
    rows = [{"item_id": f"{i}", "sid": spelled(sid, "tokens"), "title": f"T{i}"} for i, sid in enumerate(sids)]
    report = inspect(Catalog.load(write_minionerec(tmp_path, rows)))
    distinct = {tuple(sid) for sid in sids}
    shared = [sids.count(list(sid)) for sid in distinct if sids.count(list(sid)) > 1]
    assert (report.items, report.sids) == (120, len(distinct))
    assert (report.collisions.shared_items, report.collisions.largest) == (sum(shared), max(shared))
    assert report.depths == {depth: sum(len(sid) == depth for sid in sids) for depth in (2, 3)}
    for level, measured in enumerate(report.levels):
        prefixes = {sid[: level + 1] for sid in distinct if len(sid) > level}
        parents = [prefix[:-1] for prefix in prefixes]
        assert (measured.nodes, measured.codes_in_use) == (len(prefixes), len({prefix[-1] for prefix in prefixes}))
        assert measured.mean_children == pytest.approx(len(prefixes) / len(set(parents)))
        assert measured.max_children == max(map(parents.count, parents))
        assert (measured.codebook_size, measured.codebook_declared) == (measured.codes_in_use, False)
    text = report.text()
    assert "Toys (minionerec; header: none)" in text
    assert "tokens (detected); not looked up in a tokenizer" in text
    assert f"120 under {len(distinct)} SIDs\n" in text
    assert f"{sum(shared)} items share {len(shared)} SIDs, at most {max(shared)} the same" in text


def test_catalogs_by_name(tmp_path: Path) -> None:
    catalogs = Catalogs()
    assert catalogs.get(None) is None and catalogs.get(NO_CATALOG) is None and catalogs.names() == []
    toys, tools = (
        Catalog.load(write_jsonl(tmp_path / f"{name}.jsonl", [{"item_id": 1, "sid": [3]}]))
        for name in ("toys", "tools")
    )
    catalogs.add(toys)
    assert catalogs.get(None) is catalogs.get("toys") is toys
    catalogs.add(tools)
    assert catalogs.names() == ["tools", "toys"] and catalogs.get(NO_CATALOG) is None
    assert catalogs.get(None) is toys, "the first, whatever comes later"
    catalogs.none_is_first()
    with pytest.raises(InvalidRequest, match="name one of the catalogs: tools, toys") as ambiguous:
        catalogs.get(None)
    assert (ambiguous.value.code, ambiguous.value.param) == ("ambiguous_catalog", "catalog")
    with pytest.raises(NotFound, match=r"unknown catalog 'toy' \(did you mean 'toys'\?\)") as unknown:
        catalogs.get("toy")
    assert (unknown.value.code, unknown.value.param) == ("unknown_catalog", "catalog")
    newer = Catalog.load(tmp_path / "tools.jsonl", name="toys")
    catalogs.add(newer)
    assert catalogs.get("toys") is newer


def test_the_default_is_chosen_or_the_first(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "items.jsonl", [{"item_id": 1, "sid": [3]}])
    a, b, c = (Catalog.load(path, name=name) for name in "abc")
    chosen, free = Catalogs(default="b"), Catalogs()
    for catalogs in (chosen, free):
        catalogs.add(a)
        catalogs.none_is_first()  # it came alone
    assert chosen.get(None) is None and free.get(None) is a
    for catalogs in (chosen, free):
        catalogs.add(b)
        catalogs.add(c)
    assert chosen.get(None) is b and free.get(None) is a
    for catalogs, name in ((chosen, "b"), (free, "a")):
        catalogs.remove(name)
        assert catalogs.get(None) is None, "as without a catalog"
        with pytest.raises(InvalidRequest, match="needs a catalog"):
            catalogs.get(None, min_version=1)
    again = free.next_version(a)
    assert again.version == 2, "a number stands for one content"
    free.add(again)
    assert free.get(None) is again and free.earlier("a") == []
    for name in "abc":
        free.remove(name)
    free.add(c)
    assert free.get(None) is c, "as a server that never had any"


def test_numbers_stay_declared_when_a_catalog_is_removed(tmp_path: Path) -> None:
    catalogs = Catalogs()
    path = write_jsonl(tmp_path / "items.jsonl", [{"item_id": 1, "sid": [3]}])
    write_header(tmp_path, {"version": 7})
    catalogs.add(catalogs.next_version(Catalog.load(path)))
    catalogs.remove("items")
    with pytest.raises(Conflict, match="7 is not newer"):
        catalogs.check_number("items", 7)
    catalogs.check_number("items", 8)


def test_catalog_needs_no_torch() -> None:
    code = "import sys, widebeam.constraints.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
