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

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a prompt takes."""
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True)
class Load:
    """What the jobs of a wave need together."""

    requests: int = 0
    tokens: int = 0
    rows: int = 0
    beam_rows: int = 0
    levels: int = 1
    pages: int = 0

    def plus(self, search: Search, limits: WaveLimits) -> Load:
        """With one more search."""
        return Load(
            self.requests + 1,
            self.tokens + search.num_tokens,
            self.rows + search.rows,
            self.beam_rows + search.beam_rows,
            max(self.levels, search.levels),
            self.pages + limits.pages_for(search.num_tokens),
        )

    def fits(self, limits: WaveLimits) -> bool:
        slots = rung(self.beam_rows, limits.rows) * (self.levels - 1)
        return (
            self.requests <= limits.requests
            and self.tokens <= limits.tokens
            and self.rows <= limits.rows
            and self.pages <= limits.context_pages
            and slots <= limits.beam_slots
        )


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
        load = Load()
        for job in self._queue:
            if not job.wanted(now):
                self._drop(Outcome(job, DeadlineExceeded("the deadline passed while the request was waiting")))
                continue
            heavier = load.plus(job.search, self._limits)
            if not wave or (job.key == wave[0].key and heavier.fits(self._limits)):
                wave.append(job)
                load = heavier
            else:
                later.append(job)
        self._queue = later
        return wave
