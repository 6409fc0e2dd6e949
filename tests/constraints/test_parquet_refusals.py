"""Every fault of a parquet catalog is refused with its column or row and reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.constraints.catalog_files import TOKENS, refusal
from widebeam.constraints.catalog import Catalog

INTS = pa.list_(pa.int32())
ONES = pa.array([[1]] * 4, INTS)
NOT_LISTS = "column 'sid' must hold lists of integers or of strings, not"


@pytest.mark.parametrize(
    ("ids", "sids", "problems"),
    [
        (
            ["a", "b", "c", "d"],
            pa.array([[1], None, [], [2, None]], INTS),
            [" row 1: item 'b' has no sid", " row 2: item 'c' has no sid", " row 3: item 'd': sid has a missing entry"],
        ),
        (["a", None, "", "d"], ONES, [" row 1: item_id is missing", " row 2: item_id is empty"]),
        (
            ["a", None, "", "d"],
            pa.array([[1], None, [1, None], []]),
            [
                " row 1: item_id is missing",
                " row 1: the item has no sid",
                " row 2: item_id is empty",
                " row 2: the item: sid has a missing entry",
                " row 3: item 'd' has no sid",
            ],
        ),
        ([1, 2, 3, 1], ONES, [" row 3: item 1 is there twice, first at x.parquet row 0"]),
        (["a", "b", "c", "b"], ONES, [" row 3: item 'b' is there twice, first at x.parquet row 1"]),
        (
            [1, 2, 3, 4],
            pa.array([[1], [-5], [1], [2**40]]),
            [
                " row 1: item 2: level 0: token id -5 is negative",
                " row 3: item 4: level 0: token id 1099511627776 is above 2147483647",
            ],
        ),
        (
            [1.0, 2.0, float("nan"), 4.0],
            ONES,
            [
                ": column 'item_id' must hold integers or strings, not double; ids become floating point when some are "
                "missing"
            ],
        ),
        ([True] * 4, ONES, [": column 'item_id' must hold integers or strings, not bool"]),
        ([1, 2, 3, 4], pa.array([[1.0], [float("nan")], [1.0], [1.0]]), [f": {NOT_LISTS} list<element: double>"]),
        ([1, 2, 3, 4], pa.array([1, 2, 3, 4]), [f": {NOT_LISTS} int64"]),
        (
            [1, 2, 3, 4],
            pa.array([[2**63]] * 4, pa.list_(pa.uint64())),
            [": column 'sid': Integer value 9223372036854775808 not in range: 0 to 9223372036854775807"],
        ),
    ],
)
@pytest.mark.parametrize("row_group_size", [1, 100])
def test_bad_parquet(tmp_path: Path, ids: Any, sids: pa.Array, problems: list[str], row_group_size: int) -> None:
    pq.write_table(pa.table({"item_id": ids, "sid": sids}), tmp_path / "x.parquet", row_group_size=row_group_size)
    error = refusal(tmp_path / "x.parquet", token_id=TOKENS.get, vocab_size=100)
    assert error.problems == [f"x.parquet{problem}" for problem in problems]


def test_parquet_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": [1], "sid": [[1]]}), path)
    assert str(refusal(path)) == "x.parquet: no column 'item_id'; columns are id, sid"
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([[1]]), pa.array([2])], ["item_id", "sid", "item_id"])
    pq.write_table(twice, path)
    assert str(refusal(path)) == "x.parquet: column 'item_id' is there twice"
    path.write_bytes(b"PAR1 but nothing else")
    assert str(refusal(path)).startswith("x.parquet: not a readable parquet file: ")
    pq.write_table(pa.table({"item_id": [1], "sid": [[1]]}).replace_schema_metadata({"widebeam": "{]"}), path)
    assert str(refusal(path)).startswith("x.parquet (schema metadata): not valid JSON: object keys")


@pytest.mark.parametrize(
    ("word", "column"),
    [("iiii", "item_id"), ("ssss", "sid"), ("tttt", "text"), ("llll", "list"), ("oooo", "object"), ("dddd", "dict"),
     ("nnnn", None), ("kkkk", None)],
)  # fmt: skip
def test_text_that_is_no_utf8(tmp_path: Path, word: str, column: str | None) -> None:
    path = tmp_path / "x.parquet"
    columns = {"text": ["tttt"], "list": [["llll"]], "object": [{"kkkk": "oooo"}], "nnnn": [1]}
    columns["dict"] = pa.array(["dddd"]).dictionary_encode()
    table = pa.table({"item_id": ["iiii"], "sid": [["ssss"]], **columns})
    pq.write_table(table, path, compression="none", write_statistics=False)
    assert Catalog.load(path).num_items == 1
    path.write_bytes(path.read_bytes().replace(word.encode(), b"\xff\xfe\xff\xfe"))
    place = "not a readable parquet file: " if column is None else f"column {column!r} cannot be read: "
    assert str(refusal(path)).startswith(f"x.parquet: {place}")


def test_damaged_parquet_page(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"item_id": list(range(1000)), "sid": [[1]] * 1000}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196
    path.write_bytes(content)
    assert str(refusal(path)).startswith("x.parquet: cannot be read: ")
