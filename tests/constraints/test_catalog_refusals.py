"""Every fault of a catalog file is refused with its line and reason; those of parquet: test_parquet_refusals.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.constraints.catalog_files import TOKENS, refusal, write_header, write_jsonl, write_minionerec, write_parquet
from widebeam.constraints.catalog import Catalog

NOT_A_SID = "sid must be a list of integers or a list of strings, not"
LEVELS = [{"first_token_id": 10}, {"first_token_id": 20}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"item_id": "x"}', "item 'x' has no sid"),
        ('{"item_id": "x", "sid": null}', "item 'x' has no sid"),
        ('{"item_id": 7, "sid": []}', "item 7 has no sid"),
        ('{"item_id": "x", "sid": ""}', "item 'x' has no sid"),
        ('{"sid": [1]}', "item_id is missing"),
        ('{"item_id": null, "sid": [1]}', "item_id is missing"),
        ('{"item_id": "", "sid": [1]}', "item_id is empty"),
        ('{"item_id": 1.0, "sid": [1]}', "item_id must be a string or an integer, not 1.0"),
        ('{"item_id": true, "sid": [1]}', "item_id must be a string or an integer, not true"),
        ('{"item_id": ["x"], "sid": [1]}', 'item_id must be a string or an integer, not ["x"]'),
        ('{"item_id": "x", "sid": 5}', f"item 'x': {NOT_A_SID} 5"),
        ('{"item_id": "x", "sid": "<a_1>"}', f"item 'x': {NOT_A_SID} \"<a_1>\""),
        ('{"item_id": "x", "sid": [1, "2"]}', f"item 'x': {NOT_A_SID} [1, \"2\"]"),
        ('{"item_id": "x", "sid": [1, 2.5]}', f"item 'x': {NOT_A_SID} [1, 2.5]"),
        ('{"item_id": "x", "sid": [1, true]}', f"item 'x': {NOT_A_SID} [1, true]"),
        ('{"item_id": "x", "sid": [1, null]}', f"item 'x': {NOT_A_SID} [1, null]"),
        ('{"item_id": "x", "sid": ["<a_1>"]}', "item 'x': sid holds strings, those before it integers"),
        ('{"item_id": "x", "sid": [9223372036854775808]}', "item 'x': sid holds an integer of more than 64 bits"),
        ('{"item_id": NaN, "sid": [1]}', "not a JSON object: invalid character (byte 12)"),
        ('{"item_id": "x", "sid": [NaN]}', "not a JSON object: invalid character (byte 25)"),
        ('{"item_id": "x", "sid": [1]', "not a JSON object: it ends too early"),
        ('["x", [1]]', "not a JSON object: Expected `object`, got `array`"),
        ('{"item_id": "x", "sid": [1], "m": ' + "[" * 5000, "not a JSON object: it is nested too deeply"),
    ],
)
def test_bad_lines(tmp_path: Path, line: str, problem: str) -> None:
    good = '{"item_id": "good", "sid": [1]}'
    (tmp_path / "items.jsonl").write_text("\n".join([good, "", line, good.replace("good", "fine")]))
    error = refusal(tmp_path / "items.jsonl")
    assert len(error.problems) == 1
    assert error.problems[0] == str(error)
    assert error.problems[0].startswith(f"items.jsonl:3: {problem}")


def test_invalid_utf8_line(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_bytes(b'{"item_id": "\xff", "sid": [1]}\n')
    assert refusal(tmp_path / "items.jsonl").problems == [
        "items.jsonl:1: not a JSON object: Invalid UTF-8 encoded string"
    ]


@pytest.mark.parametrize("name", ["items.jsonl", "sid2pid.json"])
def test_a_byte_order_mark_is_named(tmp_path: Path, name: str) -> None:
    text = '{"item_id": "x", "sid": [1]}\n' if name == "items.jsonl" else '{"5": 1}'
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert "it begins with a byte order mark: save it as UTF-8 without one" in str(refusal(tmp_path / name))


def test_an_id_is_there_once_whether_text_or_number(tmp_path: Path) -> None:
    ids = ["42", 7, 42, "x", "042", 7, "x"]
    error = refusal(write_jsonl(tmp_path / "items.jsonl", [{"item_id": i, "sid": [1]} for i in ids]))
    assert error.problems == [
        "items.jsonl:3: item 42 is there twice, first at items.jsonl:1",
        "items.jsonl:6: item 7 is there twice, first at items.jsonl:2",
        "items.jsonl:7: item 'x' is there twice, first at items.jsonl:4",
    ]
    assert str(error) == f"items.jsonl has 3 problems, the first: {error.problems[0]}"
    numbers = write_jsonl(tmp_path / "numbers.jsonl", [{"item_id": i, "sid": [1]} for i in [5, 3, 5, 5]])
    assert refusal(numbers).problems == [
        f"numbers.jsonl:{line}: item 5 is there twice, first at numbers.jsonl:1" for line in (3, 4)
    ]


def test_twenty_problems_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "items.jsonl", [{"item_id": i} for i in range(1, 31)])
    error = refusal(path)
    assert error.problems[:20] == [f"items.jsonl:{line}: item {line} has no sid" for line in range(1, 21)]
    assert error.problems[20:] == ["... and 10 more"]
    ids = write_jsonl(tmp_path / "ids.jsonl", [{"item_id": i % 40, "sid": [99, i]} for i in range(45)])
    listed = refusal(ids, vocab_size=30).problems
    # 45 first tokens, 15 second ones and 5 duplicates, each kind found on its own, listed by line
    assert listed[0] == "ids.jsonl:1: item 0: level 0: token id 99 is outside the vocabulary of 30 tokens"
    assert len(listed) == 21 and listed[-1] == "... and 45 more"


@pytest.mark.parametrize(
    ("header", "sids", "known", "problems"),
    [
        (None, [[5], [-1, 3]], {}, ["items.jsonl:2: item 1: level 0: token id -1 is negative"]),
        (
            None,
            [[5], [6, 8]],
            {"vocab_size": 8},
            ["items.jsonl:2: item 1: level 1: token id 8 is outside the vocabulary of 8 tokens"],
        ),
        (
            None,
            [[5], [2**31]],
            {},
            ["items.jsonl:2: item 1: level 0: token id 2147483648 is above 2147483647"],
        ),
        (
            None,
            [["<a_0>", "<b_0>"], ["<a_9>"], ["<a_1>", "<b_1>"]],
            {"token_id": TOKENS.get, "vocab_size": 30},
            [
                "items.jsonl:2: item 1: level 0: the tokenizer has no token '<a_9>'",
                "items.jsonl:3: item 2: level 1: token '<b_1>' is token id 99, outside the vocabulary of 30 tokens",
            ],
        ),
        (
            {"levels": LEVELS},
            [[0, 0], [2**63 - 1, 2]],
            {},
            ["items.jsonl:2: item 1: level 0: code 9223372036854775807 is above 2147483647"],
        ),
        ({"levels": LEVELS}, [[0, 0], [1, -2]], {}, ["items.jsonl:2: item 1: level 1: code -2 is negative"]),
        (
            {"levels": LEVELS},
            [[0, 0], [0, 9]],
            {"vocab_size": 29},
            ["items.jsonl:2: item 1: level 1: code 9 is token id 29, outside the vocabulary of 29 tokens"],
        ),
        (
            {"levels": [{"first_token_id": 10, "codes": 4}]},
            [[4], [3], [-1]],
            {},
            [
                "items.jsonl:1: item 0: level 0: code 4 is outside the declared codebook of 4 codes",
                "items.jsonl:3: item 2: level 0: code -1 is outside the declared codebook of 4 codes",
            ],
        ),
        (
            {"levels": [{"token": "<a_{code}>"}]},
            [[0], [7]],
            {"token_id": TOKENS.get},
            ["items.jsonl:2: item 1: level 0: the tokenizer has no token '<a_7>'"],
        ),
        (
            {"levels": [{"token": "<a_{code}>", "codes": 2}]},
            [["<a_0>"], ["<b_0>"]],
            {"token_id": TOKENS.get},
            ["items.jsonl:2: item 1: level 0: token '<b_0>' is outside the declared codebook of 2 codes"],
        ),
        (
            {"sid": "token_ids", "levels": [{"first_token_id": 10, "codes": 2}]},
            [[12], [11]],
            {},
            ["items.jsonl:1: item 0: level 0: token id 12 is outside the declared codebook of 2 codes"],
        ),
        (
            {"levels": LEVELS},
            [[0, 0], [0, 0, 0]],
            {},
            ["items.jsonl:2: item 1: sid has 3 levels; the header declares 2"],
        ),
        (None, [[1], [1] * 33], {}, ["items.jsonl:2: item 1: sid has 33 levels; a sid may have 1 to 32"]),
    ],
)
def test_bad_codes_and_tokens(
    tmp_path: Path, header: Any, sids: Any, known: dict[str, Any], problems: list[str]
) -> None:
    if header is not None:
        write_header(tmp_path, header)
    path = write_jsonl(tmp_path / "items.jsonl", [{"item_id": i, "sid": sid} for i, sid in enumerate(sids)])
    assert refusal(path, **known).problems == problems


def test_thirty_two_levels_are_allowed(tmp_path: Path) -> None:
    catalog = Catalog.load(write_jsonl(tmp_path / "items.jsonl", [{"item_id": 1, "sid": list(range(32))}]))
    assert (catalog.depth, catalog.token_ids(0)) == (32, list(range(32)))


@pytest.mark.parametrize(
    ("header", "sid", "message"),
    [
        ("{", [1], "catalog.json: not valid JSON: it ends too early"),
        ({"sids": "codes"}, [1], "catalog.json: unknown field 'sids'; did you mean 'sid'?"),
        ({"sid": "strings"}, [1], "catalog.json: sid: 'strings' is none of: codes, token_ids, tokens"),
        ({"sid": "codes"}, [1], "SIDs given as codes need `levels`, which map them to tokens"),
        ({"sid": "tokens"}, [1], "says that SIDs are tokens, but items.jsonl gives them as integers"),
        ({"sid": "token_ids"}, ["<a_0>"], "says that SIDs are token_ids, but items.jsonl gives them as strings"),
        ({"levels": []}, [1], "levels: expected array of length >= 1"),
        ({"levels": [{"first_token_id": 0}] * 33}, [1], "levels: expected array of length <= 32"),
        ({"levels": [{}]}, [1], "levels[0]: a level has either `token` or `first_token_id`"),
        ({"levels": [{"token": "<a>"}]}, [1], "levels[0]: `token` must hold {code} once, as in <a_{code}>"),
        ({"levels": [{"first_token_id": 1, "codes": 0}]}, [1], "levels[0].codes: expected int >= 1"),
        ({"levels": LEVELS}, [1], "the header declares 2 levels, but the longest sid has 1"),
        (
            {"levels": [{"token": "<a_{code}>"}]},
            ["<a_0>"],
            "levels[0]: with SIDs given as tokens a level declares its codebook: `token` and `codes`",
        ),
        (
            {"sid": "token_ids", "levels": [{"token": "<a_{code}>", "codes": 2}]},
            [10],
            "levels[0]: with SIDs given as token_ids a level declares its codebook: `first_token_id` and `codes`",
        ),
        (
            {"levels": [{"token": "<a_{code}>", "codes": 5}]},
            [0],
            "level 0: 3 of the 5 declared codes cannot be used, for example: the tokenizer has no token '<a_2>'",
        ),
        (
            {"order": {"column": "rnak"}},
            [1],
            "order.column: no metadata column 'rnak' (did you mean 'rank'?); there are: rank, mixed, deep",
        ),
        ({"order": {"column": "mixed"}}, [1], "order.column: cannot sort by 'mixed': "),
        ({"order": {"column": "deep"}}, [1], "order.column: cannot sort by 'deep': "),
    ],
)
def test_bad_headers(tmp_path: Path, header: Any, sid: list[Any], message: str) -> None:
    (tmp_path / "catalog.json").write_text(header if isinstance(header, str) else json.dumps(header))
    rows = [{"item_id": i, "sid": sid, "rank": 1, "mixed": [1, "a"][i], "deep": {"a": 1}} for i in range(2)]
    error = refusal(write_jsonl(tmp_path / "items.jsonl", rows), token_id=TOKENS.get)
    assert str(error).startswith("catalog.json")
    assert message in str(error)


def test_two_codes_with_one_token(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "items.jsonl", [{"item_id": i, "sid": [sid]} for i, sid in enumerate(["<a_0>", "<c_0>"])]
    )
    assert str(refusal(path, token_id=TOKENS.get)) == (
        "items.jsonl: level 0: token '<a_0>' and token '<c_0>' are the same token 10"
    )


def test_tokens_that_the_tokenizer_lacks_are_said_once_where_they_are_many(tmp_path: Path) -> None:
    """Beside what else is wrong; a few are named each."""

    def refused(items: int) -> list[str]:
        rows = [{"item_id": i, "sid": [f"<a_{i % 2}>", f"<z_{i % 40}>"]} for i in range(items)]
        path = write_jsonl(tmp_path / "items.jsonl", rows)
        return refusal(path, token_id=TOKENS.get, vocab_size=11).problems

    few, many = refused(3), refused(300)
    assert [line for line in few if "no token" in line] == [
        f"items.jsonl:{i + 1}: item {i}: level 1: the tokenizer has no token '<z_{i}>'" for i in range(3)
    ]
    lost = [line for line in many if "tokenizer" in line]
    assert len(lost) == 1 and "SIDs of 300 items have tokens that the tokenizer lacks, 40 of all levels" in lost[0]
    assert "no token '<z_0>'" in lost[0] and "added_tokens.json" in lost[0] and "docs/catalogs.md" in lost[0]
    assert sum("outside the vocabulary" in line for line in many) == 19 and many[-1] == "... and 131 more"


def test_bad_minionerec(tmp_path: Path) -> None:
    path = tmp_path / "Toys.index.json"
    path.write_text('{"1": ["<a_0>"], "2": [], "3": "<a_0>", "": ["<a_0>"], "4": [1]}')
    assert refusal(path).problems == [
        "Toys.index.json: item '2' has no sid",
        f"Toys.index.json: item '3': {NOT_A_SID} \"<a_0>\"",
        "Toys.index.json: item_id is empty",
        "Toys.index.json: item '4': sid holds integers, those before it strings",
    ]
    path.write_text('{"1": ["<a_0>"], "2": ["<a_0>"], "1": ["<b_0>"]}')
    assert refusal(path).problems == ["Toys.index.json: '1' is there twice"]
    write_minionerec(tmp_path, [{"item_id": i, "sid": ["<a_0>"], "title": "t"} for i in range(3)])
    path.write_text('{"0": ["<a_0>"], "1": ["<a_9>"]}')
    assert refusal(path).problems == ["Toys.item.json: item '2' has no sid in Toys.index.json"]
    (tmp_path / "Toys.item.json").write_text('{"0": "a title", "1": {"sid": 3}}')
    assert refusal(path).problems == [
        "Toys.item.json: item '0': metadata must be an object, not \"a title\"",
        "Toys.item.json: item '1': a column cannot be called item_id or sid",
    ]
    (tmp_path / "Toys.item.json").unlink()
    assert refusal(path, token_id=TOKENS.get).problems == [
        "Toys.index.json: item '1': level 0: the tokenizer has no token '<a_9>'"
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"5": 1, "x": 2}', "sid2pid.json: key 'x' is not a packed SID: a number from 0 to 8192**3 - 1"),
        ('{"5": 1, "549755813888": 2}', "sid2pid.json: key '549755813888' is not a packed SID"),
        ('{"5": 1, "-1": 2}', "sid2pid.json: key '-1' is not a packed SID"),
        ('{"5": 1, "6": []}', "sid2pid.json: key '6' has no items"),
        ('{"5": 1, "6": null}', "sid2pid.json: key '6' has no items"),
        ('{"5": 1, "6": [[7, 100, 3]]}', "key '6' must give an item id or a list of item ids, but holds [7, 100, 3]"),
        ('{"5": 1, "6": [{"pid": 7}]}', "key '6' must give an item id or a list of item ids, but holds {\"pid\": 7}"),
        ('{"5": 1, "6": {"pid": 7}}', "key '6' must give an item id or a list of item ids, but holds {\"pid\": 7}"),
        ('{"5": 1, "6": [7, null]}', "key '6' must give an item id or a list of item ids, but holds null"),
        ('{"5": 1, "6": true}', "key '6' must give an item id or a list of item ids, but holds true"),
        ('{"5": 1, "6": 2.5}', "key '6' must give an item id or a list of item ids, but holds 2.5"),
        ('{"5": 1, "6": NaN}', "sid2pid.json: not JSON: invalid character (byte 14)"),
        ('{"5": 1, "5": 2}', "sid2pid.json: '5' is there twice"),
        ('{"5": 1, "6": ["1"]}', "sid2pid.json: key '6': item '1' is there twice, first at sid2pid.json: key '5'"),
        ('{"5": 1, "6": 2', "sid2pid.json: not JSON: it ends too early"),
        (r'{"5": 1, "6": "\ud800 "}', "sid2pid.json: not JSON: "),
        ("[1, 2]", "sid2pid.json: a .json catalog is one object; name a file of one object a line .jsonl"),
        ("{}", "sid2pid.json holds no items"),
    ],
)
def test_bad_packed(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "sid2pid.json").write_text(content)
    write_header(tmp_path, {"levels": [{"first_token_id": 0}] * 3})
    error = refusal(tmp_path / "sid2pid.json")
    assert len(error.problems) == 1
    assert problem in error.problems[0]


@pytest.mark.parametrize("header", [None, {"levels": LEVELS}, {"sid": "token_ids", "levels": [*LEVELS, *LEVELS[:1]]}])
def test_packed_needs_a_level_mapping(tmp_path: Path, header: Any) -> None:
    (tmp_path / "sid2pid.json").write_text('{"5": 1}')
    if header is not None:
        write_header(tmp_path, header)
    message = str(refusal(tmp_path / "sid2pid.json"))
    assert message.startswith("sid2pid.json: packed SIDs do not say which tokens they are: put a header")
    assert '{"first_token_id": 151669, "codes": 8192}' in message


def test_a_catalog_called_catalog_json_is_not_its_own_header(tmp_path: Path) -> None:
    (tmp_path / "catalog.json").write_text('{"5": 1}')
    assert str(refusal(tmp_path / "catalog.json")).startswith("catalog.json: packed SIDs do not say which tokens")


@pytest.mark.parametrize("shown", ["shop/items.parquet", "s3://bucket/shop/items.parquet"])
def test_messages_call_a_file_as_it_was_named(tmp_path: Path, shown: str) -> None:
    """And what lies beside it alike."""
    folder = shown.removesuffix("items.parquet")
    path = write_parquet(tmp_path / "items.parquet", [{"item_id": 1, "sid": [1]}] * 2, {"levels": LEVELS[:1]})
    twice = refusal(path, shown=shown)
    assert twice.problems == [f"{shown} row 1: item 1 is there twice, first at {shown} row 0"]
    write_header(tmp_path, {"levels": LEVELS})
    assert str(refusal(path, shown=shown)).startswith(f"{folder}catalog.json and {shown} (schema metadata) say")
    write_header(tmp_path, {"sidd": 1})
    assert str(refusal(path, shown=shown)).startswith(f"{folder}catalog.json: unknown field 'sidd'")
    rows = [{"item_id": "x", "sid": ["<a_0>"], "title": "X"}]
    mini = write_minionerec(tmp_path, rows)
    mini.write_text("{}")
    write_header(tmp_path, {})
    (problem,) = refusal(mini, shown=f"{folder}Toys.index.json").problems
    assert problem == f"{folder}Toys.item.json: item 'x' has no sid in {folder}Toys.index.json"


def test_files_that_are_no_catalog(tmp_path: Path) -> None:
    missing = refusal(tmp_path / "no.jsonl", shown="shop/no.jsonl")
    assert str(missing) == "cannot read shop/no.jsonl: No such file or directory"
    assert str(refusal(tmp_path, shown="shop")) == "shop is a folder; a catalog is one file"
    (tmp_path / "items.csv").write_text("item_id,sid\n")
    assert str(refusal(tmp_path / "items.csv")).startswith("items.csv: not a known catalog format; name it .parquet")
    for name in ("empty.jsonl", "blank.jsonl"):
        (tmp_path / name).write_text("\n \n" if name == "blank.jsonl" else "")
        assert str(refusal(tmp_path / name)) == f"{name} holds no items"
    pq.write_table(
        pa.table({"item_id": pa.array([], pa.int64()), "sid": pa.array([], pa.list_(pa.int32()))}),
        tmp_path / "x.parquet",
    )
    assert str(refusal(tmp_path / "x.parquet")) == "x.parquet holds no items"
    (tmp_path / "x.index.json").write_text("{}")
    assert str(refusal(tmp_path / "x.index.json")) == "x.index.json holds no items"
    good = write_jsonl(tmp_path / "items.jsonl", [{"item_id": 1, "sid": [1]}])
    assert "cannot be named 'none'" in str(refusal(good, name="none"))
