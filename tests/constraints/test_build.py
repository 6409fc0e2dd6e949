"""From embeddings to a catalog that is served: every file that is written is read again by other means."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.constraints.builds import DIM, ITEMS, options, read
from widebeam.config import EngineConfig
from widebeam.constraints import kmeans
from widebeam.constraints.build import BuildReport, build
from widebeam.constraints.catalog import Catalog
from widebeam.engine.engine import Engine
from widebeam.errors import CatalogError, ConfigError

cluster = pytest.importorskip("sklearn.cluster")
FILES = ["added_tokens.json", "build.json", "catalog.json", "codebooks.npy", "items.parquet"]


def left_over(vectors: np.ndarray, codes: np.ndarray, books: list[np.ndarray], levels: int) -> np.ndarray:
    """float64: vectors minus the sum of their centroids."""
    left = vectors.astype(np.float64)
    for level in range(levels):
        left -= books[level][codes[:, level]]
    return left


# The quantiser


def test_every_code_is_the_nearest_and_the_error_falls_as_reported(built: Path, vectors: np.ndarray) -> None:
    ids, codes, books = read(built)
    report = json.loads((built / "build.json").read_text())
    assert ids == list(range(ITEMS)) and codes.shape == (ITEMS, 3) and [len(book) for book in books] == [16] * 3
    errors = [np.square(vectors - vectors.mean(axis=0)).sum() / ITEMS]
    for level in range(3):
        left = left_over(vectors, codes, books, level)
        distances = np.linalg.norm(left[:, None] - books[level], axis=2)
        chosen = distances[np.arange(ITEMS), codes[:, level]]
        np.testing.assert_allclose(chosen, distances.min(axis=1), rtol=1e-6)
        errors.append(np.square(chosen).sum() / ITEMS)
        assert report["levels"][level]["codes_in_use"] == len(set(codes[:, level].tolist()))
        assert report["levels"][level]["largest"] == max(Counter(codes[:, level].tolist()).values())
    assert [report["variance"], *(level["error"] for level in report["levels"])] == pytest.approx(errors, rel=1e-4)
    assert errors == sorted(errors, reverse=True) and errors[3] < errors[0] / 2


@pytest.mark.parametrize("backend", ["faiss", "scikit-learn"])
def test_one_level_has_the_inertia_of_scikit_learn(
    npy: Path, vectors: np.ndarray, tmp_path: Path, backend: kmeans.Backend
) -> None:
    if backend == "faiss":
        pytest.importorskip("faiss")
    report = build(options(npy, tmp_path, levels=1, codes=20, backend=backend))
    best = cluster.KMeans(20, n_init=20, random_state=0).fit(vectors).inertia_
    assert report.backend == backend
    assert report.levels[0].error * ITEMS == pytest.approx(best, rel=0.03)


def test_one_seed_gives_the_same_files(npy: Path, built: Path, tmp_path: Path) -> None:
    build(options(npy, tmp_path / "again"))
    build(options(npy, tmp_path / "other", seed=1))
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == FILES
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (built / name).read_bytes(), name
    assert (tmp_path / "other" / "codebooks.npy").read_bytes() != (built / "codebooks.npy").read_bytes()


def test_a_sample_trains_the_codebooks_of_all(npy: Path, vectors: np.ndarray, tmp_path: Path) -> None:
    report = build(options(npy, tmp_path, sample=200))
    _, codes, books = read(tmp_path)
    assert report.sample == 200 and len(codes) == ITEMS
    error = np.square(left_over(vectors, codes, books, 3)).sum() / ITEMS
    assert report.levels[2].error == pytest.approx(error, rel=1e-4)
    assert error < report.variance / 2


@pytest.mark.parametrize("balance", [False, True])
def test_vectors_are_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, balance: bool) -> None:
    vectors = np.random.default_rng(0).normal(size=(60_000, 128)).astype(np.float32)
    np.save(tmp_path / "items.npy", vectors)
    monkeypatch.setattr(kmeans, "BLOCK", 1 << 15)
    tracemalloc.start()
    build(options(tmp_path / "items.npy", tmp_path / "out", codes=4, sample=500, balanced=balance))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < vectors.nbytes / 3


def test_balanced_codes_keep_within_their_cap(npy: Path, built: Path, vectors: np.ndarray, tmp_path: Path) -> None:
    report = build(options(npy, tmp_path, balanced=True))
    _, codes, books = read(tmp_path)
    cap = -(-ITEMS * 125 // 1600)  # 1.25 times an even share, rounded up
    counts = [np.bincount(column, minlength=16) for column in codes.T]
    free = [np.bincount(column, minlength=16) for column in read(built)[1].T]
    assert max(count.max() for count in counts) <= cap < max(count.max() for count in free)
    assert report.levels[2].error == pytest.approx(
        np.square(left_over(vectors, codes, books, 3)).sum() / ITEMS, rel=1e-4
    )


def test_collisions_are_reported(npy: Path, tmp_path: Path) -> None:
    report = build(options(npy, tmp_path, levels=2, codes=8)).collisions
    counts = Counter(map(tuple, read(tmp_path)[1].tolist()))
    assert report.items_per_sid == Counter(counts.values())
    assert report.shared_sids == sum(count > 1 for count in counts.values())
    assert report.shared_items == sum(count for count in counts.values() if count > 1)
    assert report.largest == max(counts.values())
    assert f"{report.shared_items} items share {report.shared_sids} SIDs, at most {report.largest} " in report.text()


def test_dedup_numbers_the_items_of_a_sid(npy: Path, built: Path, tmp_path: Path) -> None:
    report = build(options(npy, tmp_path, codes=32, dedup=True))
    _, codes, books = read(tmp_path)
    assert len(books) == 3 and codes.shape == (ITEMS, 4)
    assert len(np.unique(codes, axis=0)) == ITEMS
    assert report.collisions.largest >= 21 and report.sizes == [32] * 4
    seen: Counter[tuple[int, ...]] = Counter()
    for *sid, number in codes.tolist():
        assert number == seen[tuple(sid)]
        seen[tuple(sid)] += 1


def test_dedup_refuses_what_its_level_cannot_tell_apart(npy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2\d items have the SID \[.*\], but the level .* has 16 codes"):
        build(options(npy, tmp_path / "out", dedup=True))
    assert not (tmp_path / "out").exists()


def test_a_codebook_is_no_larger_than_the_distinct_vectors(tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.repeat(np.eye(5), 4, axis=0))
    report = build(options(tmp_path / "few.npy", tmp_path / "out", levels=2, codes=8))
    assert [level.codes for level in report.levels] == [5, 1]
    assert [level["codes"] for level in json.loads((tmp_path / "out" / "catalog.json").read_text())["levels"]] == [5, 1]
    assert report.levels[1].error == pytest.approx(0, abs=1e-9)


# The catalog


def test_the_catalog_is_served_with_every_item(checkpoint: Path, built: Path) -> None:
    """Through a search as wide as the catalog: what comes back is all items, each under the tokens of its SID."""
    _, codes, _ = read(built)
    engine = Engine(EngineConfig(model=str(checkpoint), catalog=str(built / "items.parquet"), device="cpu"))
    try:
        found = engine.run(engine.recommend(prompt="watched a", n=ITEMS, params=None))
        catalog = engine.catalogs.get(None)
        assert catalog is not None and catalog.resolved and catalog.num_items == ITEMS
        tokens = json.loads((built / "added_tokens.json").read_text())
        for item in range(ITEMS):
            row = catalog.row_of(item)
            assert row is not None and catalog.sid(row) == codes[item].tolist()
            named = [tokens[16 * level + code] for level, code in enumerate(codes[item])]
            assert engine.decode(catalog.token_ids(row)).split() == named
    finally:
        engine.close()
    assert sorted(item.id for item in found.items) == list(range(ITEMS))


def test_metadata_and_ids_travel_from_parquet(vectors: np.ndarray, built: Path, tmp_path: Path) -> None:
    """And the vectors of a parquet column, over several row groups, give the codes that the matrix gives."""
    names = [f"item {row}" for row in range(ITEMS)]
    table = pa.table(
        {
            "title": [f"T{row}" for row in range(ITEMS)],
            "sku": names,
            "vector": list(vectors),
            "tags": [["a", "b"]] * ITEMS,
        }
    )
    pq.write_table(table, tmp_path / "items.parquet", row_group_size=250)
    build(options(tmp_path / "items.parquet", tmp_path / "out", ids="sku"))
    ids, codes, _ = read(tmp_path / "out")
    assert ids == names
    np.testing.assert_array_equal(codes, read(built)[1])
    catalog = Catalog.load(tmp_path / "out" / "items.parquet")
    assert catalog.fields == ("title", "tags")
    row = catalog.row_of("item 77")
    assert row is not None and catalog.metadata(row, catalog.fields) == {"title": "T77", "tags": ["a", "b"]}


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float16()), pa.large_list(pa.float64()), pa.list_(pa.float32(), DIM)], ids=str
)
def test_parquet_types_of_vectors(vectors: np.ndarray, tmp_path: Path, kind: pa.DataType) -> None:
    values = vectors.astype(kind.value_type.to_pandas_dtype())
    np.save(tmp_path / "items.npy", values)
    column = pa.array(list(values), kind)
    pq.write_table(pa.table({"item_id": range(ITEMS), "v": column, "w": column}), tmp_path / "items.parquet")
    build(options(tmp_path / "items.npy", tmp_path / "one", levels=1))
    build(options(tmp_path / "items.parquet", tmp_path / "two", levels=1, column="w"))
    np.testing.assert_array_equal(read(tmp_path / "one")[1], read(tmp_path / "two")[1])
    assert pq.read_schema(tmp_path / "two" / "items.parquet").names == ["item_id", "sid", "v"]


@pytest.mark.parametrize(
    ("lines", "ids"), [(["7", "-3"], [7, -3]), (["7", "07"], ["7", "07"]), (["a b", '"c",'], None)]
)
def test_ids_of_a_text_file(tmp_path: Path, lines: list[str], ids: list[Any] | None) -> None:
    np.save(tmp_path / "items.npy", np.eye(2))
    (tmp_path / "ids.txt").write_text("\r\n".join(lines))
    build(options(tmp_path / "items.npy", tmp_path / "out", ids=str(tmp_path / "ids.txt")))
    assert read(tmp_path / "out")[0] == (lines if ids is None else ids)


def test_an_earlier_build_is_replaced_only_if_asked_and_its_template_is_kept(npy: Path, tmp_path: Path) -> None:
    build(options(npy, tmp_path, levels=1))
    header = json.loads((tmp_path / "catalog.json").read_text())
    kept = {"template": {"prefix": "watched "}, "max_items_per_sid": 3}
    (tmp_path / "catalog.json").write_text(json.dumps(header | kept))
    before = (tmp_path / "items.parquet").read_bytes()
    with pytest.raises(ConfigError, match=r"has items\.parquet already"):
        build(options(npy, tmp_path, levels=2))
    assert (tmp_path / "items.parquet").read_bytes() == before
    build(options(npy, tmp_path, levels=2, overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    catalog = Catalog.load(tmp_path / "items.parquet")
    assert catalog.depth == 2 and catalog.header.max_items_per_sid == 3
    assert catalog.template is not None and catalog.template.prefix == "watched "
    (tmp_path / "catalog.json").write_text('{"templ": {}}')
    with pytest.raises(ConfigError, match=r"catalog.json, .* is wrong: .*templ"):
        build(options(npy, tmp_path, overwrite=True))


# Bad input


def matrix(values: np.ndarray) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.save(folder / "items.npy", values)
        return folder / "items.npy"

    return write


def raw(content: bytes, name: str = "items.npy") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def parquet(**columns: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pq.write_table(pa.table(columns), folder / "items.parquet")
        return folder / "items.parquet"

    return write


def holed(value: float, *rows: int) -> np.ndarray:
    values = np.ones((9, 4), np.float32)
    values[list(rows), 2] = value
    return values


TWO = [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("write", "given", "message"),
    [
        (matrix(holed(np.nan, 4)), {}, "items.npy row 4: the embedding is not finite"),
        (matrix(holed(-np.inf, 1, 7).astype(np.float16)), {}, "2 problems, the first: items.npy row 1: .* not finite"),
        (matrix(holed(1e30, 3)), {}, "items.npy row 3: the embedding is too long for float32"),
        (matrix(holed(1, 0).astype(np.float64) * 1e300), {}, "row 0: the embedding is not finite"),
        (matrix(np.ones(5)), {}, r"must be \[items, dim\] and not empty, but have shape \[5\]"),
        (matrix(np.ones((2, 3, 4))), {}, r"have shape \[2, 3, 4\]"),
        (matrix(np.ones((0, 4))), {}, r"have shape \[0, 4\]"),
        (matrix(np.ones((5, 0))), {}, r"have shape \[5, 0\]"),
        (matrix(np.ones((5, 2), int)), {}, "must be float16, float32 or float64, not int64"),
        (matrix(np.array([[None]])), {}, "items.npy: not a readable .npy or parquet file"),
        (raw(b"\x93NUMPY"), {}, "items.npy: not a readable .npy or parquet file"),
        (raw(b"item,1,2\n", "items.csv"), {}, "items.csv: not a readable .npy or parquet file"),
        (raw(b"", "items.parquet"), {}, "items.parquet: not a readable parquet file"),
        (matrix(np.eye(3)), {"column": "v"}, "items.npy is no parquet file: it has no column 'v'"),
        (lambda folder: folder / "none.npy", {}, "cannot read .*none.npy: No such file"),
        (lambda folder: folder, {}, "Is a directory"),
        (parquet(item_id=[1, 2], v=[[1.0, 2.0], [3.0]]), {}, "row 1: the embedding has 1 dimension, the first has 2"),
        (parquet(item_id=[1, 2], v=[[1.0, 2.0], None]), {}, "row 1: the embedding is missing"),
        (parquet(item_id=[1, 2], v=[[1.0, None], TWO[1]]), {}, "row 0: the embedding has a missing entry"),
        (parquet(item_id=[1, 2], v=[[1.0, np.nan], TWO[1]]), {}, "items.parquet row 0: the embedding is not finite"),
        (parquet(item_id=[1, 2]), {}, "which column holds the embeddings.* those that do: none"),
        (parquet(item_id=[1, 2], v=TWO, w=TWO), {}, "Name it by --column; those that do: v, w"),
        (parquet(item_id=[1, 2], v=TWO), {"column": "item_id"}, "column 'item_id' does not hold embeddings"),
        (parquet(sku=[1, 2], v=TWO), {}, "no column 'item_id' of ids; columns are sku, v"),
        (parquet(item_id=[1.0, 2.0], v=TWO), {}, "ids must be integers or strings, but column 'item_id' is double"),
        (parquet(item_id=[1, 2], sid=[1, 2], v=TWO), {}, "metadata column cannot be called 'sid'"),
        (parquet(item_id=[1, 2], sku=[1, 2], v=TWO), {"ids": "sku"}, "metadata column cannot be called 'item_id'"),
        (parquet(item_id=["a", None], v=TWO), {}, "items.parquet row 1: item_id is missing"),
        (parquet(item_id=["a", "a"], v=TWO), {}, "row 1: item 'a' is there twice, first at items.parquet row 0"),
        (parquet(item_id=pa.array([], pa.int64()), v=pa.array([], pa.list_(pa.float32()))), {}, "holds no items"),
    ],
)  # fmt: skip
def test_bad_embeddings_are_named_and_leave_nothing_behind(
    tmp_path: Path, write: Callable[[Path], Path], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(CatalogError, match=message) as caught:
        build(options(write(tmp_path), tmp_path / "out", **given))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_truncated_matrix_is_refused(tmp_path: Path, npy: Path) -> None:
    (tmp_path / "items.npy").write_bytes(npy.read_bytes()[:-100])
    with pytest.raises(CatalogError, match=r"items\.npy: not a readable \.npy"):
        build(options(tmp_path / "items.npy", tmp_path / "out"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\n", "ids.txt has 2 lines for 3 embeddings"),
        ("a\n\nb\n", "ids.txt:2: item_id is empty"),
        ("a\nb\na\n", "ids.txt:3: item 'a' is there twice, first at ids.txt:1"),
        ("1\n2\n1\n", "ids.txt:3: item 1 is there twice, first at ids.txt:1"),
        ("", "ids.txt: cannot be read"),
        (None, "ids.txt: cannot be read: .*No such file"),
    ],
)
def test_bad_ids_are_named(tmp_path: Path, text: str | None, message: str) -> None:
    np.save(tmp_path / "items.npy", np.eye(3))
    if text is not None:
        (tmp_path / "ids.txt").write_text(text)
    with pytest.raises(CatalogError, match=message):
        build(options(tmp_path / "items.npy", tmp_path / "out", ids=str(tmp_path / "ids.txt")))


def test_what_cannot_be_done_is_refused_first(npy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dedup adds a level"):
        build(options(npy, tmp_path / "out", levels=26, dedup=True))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*file"):
        build(options(npy, tmp_path / "file"))


def test_the_report_reads_well(built: Path) -> None:
    import msgspec

    text = msgspec.json.decode((built / "build.json").read_bytes(), type=BuildReport).text()
    assert "600 of 16 dimensions" in text and "seed 0, on 600 items" in text
    assert len(text.splitlines()) == 7
