"""From tokens to sequences: what an engine does with a search before the device has it, and until it has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filter_spec import Filters
from widebeam.constraints.filters import allowed_items
from widebeam.engine.admission import admit, make_params
from widebeam.engine.job import Job
from widebeam.engine.request import Follower, SearchParams, SearchResult
from widebeam.engine.results import no_result
from widebeam.engine.wave import Search, narrowed
from widebeam.errors import Cancelled, DeadlineExceeded, InvalidRequest, RequestError

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine


class Searching:
    """Accepts searches, and gives each its outcome."""

    async def submit(
        self,
        token_ids: Seq[int] | np.ndarray,
        params: SearchParams,
        *,
        catalog: Catalog | None = None,
        follow: Follower | None = None,
    ) -> SearchResult:
        """Search. Cancelling the awaiting task cancels the request. Raises RequestError.

        `catalog`: the version to search, for a caller that has used it already; None: the current one by its name.
        `follow`: sees texts while they grow, about every eight tokens, and may end them; not beams, of which nobody
        knows before the end which ones stay (ValueError). It is awaited, and what comes meanwhile is passed over.
        """
        engine = cast("Engine", self)
        engine._check_ready()
        now = time.monotonic()
        if asyncio.get_running_loop() is not engine._loop:
            raise RuntimeError("submit must run on the event loop that started the engine")
        search, warnings = _admit(engine, token_ids, params, catalog)
        if follow is not None and not search.is_text:
            raise ValueError("only texts can be followed, not beams")
        filters = params.filters
        engine._budgets.take(search, now)
        timeout = params.timeout_ms / 1e3 if params.timeout_ms else None
        job = Job(search, now, now + timeout if timeout else None, warnings, priority=params.priority)
        future = engine._waiting.add(job)
        outcome = Cancelled.code
        try:
            async with asyncio.timeout(timeout):
                if filters is None or await _narrow(job, filters, future):
                    following = None if follow is None else _Following(engine, job, future, follow)
                    engine._worker.submit(job)
                    result = await (future if following is None else following.result())
                else:
                    result = no_result(search, warnings, (time.monotonic() - now) * 1e3)
            outcome = "ok"
            return result
        except RequestError as error:
            outcome = type(error).code
            raise
        except TimeoutError:
            outcome = DeadlineExceeded.code
            raise DeadlineExceeded(f"no result within {params.timeout_ms} ms", param="timeout_ms") from None
        finally:
            engine._waiting.remove(job, outcome)
            engine._budgets.give_back(search, time.monotonic())

    async def check(self, token_ids: Seq[int], params: SearchParams, *, catalog: Catalog | None = None) -> bool:
        """Raise what `submit` would refuse, without searching. Whether the filters leave anything to be found."""
        engine = cast("Engine", self)
        engine._check_ready()
        search, _ = _admit(engine, token_ids, params, catalog)
        if params.filters is None or search.catalog is None:
            return True
        engine._budgets.take(search, time.monotonic())  # as for `submit`: a condition may read a whole column
        try:
            mask, _ = await asyncio.to_thread(allowed_items, search.catalog, params.filters)
        finally:
            engine._budgets.give_back(search, time.monotonic())
        return mask.num_allowed > 0

    def abort(self, request_id: str | None) -> int:
        """End the searches of this id and those of its batch, `ID_0`, `ID_1`, ..; None: all. Returns how many.

        Their callers get Aborted at once, and what they took of the budgets is free. A search that waits never runs;
        one that runs goes to the end of its wave or piece, and its result is dropped.
        """
        return cast("Engine", self)._waiting.abort(request_id)


class _Following:
    """A text, and who sees how it grows."""

    def __init__(self, engine: Engine, job: Job, future: asyncio.Future[SearchResult], follow: Follower) -> None:
        self._future, self._follow = future, follow
        self._grown: SearchResult | None = None
        self._news = asyncio.Event()
        job.grown = lambda result: engine._on_loop(self._take, result)
        future.add_done_callback(lambda _: self._news.set())

    def _take(self, result: SearchResult) -> None:
        self._grown = result
        self._news.set()

    async def result(self) -> SearchResult:
        """What the search comes to, or what was enough. Raises what the search ends with."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._future.done():
                return self._future.result()
            assert self._grown is not None
            if await self._follow(self._grown) and not self._future.done():
                return self._grown


def _admit(
    engine: Engine, token_ids: Seq[int] | np.ndarray, params: SearchParams, catalog: Catalog | None
) -> tuple[Search, list[str]]:
    """A checked search, filters left aside, and warnings."""
    filters, plain = params.filters, msgspec.structs.replace(params, filters=None)
    plain = make_params(msgspec.to_builtins(plain))  # the constructor of a struct checks nothing
    catalog = catalog or engine.catalogs.get(plain.catalog, plain.min_catalog_version)
    if filters is not None and catalog is None:
        raise InvalidRequest("filters need a catalog", param="filters")
    return admit(token_ids, plain, catalog, engine._limits)


async def _narrow(job: Job, filters: Filters, future: asyncio.Future[SearchResult]) -> bool:
    """Keep a search to the items that filters allow, which are found off the event loop; whether there are any.

    Raises what `future` gets meanwhile, at once: the search was aborted, or the engine died.
    """
    search = job.search
    assert search.catalog is not None
    finding = asyncio.create_task(asyncio.to_thread(allowed_items, search.catalog, filters))
    try:
        await asyncio.wait((finding, future), return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            future.result()
    finally:
        finding.cancel()
    mask, warnings = finding.result()
    job.warnings += warnings
    job.search = narrowed(search, mask)
    return mask.num_allowed > 0
