"""What `widebeam catalog inspect` and `validate` say, against counting by hand and against the real device arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.constraints.catalog_files import write_header, write_jsonl, write_minionerec
from widebeam.constraints.arena import CatalogArena
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.report import Collisions, inspect
from widebeam.constraints.validation import validate
from widebeam.engine.staging import Places

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """3000 items of 2 to 4 levels, unevenly spread over declared codebooks, many of them sharing a SID."""
    folder = tmp_path_factory.mktemp("report")
    rng = np.random.default_rng(2)
    sids = [(rng.geometric(0.15, 4) % 40)[: rng.integers(2, 5)].tolist() for _ in range(3000)]
    levels = [{"first_token_id": 100 * level, "codes": 40} for level in range(4)]
    write_header(folder, {"sid": "codes", "levels": levels, "max_items_per_sid": 5})
    return Catalog.load(write_jsonl(folder / "items.jsonl", [{"item_id": i, "sid": sid} for i, sid in enumerate(sids)]))


def test_levels_and_collisions_are_counted(catalog: Catalog) -> None:
    report = inspect(catalog)
    sids = [tuple(map(int, catalog.sid(row))) for row in range(catalog.num_items)]
    for level, measured in enumerate(report.levels):
        children: dict[tuple[int, ...], set[int]] = {}
        for sid in sids:
            if len(sid) > level:
                children.setdefault(sid[:level], set()).add(sid[level])
        counts = sorted(map(len, children.values()))
        used = set().union(*children.values())
        assert (measured.codes_in_use, measured.codes_unused) == (len(used), 40 - len(used))
        assert measured.mean_children == pytest.approx(sum(counts) / len(counts))
        assert (measured.min_children, measured.max_children) == (counts[0], counts[-1])
        for share, quantile in ((0.5, measured.median_children), (0.99, measured.p99_children)):
            assert quantile in counts
            assert sum(count < quantile for count in counts) / len(counts) <= share
            assert sum(count <= quantile for count in counts) / len(counts) >= share
    per_sid = [sids.count(sid) for sid in set(sids)]
    histogram = {count: per_sid.count(count) for count in sorted(set(per_sid))}
    assert msgspec.to_builtins(report.collisions) == {
        "shared_sids": sum(count > 1 for count in per_sid),
        "shared_items": sum(count for count in per_sid if count > 1),
        "largest": max(per_sid),
        "items_per_sid": histogram,
    }
    assert set(report.depths) == {2, 3, 4} and report.max_items_per_sid == 5
    assert "of which at most 5 are returned" in report.text()
    assert msgspec.json.decode(msgspec.json.encode(report))["collisions"]["largest"] == max(per_sid)


def test_a_long_histogram_is_folded() -> None:
    shares = {1: 10, 2: 4, 3: 2, 4: 1, 7: 1, 8: 2, 900: 1}
    text = Collisions(shared_sids=11, shared_items=941, largest=900, items_per_sid=shares).text()
    assert text.endswith("10 of 1, 4 of 2, 2 of 3, 2 of 4-7, 2 of 8-15, 1 of 512-1023")


def test_memory_is_what_the_device_arrays_take(catalog: Catalog) -> None:
    arena = CatalogArena(1 << 20, CPU)
    arena.reserve(catalog)
    arena.upload(catalog)
    levels = [arena.trie(catalog).level(level, Places(CPU)) for level in range(catalog.depth)]
    nodes = sum(array[: arena.used].nbytes for array in arena.nodes)
    assert nodes > catalog.index.num_nodes
    assert inspect(catalog).device_bytes == nodes + sum(level.codebook_C.nbytes for level in levels)


def test_problems_have_a_line_or_a_row_and_a_reason(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"item_id": "a", "sid": [1]}, {"item_id": "b"}, {"item_id": "a", "sid": ["x"]}]
    found = validate(write_jsonl(tmp_path / "items.jsonl", rows))
    assert msgspec.to_builtins(found)["problems"] == [
        {"file": str(tmp_path / "items.jsonl"), "line": 2, "reason": "item 'b' has no sid"},
        {
            "file": str(tmp_path / "items.jsonl"),
            "line": 3,
            "reason": "item 'a': sid holds strings, those before it integers",
        },
    ]
    assert not found.fine and found.text().splitlines()[0] == f"{tmp_path}/items.jsonl:2: item 'b' has no sid"
    pq.write_table(pa.table({"item_id": [1, None, 3], "sid": [[1]] * 3}), tmp_path / "items.parquet")
    assert msgspec.to_builtins(validate(tmp_path / "items.parquet"))["problems"] == [
        {"file": str(tmp_path / "items.parquet"), "row": 1, "reason": "item_id is missing"}
    ]
    mini = validate(write_minionerec(tmp_path, [{"item_id": "x", "sid": []}]))
    assert msgspec.to_builtins(mini)["problems"] == [
        {"file": str(tmp_path / "Toys.index.json"), "reason": "item 'x' has no sid"}
    ]
    write_header(tmp_path, {"sidd": 1})
    (of_header,) = validate(tmp_path / "items.jsonl").problems
    assert of_header.file == str(tmp_path / "catalog.json") and "sidd" in of_header.reason
    (missing,) = validate(tmp_path / "nothing.jsonl").problems
    assert missing.file == str(tmp_path / "nothing.jsonl") and missing.reason.startswith("cannot read")


def test_problems_beyond_those_listed_are_counted(tmp_path: Path) -> None:
    found = validate(write_jsonl(tmp_path / "items.jsonl", [{"item_id": i} for i in range(50)]))
    assert (len(found.problems), found.more) == (20, 30)
    assert found.text().splitlines()[-1] == "... and 30 more"
