"""Versions of catalogs come and go while searches run: answers are those of an engine that knows one version only."""

from __future__ import annotations

import asyncio
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.engine.warm_waves import make_runtime, make_search
from widebeam import Engine
from widebeam.constraints.arena import MASK_BYTES, NODE_BYTES, num_places
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filter_spec import Filters
from widebeam.constraints.filters import ItemMask
from widebeam.engine.job import Job
from widebeam.engine.request import SearchParams, SearchResult
from widebeam.engine.runtime import Runtime
from widebeam.engine.search import ALONE, Between
from widebeam.engine.wave import Search, narrowed
from widebeam.errors import CatalogError
from widebeam.model.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"device": "cpu", "max_wave_rows": 256, "max_beam_width": 64}
DEEP = 21


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Versions of one catalog: a tenth of its items changes from one to the next."""
    folder = tmp_path_factory.mktemp("versions")
    lines = tiny.save_catalog(folder / "items.jsonl", num_items=80).read_text().splitlines()
    fresh = tiny.save_catalog(folder / "items.jsonl", num_items=80, seed=1).read_text().splitlines()
    paths = []
    for version in range(6):
        (folder / str(version)).mkdir()
        paths.append(folder / str(version) / "items.jsonl")
        paths[-1].write_text("\n".join(fresh[: 8 * version] + lines[8 * version :]))
        (paths[-1].parent / "catalog.json").write_text((folder / "catalog.json").read_text())
    return paths


@pytest.fixture(scope="module")
def versions(files: list[Path], checkpoint: Path) -> list[Catalog]:
    return [Catalog.load(file, token_id=Tokenizer(checkpoint).token_id) for file in files]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> list[Catalog]:
    """Two versions of many levels, whose waves others may pass."""
    found = []
    for seed in range(2):
        path = tmp_path_factory.mktemp("deep") / "deep.jsonl"
        sids = np.random.default_rng(seed).integers(11, 14, (40, DEEP)).tolist()
        path.write_text("".join(json.dumps({"item_id": i, "sid": sid}) + "\n" for i, sid in enumerate(sids)))
        found.append(Catalog.load(path))
    return found


def results(runtime: Runtime, searches: list[Search], between: Between = ALONE) -> list[Any]:
    flight = runtime.launch([Job(search, 0.0, None) for search in searches], between=between)
    return [outcome.result.sequences for outcome in flight.outcomes()]  # type: ignore[union-attr]


def asked(catalog: Catalog, **fields: Any) -> list[Search]:
    """A plain search, and one with a filter."""
    plain, other = (
        replace(make_search(np.arange(n) % 50, width, catalog=catalog), **fields) for n, width in ((30, 12), (9, 40))
    )
    return [plain, narrowed(other, ItemMask.of_rows(np.arange(0, catalog.num_items, 3), catalog.num_items))]


def tokens(result: SearchResult) -> list[list[int]]:
    return [sequence.token_ids for sequence in result.sequences]


@pytest.mark.parametrize("normalizer", ["level", "legal", "vocab"])
def test_a_version_answers_alike_wherever_it_lies(
    checkpoint: Path, versions: list[Catalog], deep: list[Catalog], normalizer: Any
) -> None:
    """Between others, in place of one that has gone, and as the only one."""
    crowded = make_runtime(checkpoint, catalog_memory_gib=1e-3)
    gone = replace(versions[3])
    for catalog in (deep[0], gone, *versions[1:3]):
        crowded.add_catalog(catalog)
    middle = crowded.core.catalogs.trie(gone).lease.base
    del gone, catalog
    gc.collect()
    crowded.add_catalog(versions[3])
    assert crowded.core.catalogs.trie(versions[3]).lease.base == middle > 0
    for version in versions[1:4]:
        fresh = make_runtime(checkpoint)
        fresh.add_catalog(version)
        searches = asked(version, normalizer=normalizer)
        assert results(crowded, searches) == results(fresh, searches)
    crowded.check_integrity()


def test_a_long_search_notices_no_update(checkpoint: Path, deep: list[Catalog]) -> None:
    """Nor a wave that passes it, although both have masks and a new version comes between."""
    runtime = make_runtime(checkpoint, max_levels=32, catalog_memory_gib=1e-3)
    old, new = (replace(catalog) for catalog in deep)
    runtime.add_catalog(old)
    long = asked(old)
    passing = [search for search in asked(old) if search.mask is not None]
    passing = [narrowed(search, ItemMask.of_rows(np.arange(1, 40, 2), 40)) for search in passing]
    alone, expected = results(runtime, long), results(runtime, passing)
    seen = []

    def run_others() -> None:
        runtime.add_catalog(new)
        seen.append(results(runtime, passing))

    assert results(runtime, long, Between(others_wait=lambda: len(seen) < 2, run_others=run_others)) == alone
    assert seen == [expected, expected]
    runtime.check_integrity()
    fresh = make_runtime(checkpoint, max_levels=32)
    fresh.add_catalog(new)
    assert results(runtime, asked(new)) == results(fresh, asked(new))


async def test_searches_end_on_the_version_that_they_began_with(checkpoint: Path, files: list[Path]) -> None:
    """An update comes behind them in the queue; room for three versions lasts for many, whoever keeps them."""
    size = 3 * 200 * NODE_BYTES / 2**30
    async with Engine(str(checkpoint), catalog=str(files[0]), catalog_memory_gib=size, **SMALL) as engine:
        params = SearchParams(n=12, beam_width=20)
        before = tokens(await engine.submit([5, 6], params))
        running = [asyncio.create_task(engine.submit([5, 6], params)) for _ in range(20)]
        await asyncio.sleep(0)
        await engine.load_catalog(files[5])
        for result in await asyncio.gather(*running):
            assert (result.catalog_version, tokens(result)) == (1, before)
        after = await engine.submit([5, 6], params)
        assert (after.catalog_version, tokens(after) != before) == (2, True)
        del running, result
        kept = []
        for turn in range(8):
            kept.append(await engine.load_catalog(files[turn % 6]))
            assert (await engine.submit([5, 6], params)).catalog_version == kept[-1].version == turn + 3
        arena = engine._runtime.core.catalogs
        assert arena.used <= arena.size < 10 * num_places(engine.catalogs.get(None))  # type: ignore[arg-type]


async def test_what_does_not_fit_is_refused_and_harms_nobody(checkpoint: Path, files: list[Path]) -> None:
    places = num_places(Catalog.load(files[0], token_id=Tokenizer(checkpoint).token_id))
    size = {"catalog_memory_gib": (places + 20) * NODE_BYTES / 2**30}
    params = SearchParams(n=12, beam_width=20)
    async with Engine(str(checkpoint), catalog=str(files[0]), **size, **SMALL) as engine:
        before = tokens(await engine.submit([5, 6], params))
        with pytest.raises(CatalogError, match=r"'items' takes .* MiB are missing\. Raise --catalog-memory-gib"):
            await engine.load_catalog(files[1])
        after = await engine.submit([5, 6], params)
        assert (after.catalog_version, tokens(after)) == (1, before)
        await engine.check_integrity()
    with pytest.raises(CatalogError, match=r"80 items .* 'items' .* --filter-memory-gib"):
        await Engine(str(checkpoint), catalog=str(files[0]), filter_memory_gib=2 * MASK_BYTES / 2**30, **SMALL).start()


async def test_filters_that_have_no_room_together_go_one_after_the_other(checkpoint: Path, files: list[Path]) -> None:
    """Room for two masks: searches of five different filters at once are all answered, as they are alone."""
    room = {"filter_memory_gib": (2 * ItemMask.places_for(80) * MASK_BYTES + 1) / 2**30}
    async with Engine(str(checkpoint), catalog=str(files[0]), **room, **SMALL) as engine:
        every = [SearchParams(n=5, beam_width=9, filters=Filters(deny=(f"item-{k}",))) for k in range(5)]
        alone = [tokens(await engine.submit([5, 6], params)) for params in every]
        together = await asyncio.gather(*(engine.submit([5, 6], params) for params in every * 3))
        assert [tokens(result) for result in together] == alone * 3
        assert engine.stats().waves_closed_by["masks"] > 0
