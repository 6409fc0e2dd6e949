"""Updates of a catalog against one that is loaded from the same rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    levels = [{"first_token_id": 20 * level, **size} for level in range(3)]
    return {
        "sid": form,
        **({"levels": levels} if form == "codes" else {}),
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
    declared = draw(st.booleans()) and form == "codes"
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


@settings(deadline=None, max_examples=60)
@given(histories())
def test_a_catalog_after_updates_is_the_one_loaded_from_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory,
    history: tuple[list[Row], list[tuple[list[Row], list[int | str]]], str, Row],
) -> None:
    rows, batches, suffix, head = history
    folder = tmp_path_factory.mktemp("updates")
    write_header(folder, head)
    catalog = load(folder, rows, suffix)
    for upsert, remove in batches:
        rows = applied(rows, upsert, remove)
        before, catalog = catalog, updated(catalog, upsert, remove, VOCABULARY)
        assert catalog.version == before.version and catalog.sid_form == head["sid"]
        check_equal(catalog, load(folder, rows, suffix), [row["item_id"] for row in rows])
