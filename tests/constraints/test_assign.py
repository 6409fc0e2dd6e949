"""SIDs for items that come after a build."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.constraints.builds import DIM, ITEMS, options, read
from widebeam.constraints import kmeans
from widebeam.constraints.assign import Assign, assign, json_lines
from widebeam.constraints.build import build
from widebeam.constraints.catalog import Catalog
from widebeam.errors import CatalogError, ConfigError


def assigned(folder: Path, embeddings: Path, **given: Any) -> dict[Any, list[int]]:
    table = assign(Assign(codebooks=str(folder), embeddings=str(embeddings), **given))
    return dict(zip(table.column("item_id").to_pylist(), table.column("sid").to_pylist(), strict=True))


def test_the_same_vectors_get_the_same_sids(
    built: Path, vectors: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order, in other company and in batches of another size."""
    monkeypatch.setattr(kmeans, "BLOCK", 1000)
    rows = np.random.default_rng(0).permutation(ITEMS)[:250]
    np.save(tmp_path / "some.npy", vectors[rows])
    (tmp_path / "ids.txt").write_text("".join(f"{row}\n" for row in rows))
    _, codes, _ = read(built)
    sids = assigned(built, tmp_path / "some.npy", ids=str(tmp_path / "ids.txt"))
    assert list(sids) == rows.tolist() and list(sids.values()) == codes[rows].tolist()


def test_numbers_of_rows_are_no_ids_of_other_items(built: Path, vectors: np.ndarray, tmp_path: Path) -> None:
    """They would be replaced. Where no id is the same, or the catalog is not there, rows are numbered."""
    new, folder = tmp_path / "new.npy", tmp_path / "made"
    np.save(new, vectors[:5])
    written = tmp_path / "out.parquet"
    for given in ({}, {"output": str(written)}):
        with pytest.raises(
            ConfigError, match=r"--ids is needed: new.npy has no ids, and 5 of its row numbers 0 to 4 are"
        ):
            assigned(built, new, **given)
    assert not written.exists()
    shutil.copytree(built, folder)
    table = pq.read_table(folder / "items.parquet")
    for ids in (pa.array([f"item-{row}" for row in range(ITEMS)]), pa.array(range(5, 5 + ITEMS))):
        pq.write_table(table.set_column(0, "item_id", ids), folder / "items.parquet")
        assert list(assigned(folder, new)) == [0, 1, 2, 3, 4]
    pq.write_table(table.set_column(0, "item_id", pa.array(range(4, 4 + ITEMS))), folder / "items.parquet")
    with pytest.raises(ConfigError, match="and 1 of its row numbers 0 to 4 are ids"):
        assigned(folder, new)
    (folder / "items.parquet").unlink()
    assert list(assigned(folder, new)) == [0, 1, 2, 3, 4]


def test_new_items_take_the_next_numbers_and_known_ones_keep_theirs(vectors: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "items.npy", vectors)
    build(options(tmp_path / "items.npy", tmp_path / "out", codes=64, dedup=True))
    _, codes, _ = read(tmp_path / "out")
    crowd = [0, *range(500, 520)]  # one vector, and so one SID but for the last code
    np.save(tmp_path / "new.npy", vectors[[510, 0, 3, 0, 519]])
    (tmp_path / "ids.txt").write_text("510\n9000\n9001\n9002\n0\n")  # 0 and 510 are known
    sids = assigned(tmp_path / "out", tmp_path / "new.npy", ids=str(tmp_path / "ids.txt"))
    taken = sum(sid[:3] == codes[0, :3].tolist() for sid in codes.tolist())
    assert taken >= len(crowd)
    assert sids[510] == codes[510].tolist() and sids[0] == codes[0].tolist()
    assert [sids[9000], sids[9002]] == [[*codes[0, :3].tolist(), taken + place] for place in (0, 1)]
    assert sids[9001][:3] == codes[3, :3].tolist()
    assert sids[9001] not in codes.tolist()
    np.save(tmp_path / "many.npy", np.tile(vectors[:1], (64, 1)))
    (tmp_path / "ids.txt").write_text("".join(f"new {row}\n" for row in range(64)))
    with pytest.raises(ConfigError, match="has 64 codes"):
        assigned(tmp_path / "out", tmp_path / "many.npy", ids=str(tmp_path / "ids.txt"))
    (tmp_path / "out" / "items.parquet").unlink()
    with pytest.raises(CatalogError, match=r"items\.parquet is missing"):
        assigned(tmp_path / "out", tmp_path / "new.npy")


def test_assigned_items_are_a_catalog(built: Path, vectors: np.ndarray, tmp_path: Path) -> None:
    """As JSON lines and as parquet, with the header of the build."""
    table = pa.table({"item_id": ["x", "y"], "e": list(vectors[:2]), "title": ["X", None]})
    pq.write_table(table, tmp_path / "new.parquet")
    found = assign(Assign(codebooks=str(built), embeddings=str(tmp_path / "new.parquet")))
    (tmp_path / "lines.jsonl").write_text("".join(f"{line}\n" for line in json_lines(found)))
    assigned(built, tmp_path / "new.parquet", output=str(tmp_path / "sids.parquet"))
    (tmp_path / "catalog.json").write_bytes((built / "catalog.json").read_bytes())
    for name in ("lines.jsonl", "sids.parquet"):
        catalog = Catalog.load(tmp_path / name)
        row = catalog.row_of("x")
        assert row is not None and catalog.sid(row) == read(built)[1][0].tolist()
        assert catalog.metadata(row, ["title"]) == {"title": "X"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "catalog.json", "lines.jsonl", "new.parquet", "sids.parquet",
    ]  # fmt: skip


def test_what_is_written_means_the_same_anywhere(
    built: Path, vectors: np.ndarray, tmp_path: Path, token_of: Callable[[str], int]
) -> None:
    """Alone in a folder, a file is read as beside the build's catalog.json, with what that says now."""
    folder, np_file = tmp_path / "made", tmp_path / "new.npy"
    shutil.copytree(built, folder)
    np.save(np_file, vectors[:5])
    header = json.loads((folder / "catalog.json").read_text()) | {"template": {"prefix": "watched "}, "version": 4}
    (folder / "catalog.json").write_text(json.dumps(header))
    (tmp_path / "ids.txt").write_text("0\n1\n2\n3\n4\n")
    assigned(folder, np_file, ids=str(tmp_path / "ids.txt"), output=str(tmp_path / "alone" / "assigned.parquet"))
    shutil.copy(folder / "items.parquet", tmp_path / "alone")
    wanted = Catalog.load(folder / "items.parquet", token_id=token_of)
    assert wanted.template is not None and wanted.header.version == 4
    for name in ("items.parquet", "assigned.parquet"):
        alone = Catalog.load(tmp_path / "alone" / name, token_id=token_of)
        assert (alone.sid_form, alone.warnings, alone.header.version) == ("codes", (), None)
        for item in range(5):
            row, same = alone.row_of(item), wanted.row_of(item)
            assert row is not None and same is not None
            assert alone.token_ids(row) == wanted.token_ids(same)
        assert (alone.template == wanted.template) is (name == "assigned.parquet")


def test_assign_refuses_what_does_not_fit(built: Path, npy: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.zeros((3, DIM + 1)))
    with pytest.raises(ConfigError, match=r"wide.npy has 17 dimensions, the codebooks in .* 16"):
        assigned(built, tmp_path / "wide.npy")
    with pytest.raises(ConfigError, match="is no folder of `widebeam catalog build`"):
        assigned(tmp_path, npy)
    (tmp_path / "build.json").write_bytes((built / "build.json").read_bytes())
    np.save(tmp_path / "codebooks.npy", np.zeros((47, DIM), np.float32))
    with pytest.raises(ConfigError, match=r"codebooks.npy is not what build.json says: it is float32 \[47, 16\]"):
        assigned(tmp_path, npy)
