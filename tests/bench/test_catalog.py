"""bench/catalog.py from end to end on a tiny model, and the other ways that it compares with."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import gathering
import numpy as np
import report
from random_catalog import make_catalog, random_sids, skewed_sids, write_catalog

from widebeam.constraints.catalog import Catalog

BENCH = Path(__file__).resolve().parents[2] / "bench"
CODES, FIRST = 16, 20


def script(name: str) -> ModuleType:
    """A benchmark whose plain name another module has, too."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_catalog_of_arrays_is_the_one_that_the_loader_makes(tmp_path: Path) -> None:
    sids = random_sids(300, 3, CODES)
    assert len(set(map(tuple, sids.tolist()))) == len(sids) > 250
    made = make_catalog(sids, CODES, FIRST)
    loaded = Catalog.load(write_catalog(tmp_path / "items.parquet", 300, 3, CODES, FIRST))
    for item in range(len(sids)):
        row, other = made.row_of(item), loaded.row_of(item)
        assert row is not None and row == other
        assert made.item_id(row) == loaded.item_id(row) == item
        assert made.token_ids(row) == loaded.token_ids(row) == [FIRST + CODES * k + c for k, c in enumerate(sids[item])]
        assert made.metadata(row, ["group"]) == loaded.metadata(row, ["group"]) == {"group": item % 100}
    assert made.index.nbytes == loaded.index.nbytes
    assert np.array_equal(made.index.first_child, loaded.index.first_child)


def test_the_other_ways_see_the_same_children() -> None:
    sids = random_sids(400, 3, CODES)
    catalog = make_catalog(sids, CODES, FIRST)
    starts = [FIRST + CODES * level for level in range(3)]
    peer = gathering.DictTrie(sids, starts, FIRST + 3 * CODES)
    edge_E = gathering.edges(catalog, CODES)
    for level in (0, 1, 2):
        prefixes = gathering.prefixes_of(catalog, level, 9)
        mask = peer.mask(prefixes)
        for prefix, legal_V in zip(prefixes, mask, strict=True):
            wanted = {int(sid[level]) + starts[level] for sid in sids if sid[:level].tolist() == prefix}
            assert set(legal_V.nonzero().flatten().tolist()) == wanted and wanted
    index = catalog.index
    for child in range(1, index.num_nodes):
        parent = int(np.searchsorted(index.first_child, child, side="right")) - 1
        assert int(edge_E[child - 1]) == parent * CODES + index.code[child]


def test_a_wide_enough_top_list_loses_nothing_and_a_narrow_one_does() -> None:
    catalog = make_catalog(random_sids(400, 3, CODES), CODES, FIRST)
    trie = gathering.on_device(catalog)
    edge_E = gathering.edges(catalog, CODES)
    whole = gathering.shares(catalog, trie, CODES // 2, CODES, edge_E)
    assert whole == {"width": 8, "exact": 8, "top_then_filter": 1.0}
    assert gathering.shares(catalog, trie, 1, CODES, edge_E)["top_then_filter"] in (0.0, 1.0)
    assert gathering.shares(catalog, trie, 2, CODES, edge_E)["exact"] == 2


def test_skewed_rows_cost_what_their_children_cost() -> None:
    codes = 256
    catalog = make_catalog(skewed_sids(codes), codes, FIRST)
    trie = gathering.on_device(catalog)
    cost = gathering.level_costs(catalog, trie, 1, codes, codes)
    assert cost["children"] == 2 * codes - 1
    assert cost["slots"] <= codes * codes / 8  # of rows times the widest


def test_everything_is_measured_and_written(checkpoint: Path, tmp_path: Path) -> None:
    bench: Any = script("catalog")
    chosen = bench.options().parse_args(
        [str(checkpoint), "--sizes", "0.3k", "--codes", "16", "--rows", "4", "16", "--context", "20", "--width", "16",
         "--seconds", "0.2"]
    )  # fmt: skip
    made = bench.run(chosen)
    report.save(tmp_path / "made.json", made, bench.markdown(made))
    read = json.loads((tmp_path / "made.json").read_text())
    assert list(read["catalogs"]) == ["0.3k", "skewed"]
    for name, one in read["catalogs"].items():
        assert [(cost["level"], cost["rows"]) for cost in one["levels"]] == [(1, 4), (1, 16), (2, 4), (2, 16)]
        for cost in one["levels"]:
            assert 0 < cost["children"] <= cost["slots"]
            assert min(value for key, value in cost.items() if key.endswith("_ms")) > 0
            assert {"gathering_ms", "with_selection_ms", "dictionary_ms", "top_then_filter_ms"} < cost.keys()
        assert [share["exact"] for share in one["shares"]] == [4, 16]
        assert (one["load_s"] is None) == (name == "skewed")
    engine = read["engine"]
    assert engine["items"] == read["catalogs"]["0.3k"]["items"]
    returned = {kind: one["returned"] for kind, one in engine["filters"].items()}
    assert returned["none"] == 16 and returned["deny 1000"] == 0 and 0 < returned["where"] <= 3
    updates = engine["updates"]
    assert len(updates["changes"]) == 3 and min(updates[loop]["searches"] for loop in ("quiet", "during")) > 0
    for change in updates["changes"]:
        assert change["first_answer_s"] > 0 and change["returned_s"] > 0
    made_md = (tmp_path / "made.md").read_text()
    assert "| catalog |" in made_md and "| update |" in made_md
