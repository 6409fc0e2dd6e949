"""How the catalogs of an engine change while it serves: loads, batches of changed items, the way back, and the end.

A new version is built on a thread of its own, put on the device between waves, and offered to new searches; those that
run finish on theirs. Changes of one catalog take turns. One that fails changes nothing; one that waits or has begun is
completed, even if its caller goes away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.catalogs import Catalogs
from widebeam.constraints.codebooks import Vocabulary
from widebeam.constraints.difference import Difference
from widebeam.constraints.updates import Row, updated
from widebeam.engine.catalog_changes import Change, ChangeStats
from widebeam.engine.catalog_loader import CatalogLoader, declared
from widebeam.engine.catalog_watch import watch
from widebeam.errors import (
    Conflict,
    NotFound,
    Overloaded,
    RequestError,
    WideBeamError,
)

log = logging.getLogger(__name__)
MOST_WAITING = 64
"""Changes that may wait or run, of all catalogs together."""


class LiveCatalogs:
    """Makes and offers versions. Lives on the engine's event loop."""

    def __init__(
        self, catalogs: Catalogs, vocabulary: Vocabulary, deepest: int, put: Callable[[Catalog], Awaitable[None]]
    ) -> None:
        """`deepest`: levels that a SID may have here. `put` puts a catalog on the device."""
        self.stats = ChangeStats()
        self.loader = CatalogLoader(catalogs, vocabulary, deepest)
        self._catalogs = catalogs
        self._vocabulary = vocabulary
        self._put = put
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Catalog]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def load(
        self,
        path: str | Path,
        name: str | None = None,
        if_version: int | None = None,
        *,
        version: int | None = None,
        below: str | None = None,
        upload: str | None = None,
        again: bool = False,
    ) -> Catalog:
        """Offer a catalog file under a name, by default that of the file; the next version where there is one.

        `version`: its number, if the header does not declare it. `below`: a folder that the path is relative to and may
        not leave, now and whenever the file is loaded again. `upload`: the file is a temporary one, of this
        description; without a header of its own it gets that of the version before. `again`: only if there is such a
        catalog. Raises CatalogError, Conflict, Overloaded, NotFound, and InvalidRequest as `CatalogFile.find` does and
        for another version than the header's.
        """
        change = self.loader.change(path, name, if_version, version, below, upload)
        return await self.change(replace(change, needs_one=again))

    async def read(self, path: str | Path, name: str | None = None) -> Change:
        """A `load` whose file is read and checked now: the change offers what it holds then. Raises CatalogError."""
        change, started = self.loader.change(path, name), time.perf_counter()
        catalog = await asyncio.to_thread(change.build, None)
        return replace(change, build=lambda _: catalog, built_s=time.perf_counter() - started)

    async def update(
        self,
        name: str,
        upsert: Iterable[Row],
        remove: Sequence[int | str],
        if_version: int | None = None,
        *,
        version: int | None = None,
    ) -> Catalog:
        """Offer a catalog with some items added or replaced and others removed. `upsert` is read on a thread.

        `version`: its number. Raises NotFound, Conflict, Overloaded, and InvalidRequest as `updates.updated` does.
        """

        rows = 0

        def counted() -> Iterator[Row]:
            nonlocal rows
            for rows, row in enumerate(upsert, 1):  # noqa: B007 (it is used when all are read)
                yield row

        def build(current: Catalog | None) -> Catalog:
            assert current is not None
            self._catalogs.check_number(name, version)
            return declared(updated(current, counted(), remove, self._vocabulary), version)

        def count(before: Catalog | None, after: Catalog | None) -> Difference:
            assert before is not None and after is not None
            came = after.num_items - before.num_items + len(remove)
            return Difference(came, rows - came, len(remove))

        return await self.change(Change(name, build, if_version, needs_one=True, count=count))

    async def roll_back(self, name: str, version: int, if_version: int | None = None) -> Catalog:
        """Offer an earlier version again, under its number. Raises NotFound, Conflict, Overloaded."""

        def build(current: Catalog | None) -> Catalog:
            assert current is not None
            return current if current.version == version else self._catalogs.copy_of(name, version)

        return await self.change(Change(name, build, if_version, needs_one=True, numbered=True))

    async def remove(self, name: str, if_version: int | None = None) -> Catalog:
        """Offer a catalog no more, watch its file no more, and forget its earlier versions; what it was. Searches that
        wait or run finish on it. Raises NotFound, Conflict, Overloaded."""
        return await self.change(Change(name, lambda _: None, if_version, needs_one=True))

    def watch(self, interval_s: float) -> None:
        """From now on load files again that change."""
        self._watching = asyncio.create_task(watch(self, interval_s))

    def close(self) -> None:
        """Watch no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def change(self, change: Change) -> Catalog:
        """Make a change when it is its turn. Raises Overloaded, NotFound, Conflict, and what `build` raises."""
        if self._waiting.total() >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} changes of catalogs wait already", retry_after_s=1.0)
        self._waiting[change.name] += 1
        task = asyncio.create_task(self._in_turn(change))
        self._tasks.add(task)  # the loop itself would forget it
        task.add_done_callback(self._tasks.discard)
        return replace(await asyncio.shield(task))  # whoever keeps a copy does not keep it on the device

    async def _in_turn(self, change: Change) -> Catalog:
        name, outcome = change.name, RequestError.code
        try:
            async with self._turns.setdefault(name, asyncio.Lock()):
                catalog = await self._replace(change)
            outcome = "ok" if change.keep is None else "staged"
            return catalog
        except WideBeamError as error:
            outcome = type(error).code if isinstance(error, RequestError) else "invalid_catalog"
            raise
        finally:
            self.stats.outcomes[name if name in self._catalogs.names() else "", outcome] += 1
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name], self._turns[name]

    async def _replace(self, change: Change) -> Catalog:
        name = change.name
        current = self._catalogs.get(name) if name in self._catalogs.names() else None
        if current is None and change.needs_one:
            raise NotFound(f"no catalog is called {name!r}", code="unknown_catalog", param="catalog")
        version = 0 if current is None else current.version
        if change.if_version is not None and change.if_version != version:
            raise Conflict(
                f"catalog {name!r} is at version {version}, not {change.if_version}",
                code="version_conflict",
                param="if_version",
            )
        started = time.perf_counter()
        catalog = await asyncio.to_thread(change.build, current)
        if catalog is None:
            assert current is not None
            self._forget(name)
            await self._log(change, current, None)
            return current
        if catalog is current:
            return catalog
        if not change.numbered:
            catalog = self._catalogs.next_version(catalog)
        built = time.perf_counter()
        await self._put(catalog)
        if change.keep is not None:
            change.keep(catalog)
            return catalog
        self._catalogs.add(catalog)
        change.offered()
        self.stats.build_s[name] = change.built_s + built - started
        self.stats.swap_s[name] = time.perf_counter() - built
        await self._log(change, current, catalog)
        return catalog

    async def _log(self, change: Change, before: Catalog | None, after: Catalog | None) -> None:
        """The line of a change that was made; version 0 stands for none."""
        versions = [0 if one is None else one.version for one in (before, after)]
        numbers = (await asyncio.to_thread(change.count, before, after))._asdict()
        source = "removed" if after is None else after.source
        log.info(
            "catalog %r: version %d -> %d; items: %d came, %d changed, %d went (%s)",
            *(change.name, *versions, *numbers.values(), source),
            extra={
                "fields": {
                    "catalog": change.name, "version_before": versions[0], "version": versions[1], **numbers,
                    "source": source,
                }
            },
        )  # fmt: skip

    def _forget(self, name: str) -> None:
        """Of what is counted by catalog too, so that no label stays of a name that is gone."""
        self._catalogs.remove(name)
        self.loader.files.pop(name, None)
        for seconds in (self.stats.build_s, self.stats.swap_s):
            seconds.pop(name, None)
        for counted in [one for one in self.stats.outcomes if one[0] == name]:
            del self.stats.outcomes[counted]
