"""Which requests form the next wave. Pure Python, no torch, no clock of its own. Used on the GPU thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from widebeam.engine.request import SearchResult
from widebeam.engine.shapes import rung
from widebeam.engine.wave import Search
from widebeam.errors import DeadlineExceeded, RequestError


@dataclass(eq=False)
class Job:
    """A search on its way through the engine. Gets exactly one outcome."""

    search: Search
    submitted_at: float
    """Monotonic seconds."""
    deadline: float | None
    warnings: list[str] = field(default_factory=list)
    cancelled: bool = field(default=False)
    """Set by the event loop when nobody waits any more; read by the GPU thread."""

    @property
    def key(self) -> Hashable:
        """Jobs of one wave have equal keys: one catalog version and one head."""
        return (id(self.search.catalog), self.search.normalizer)

    def wanted(self, now: float) -> bool:
        return not self.cancelled and (self.deadline is None or now < self.deadline)


@dataclass
class Outcome:
    """The one end of a job."""

    job: Job
    result: SearchResult | RequestError


@dataclass(frozen=True)
class WaveLimits:
    """What fits in one wave."""

    requests: int
    tokens: int
    rows: int
    context_pages: int
    beam_slots: int
    page_size: int


class Scheduler:
    """A queue from which waves are cut, oldest first."""

    def __init__(self, limits: WaveLimits, drop: Callable[[Outcome], None]) -> None:
        self._limits = limits
        self._drop = drop
        self._queue: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, job: Job) -> None:
        self._queue.append(job)

    def clear(self) -> list[Job]:
        """Give up the whole queue, when the engine ends."""
        jobs = list(self._queue)
        self._queue.clear()
        return jobs

    def next_wave(self, now: float) -> list[Job]:
        """The oldest job that is still wanted, and in order of age whatever of its key fits beside it.

        The oldest one always runs, a prompt over the token limit alone; what does not fit keeps its place.
        """
        wave: list[Job] = []
        later: deque[Job] = deque()
        for job in self._queue:
            if not job.wanted(now):
                self._drop(Outcome(job, DeadlineExceeded("the deadline passed while the request was waiting")))
            elif not wave or (job.key == wave[0].key and self._fits([*wave, job])):
                wave.append(job)
            else:
                later.append(job)
        self._queue = later
        return wave

    def _fits(self, wave: list[Job]) -> bool:
        limits = self._limits
        searches = [job.search for job in wave]
        if len(searches) > limits.requests or sum(search.num_tokens for search in searches) > limits.tokens:
            return False
        if sum(-(-search.num_tokens // limits.page_size) for search in searches) > limits.context_pages:
            return False
        rows = sum(search.rows for search in searches)
        levels = max(search.levels for search in searches)
        return rows <= limits.rows and rung(rows, limits.rows) * (levels - 1) <= limits.beam_slots
