"""What filters keep of a catalog: masks by what they mean, and columns that were read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.constraints.catalog_files import write_header, write_jsonl, write_parquet
from tests.constraints.filter_oracle import predicate
from widebeam.constraints import filters as module
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.catalogs import Catalogs
from widebeam.constraints.filter_spec import Filters, Predicate
from widebeam.constraints.filters import ItemMask, MaskCache, allowed_items
from widebeam.errors import InvalidRequest


def test_equal_conditions_share_one_mask(catalog: Catalog) -> None:
    cheap, titled = predicate("price", "<", 3), predicate("title", "contains", "1")
    both, _ = allowed_items(catalog, Filters(where=(cheap, titled)))
    assert allowed_items(catalog, Filters(where=(titled, cheap, cheap)))[0] is both
    alone, _ = allowed_items(catalog, Filters(where=(cheap,)))
    assert allowed_items(catalog, Filters(where=(cheap, cheap)))[0] is alone is not both
    stocked, _ = allowed_items(catalog, Filters(named=("in_stock",)))
    assert allowed_items(catalog, Filters(where=(predicate("price", ">", 3),)))[0] is stocked
    everything, _ = allowed_items(catalog, Filters())
    assert allowed_items(catalog, Filters(where=(), deny=()))[0] is everything
    assert everything.num_allowed == catalog.num_items
    without, _ = allowed_items(catalog, Filters(where=(cheap, titled), deny=tuple(range(200))))
    assert without.num_allowed == 0 < both.num_allowed


def test_values_that_python_calls_equal_are_told_apart(tmp_path: Path) -> None:
    rows = [{"item_id": i, "sid": [i], "flag": bool(i), "number": i} for i in range(2)]
    catalog = Catalog.load(write_jsonl(tmp_path / "items.jsonl", rows))
    assert allowed_items(catalog, Filters(where=(predicate("flag", "==", True),)))[0].num_allowed == 1
    for value in (1, 1.0):
        with pytest.raises(InvalidRequest, match="true or false"):
            allowed_items(catalog, Filters(where=(predicate("flag", "==", value),)))
    assert allowed_items(catalog, Filters(where=(predicate("number", "==", 1),)))[0].num_allowed == 1
    with pytest.raises(InvalidRequest, match="a number"):
        allowed_items(catalog, Filters(where=(predicate("number", "==", True),)))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_version_never_sees_the_masks_of_another(tmp_path: Path, suffix: str) -> None:
    write = write_jsonl if suffix == ".jsonl" else write_parquet
    filters = Filters(where=(predicate("price", "<", 3),), named=("low",))
    catalogs, versions = Catalogs(), []
    for prices, low in (([1, 2, 3, 4], 4), ([9, 9, 0, 2], 4), ([9, 9, 0, 2], 1)):
        write_header(tmp_path, {"filters": {"low": [{"column": "price", "op": "<", "value": low}]}})
        rows = [{"item_id": i, "sid": [i], "price": price} for i, price in enumerate(prices)]
        catalogs.add(catalogs.next_version(Catalog.load(write(tmp_path / f"items{suffix}", rows))))
        versions.append(catalogs.get("items"))
    for _ in range(2):
        allowed = [allowed_items(version, filters)[0].allows(np.arange(4)).tolist() for version in versions if version]
        assert allowed == [[True, True, False, False], [False, False, True, True], [False, False, True, False]]
    assert versions[2] is not None
    moved = replace(versions[2], _order=versions[2]._order[::-1].copy())
    assert allowed_items(moved, filters)[0].allows(np.arange(4)).tolist() == [False, True, False, False]


def test_the_cache_keeps_what_was_used_last() -> None:
    size = ItemMask.everything(64).nbytes
    cache, built = MaskCache(3 * size), []

    def get(name: str) -> ItemMask:
        return cache.get(name.encode(), lambda: built.append(name) or ItemMask.everything(64))

    for name in "abcabadab":
        assert get(name) is get(name)
    assert "".join(built) == "abcd"
    get("c")
    assert "".join(built) == "abcdc"
    tiny = MaskCache(size - 1)  # too small for any: built every time
    assert tiny.get(b"a", lambda: ItemMask.everything(64)) is not tiny.get(b"a", lambda: ItemMask.everything(64))


def test_threads_build_a_mask_once(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[str] = []
    real, ready = module.matches, threading.Barrier(8)

    def counted(one: Predicate, column: pa.ChunkedArray, where: str) -> np.ndarray:
        evaluated.append(f"{one.op} {one.value}")
        return real(one, column, where)

    monkeypatch.setattr(module, "matches", counted)

    def ask(number: int) -> list[ItemMask]:
        ready.wait()
        pairs = [(predicate("price", "<", (number + i) % 4), predicate("price", ">=", 0)) for i in range(4)]
        return sorted((allowed_items(catalog, Filters(where=pair))[0] for pair in pairs), key=lambda m: m.num_allowed)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(8)))
    assert sorted(evaluated) == ["< 0", "< 1", "< 2", "< 3", ">= 0"]
    assert all(mask is first for answer in answers for mask, first in zip(answer, answers[0], strict=True))
    assert [mask.num_allowed for mask in answers[0]] == [sum(i % 7 < limit for i in range(200)) for limit in range(4)]


def test_a_json_column_is_read_once(catalog: Catalog) -> None:
    assert catalog.column("title") is catalog.column("title")
    assert catalog.column("title").to_pylist() == [f"Title {i}" for i in range(200)]
    for name in ("mixed", "huge"):
        reasons = set()
        for _ in range(2):
            with pytest.raises(pa.ArrowInvalid) as caught:
                catalog.column(name)
            reasons.add(str(caught.value))
        assert len(reasons) == 1
