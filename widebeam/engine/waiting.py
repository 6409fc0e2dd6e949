"""Searches whose callers wait for them, each with the future of its outcome. Belongs to the engine's event loop."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterator

from widebeam.engine.job import Job, Outcome
from widebeam.engine.request import SearchResult
from widebeam.engine.stats import OUTCOMES
from widebeam.errors import Aborted, RequestError

log = logging.getLogger(__name__)


class Waiting:
    """From when a search is accepted until its caller has the result, or has gone."""

    def __init__(self) -> None:
        self._futures: dict[Job, asyncio.Future[SearchResult]] = {}
        self.done = 0
        """Answers that came from the GPU thread to somebody who still waited."""
        self.ended = Counter(dict.fromkeys(OUTCOMES, 0))
        """Accepted searches by how they ended."""

    def __len__(self) -> int:
        return len(self._futures)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._futures)

    def add(self, job: Job) -> asyncio.Future[SearchResult]:
        """What the caller is to wait for."""
        future = self._futures[job] = asyncio.get_running_loop().create_future()
        return future

    def remove(self, job: Job, outcome: str) -> None:
        """Its caller waits no longer; `outcome` is one of OUTCOMES."""
        self.ended[outcome] += 1
        job.cancelled = True
        del self._futures[job]

    def resolve(self, outcomes: list[Outcome]) -> None:
        """What came from the GPU thread, for those who still wait."""
        for outcome in outcomes:
            future = self._futures.get(outcome.job)
            if future is None or future.done():
                continue
            self.done += 1
            if isinstance(outcome.result, RequestError):
                future.set_exception(outcome.result)
            else:
                future.set_result(outcome.result)

    def abort(self, request_id: str | None) -> int:
        """Answer searches with Aborted at once: see `Searching.abort`."""
        names = re.compile(".*" if request_id is None else rf"{re.escape(request_id)}(_\d+)?", re.DOTALL)
        aborted = 0
        for job, future in self._futures.items():
            if not future.done() and names.fullmatch(job.search.request_id):
                job.cancelled = True
                future.set_exception(Aborted("the request was aborted"))
                aborted += 1
        return aborted

    def answer_all(self, error: RequestError) -> None:
        """Answer everybody with this: nothing is searched any more."""
        left = [future for future in self._futures.values() if not future.done()]
        for future in left:
            future.set_exception(error)
        if left:
            log.warning("searches that end unfinished: %d (%s)", len(left), error)
