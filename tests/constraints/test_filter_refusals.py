"""Filters that are refused, of a request and of a header, and the largest that are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.constraints.catalog_files import write_header, write_jsonl, write_parquet
from tests.constraints.filter_oracle import predicate
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filter_spec import MAX_FILTER_IDS, MAX_PREDICATES, MAX_VALUES, Filters
from widebeam.constraints.filters import allowed_items
from widebeam.errors import CatalogError, InvalidRequest


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
