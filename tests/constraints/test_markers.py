"""Begin and end markers: files may spell them, the tree never has them, and a wrong one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.constraints.catalog_files import write_header, write_jsonl, write_packed, write_parquet
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.codebooks import Vocabulary
from widebeam.constraints.markers import Markers
from widebeam.constraints.report import inspect
from widebeam.constraints.updates import updated
from widebeam.errors import CatalogError, InvalidRequest

TOKENS = {"<begin>": 90, "<end>": 91, **{f"<{level}_{code}>": 10 * place + code for place, level in enumerate("abc")
                                         for code in range(9)}}  # fmt: skip
LEVELS = [{"token": f"<{level}_{{code}}>", "codes": 9} for level in "abc"]
WRITERS = {"jsonl": write_jsonl, "parquet": write_parquet}


def load(path: Path, header: Any) -> Catalog:
    write_header(path.parent, header)
    return Catalog.load(path, token_id=TOKENS.get, vocab_size=100)


sids = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3), min_size=1, max_size=12)


@pytest.mark.parametrize("form", ["tokens", "token_ids"])
@pytest.mark.parametrize("format", WRITERS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sids=sids, spelled=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=12, max_size=12))
def test_spelled_or_not_the_catalog_is_the_same(
    form: str, format: str, sids: list[list[int]], spelled: list[tuple[bool, bool]], tmp_path: Path
) -> None:
    names = [[f"<{'abc'[level]}_{code}>" for level, code in enumerate(sid)] for sid in sids]
    written = [
        ["<begin>"] * front + sid + ["<end>"] * behind for sid, (front, behind) in zip(names, spelled, strict=False)
    ]
    ids = [[TOKENS[name] for name in sid] for sid in names]
    values: Any = written if form == "tokens" else [[TOKENS[name] for name in sid] for sid in written]
    path = WRITERS[format](tmp_path / f"items.{format}", [{"item_id": i, "sid": v} for i, v in enumerate(values)])
    for markers in ({"begin": "<begin>", "end": "<end>"}, {"begin": 90, "end": 91}):
        if form == "tokens" and isinstance(markers["begin"], int):
            continue  # a file of strings spells strings
        catalog = load(path, {"sid": form, **markers})
        assert catalog.markers == Markers(90, 91)
        for item, sid in enumerate(ids):
            row = catalog.row_of(item)
            assert row is not None and catalog.token_ids(row) == sid
        assert catalog.depth == max(map(len, ids))
        assert not {90, 91} & set(np.concatenate(catalog.level_token_ids).tolist())


def test_codes_are_codes(tmp_path: Path) -> None:
    """90 and 91 in a file of codes would be codes; the markers are still known."""
    path = write_packed(tmp_path / "sid2pid.json", [{"item_id": 1, "sid": [1, 2, 3]}])
    catalog = load(path, {"sid": "codes", "levels": LEVELS, "begin": 90, "end": "<end>"})
    assert (catalog.markers, catalog.depth, catalog.token_ids(0)) == (Markers(90, 91), 3, [1, 12, 23])
    report = inspect(catalog)
    assert (report.begin, report.end) == (90, "<end>")
    assert "codes (declared); begin 90; end <end>\n" in report.text()


def test_a_prompt_is_opened_once() -> None:
    prompt = np.array([3, 4], np.int32)
    markers = Markers(begin=7)
    assert markers.opened(prompt).tolist() == [3, 4, 7] == markers.opened(markers.opened(prompt)).tolist()
    assert markers.opened(prompt).dtype == np.int32
    assert Markers(end=7).opened(prompt) is prompt


def test_without_a_tokenizer_strings_are_not_resolved(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "items.jsonl", [{"item_id": 1, "sid": [1, 2]}])
    for begin, resolved in (("<begin>", False), (90, True)):
        write_header(tmp_path, {"begin": begin})
        catalog = Catalog.load(path, vocab_size=100)
        assert catalog.resolved == catalog.markers.resolved == resolved


@pytest.mark.parametrize(
    ("header", "sid", "message"),
    [
        ({"begin": "<none>"}, ["<a_1>"], "begin: the tokenizer has no token '<none>'"),
        ({"end": 100}, ["<a_1>"], "end: token 100 is outside the vocabulary of 100 tokens"),
        ({"end": "<a_1>"}, ["<a_1>", "<b_1>"], "end: token 1 is one of level 0"),
        ({"begin": "<begin>", "end": "<end>"}, ["<begin>", "<end>"], "item 7: sid has nothing but markers"),
        ({"begin": "<begin>"}, ["<begin>"], "item 7: sid has nothing but markers"),
        ({"begin": ""}, ["<a_1>"], "begin"),
        ({"end": -1}, ["<a_1>"], "end"),
    ],
)
def test_wrong_markers_are_refused(header: Any, sid: list[str], message: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "items.jsonl", [{"item_id": 7, "sid": sid}])
    with pytest.raises(CatalogError) as refused:
        load(path, header)
    assert message in str(refused.value)


@pytest.mark.parametrize("form", ["tokens", "token_ids"])
@pytest.mark.parametrize("file_spells", [False, True])
def test_updates_count_the_levels_between_markers(form: str, file_spells: bool, tmp_path: Path) -> None:
    def spelled(text: str) -> list[Any]:
        """B and E for the markers, otherwise level and code."""
        named = {"B": "<begin>", "E": "<end>"}
        names = [named.get(one) or f"<{one[0]}_{one[1]}>" for one in text.split()]
        return names if form == "tokens" else [TOKENS[name] for name in names]

    inner = ["a1 b1 c1", "a2 b2 c2"]
    file = [f"B {sid} E" if file_spells else sid for sid in inner]
    path = write_jsonl(tmp_path / "items.jsonl", [{"item_id": i, "sid": spelled(sid)} for i, sid in enumerate(file)])
    catalog = load(path, {"sid": form, "begin": "<begin>", "end": "<end>"})
    assert catalog.sid_lengths == {3}
    vocabulary = Vocabulary(TOKENS.get, 100)
    for sid in ("a1 b1 c1", "B a1 b1 c1 E", "B a1 b1 c1", "a1 b1 c1 E"):
        changed = updated(catalog, [{"item_id": 7, "sid": spelled(sid)}], [], vocabulary)
        row = changed.row_of(7)
        assert row is not None and changed.token_ids(row) == [1, 11, 21]
    for sid, kind in (
        ("a1 b1 c1 a2 b2", "depth_mismatch"),
        ("B a1 b1 c1 a2", "depth_mismatch"),
        ("B a1 b1 c1 a2 E", "depth_mismatch"),
        ("B a1 E", "depth_mismatch"),
        ("B a1 b1 E", "depth_mismatch"),
        ("B B a1 b1 c1", "depth_mismatch"),
        ("B E", "invalid_item"),
        ("B B a1 b1", "invalid_item"),  # from here on a marker would be one of the three levels
        ("a1 B c1", "invalid_item"),
        ("a1 E c1", "invalid_item"),
        ("E b1 c1", "invalid_item"),
        ("a1 b1 B", "invalid_item"),
        ("B a1 b1 E E", "invalid_item"),
    ):
        rows = [{"item_id": 7, "sid": spelled("a1 b1 c1")}, {"item_id": 8, "sid": spelled(sid)}]
        with pytest.raises(InvalidRequest) as refused:
            updated(catalog, rows, [], vocabulary)
        assert (refused.value.code, refused.value.param) == (kind, "upsert[1].sid"), sid
