"""A catalog in use: whole searches with and without filters, and searches beside updates of the catalog."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from random_catalog import GROUPS, write_catalog
from report import quantiles

from widebeam import Engine
from widebeam.constraints.filter_spec import Filters, Predicate
from widebeam.engine.request import SearchParams, SearchResult

CONCURRENCY, UPDATES = 4, 3
TIMEOUT_S = 60.0
MAX_IDS = 100_000
"""Ids that one list of a filter may hold."""


class Served(NamedTuple):
    """One answer of the closed loop."""

    ended: float
    latency_ms: float
    version: int


def filters_of(items: int) -> dict[str, Filters | None]:
    """By name; allow-list and condition pass a hundredth of the items, as far as a list may be that long."""
    ids = np.random.default_rng(0).choice(items, min(items, MAX_IDS), replace=False).tolist()
    return {
        "none": None,
        "deny 1000": Filters(deny=tuple(ids[:1000])),
        "where": Filters(where=(Predicate(column="group", op="==", value=7),)),
        "allow 1%": Filters(allow=tuple(ids[: max(1, items // GROUPS)])),
    }


async def serve(arguments: Any, items: int, codes: int, levels: int, first_token: int) -> dict[str, Any]:
    """Load a catalog of so many items from parquet into an engine and measure what it serves."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_catalog(Path(folder) / "items.parquet", items, levels, codes, first_token)
        width = min(arguments.width, items)
        engine = Engine(
            str(arguments.checkpoint),
            max_context_len=arguments.context + 64,
            max_wave_requests=CONCURRENCY,
            max_beam_width=max(64, width),
            enforce_eager=arguments.enforce_eager,
        )
        async with engine:
            started = time.perf_counter()
            num_items = (await engine.load_catalog(path)).num_items
            load_s = time.perf_counter() - started
            engine.freeze()  # as in `widebeam serve`
            search = Searches(engine, arguments.context, width)
            return {
                "items": num_items,
                "load_s": load_s,
                "filters": {name: await search.alone(one) for name, one in filters_of(num_items).items()},
                "updates": await updates(engine, search, arguments.seconds),
            }


class Searches:
    """Random prompts of one length, searched at one width."""

    def __init__(self, engine: Engine, context: int, width: int) -> None:
        self.engine, self.params = engine, SearchParams(n=width, beam_width=width)
        vocab = engine.model_config.vocab_size
        self.prompts = np.random.default_rng(0).integers(0, vocab, (64, context)).tolist()
        self.sent = 0
        self.news = asyncio.Event()
        """Set at each answer of a closed loop."""

    async def one(self, filters: Filters | None = None) -> SearchResult:
        self.sent += 1
        params = msgspec.structs.replace(self.params, filters=filters)
        return await self.engine.submit(self.prompts[self.sent % len(self.prompts)], params)

    async def alone(self, filters: Filters | None, warm_up: int = 3, repeats: int = 11) -> dict[str, float]:
        """Medians of one search at a time, in ms: of the whole call, and of the device."""
        for _ in range(warm_up):
            await self.one(filters)
        calls, device = [], []
        for _ in range(repeats):
            started = time.perf_counter()
            result = await self.one(filters)
            calls.append((time.perf_counter() - started) * 1e3)
            device.append(result.timing_ms.prefill + result.timing_ms.decode)
        return {"call_ms": median(calls), "device_ms": median(device), "returned": len(result.sequences)}

    async def beside(self, work: Callable[[list[Served]], Awaitable[Any]]) -> tuple[list[Served], Any]:
        """A closed loop for as long as the work takes, which sees what was served; both their results."""
        served: list[Served] = []

        async def loop() -> None:
            while True:
                started = time.perf_counter()
                result = await self.one()
                ended = time.perf_counter()
                served.append(Served(ended, (ended - started) * 1e3, result.catalog_version or 0))
                self.news.set()

        async with asyncio.TaskGroup() as group:  # a search that fails ends everything
            loops = [group.create_task(loop()) for _ in range(CONCURRENCY)]
            done = await work(served)
            for task in loops:
                task.cancel()
        return served, done


async def updates(engine: Engine, search: Searches, seconds: float) -> dict[str, Any]:
    """Searches alone, then beside updates of 1000 items each: from a call to the first answer of its version."""
    await search.beside(lambda served: asyncio.sleep(seconds / 2))  # warm-up
    quiet, _ = await search.beside(lambda served: asyncio.sleep(seconds))

    async def change(served: list[Served]) -> list[dict[str, float]]:
        changes = []
        for number in range(UPDATES):
            upsert, remove = await asyncio.to_thread(changed_items, engine, number)  # a client's work: not on this loop
            name, version, started = catalog_of(engine).name, catalog_of(engine).version, time.perf_counter()
            await engine.live.update(name, upsert, remove)
            returned = time.perf_counter()
            async with asyncio.timeout(TIMEOUT_S):
                while not (new := [one.ended for one in served if one.version > version]):
                    search.news.clear()
                    await search.news.wait()
            changes.append({"returned_s": returned - started, "first_answer_s": min(new) - started})
            await asyncio.sleep(seconds / UPDATES)
        return changes

    during, changes = await search.beside(change)
    return {"changes": changes, "quiet": latency(quiet), "during": latency(during)}


def catalog_of(engine: Engine) -> Any:
    """Its only one, as it is now."""
    return engine.catalogs.get(None)


def changed_items(engine: Engine, number: int) -> tuple[list[dict[str, Any]], list[int]]:
    """500 items go, 500 new ones come under their SIDs."""
    catalog = catalog_of(engine)
    rows = np.random.default_rng(number).choice(catalog.num_items, min(500, catalog.num_items // 2), replace=False)
    new = 10**9 + 1000 * number
    upsert = [{"item_id": new + i, "sid": catalog.sid(row), "group": 0} for i, row in enumerate(rows.tolist())]
    return upsert, [catalog.item_id(row) for row in rows.tolist()]


def latency(served: list[Served]) -> dict[str, Any]:
    return {"searches": len(served), **quantiles("latency", [one.latency_ms for one in served])}
