"""Which requests form the next wave. Pure Python, no torch, no clock of its own. Used on the GPU thread only.

A wave runs to its end, so its jobs have similar numbers of levels. It is headed by the job of the highest priority,
among those of the fewest levels, among those the oldest; but a job that younger ones have held up for long goes first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from widebeam.engine.request import SearchResult
from widebeam.engine.shapes import rung
from widebeam.engine.wave import Search
from widebeam.errors import DeadlineExceeded, RequestError

LEVEL_RUNGS = (8, 16, 32, 64, 128, 256, 512)
"""Jobs whose numbers of levels lie on the same rung may share a wave."""
LEAST_PATIENCE_S, PATIENCE_S_PER_LEVEL = 0.5, 0.05
"""For how long waves of younger jobs may hold up a job. By level, so that long jobs, which hold up everybody else once
they run, get a bounded share of a device that is busy with short ones."""
CLEAN_WAVES, RECOVERY_STEPS = 64, 8
"""A limit of rows that was lowered for want of memory rises by a step after so many waves, back to the setting."""


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
    priority: int = 0
    """Higher goes first."""
    waiting: bool = True
    """Not in a wave yet. Written by the GPU thread."""
    overtaken_s: float = 0.0
    """Time for which waves headed by younger jobs have run while this one waited."""

    @property
    def levels(self) -> int:
        """Levels of the search, as a rung."""
        return LEVEL_RUNGS[bisect_left(LEVEL_RUNGS, self.search.levels)]

    @property
    def key(self) -> Hashable:
        """Jobs of one wave have equal keys: one catalog version, one head, and about as many levels."""
        return (id(self.search.catalog), self.search.normalizer, self.levels)

    @property
    def aged(self) -> bool:
        """It has been held up for as long as it may be."""
        return self.overtaken_s >= max(LEAST_PATIENCE_S, PATIENCE_S_PER_LEVEL * self.search.levels)

    @property
    def turn(self) -> tuple[bool, int, int]:
        """The job of the least turn goes first; of several, the oldest."""
        return (False, 0, 0) if self.aged else (True, -self.priority, self.levels)

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
    """A queue from which waves are cut. The public numbers may be read on any thread."""

    def __init__(self, limits: WaveLimits, drop: Callable[[Outcome], None]) -> None:
        self._limits = limits
        self._drop = drop
        self._queue: list[Job] = []
        """What waits, oldest first."""
        self._held_up: list[Job] = []
        """Those of the queue that are older than the head of the last wave."""
        self._cut_at = 0.0
        self._clean_waves = 0
        self.rows_limit = limits.rows
        """Rows that a wave of several jobs may have: lower than the setting for a while after running out of memory."""
        self.waves = dict.fromkeys(LEVEL_RUNGS, 0)
        """Waves cut so far, by their rung of levels."""
        self.jobs_overtaken = self.jobs_aged = 0
        """Jobs in those waves that a younger one's wave had overtaken, and that had waited for as long as they may."""

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, job: Job) -> None:
        self._queue.append(job)

    def clear(self) -> list[Job]:
        """Give up the whole queue, when the engine ends."""
        jobs, self._queue = self._queue, []
        return jobs

    def next_wave(self, now: float) -> list[Job]:
        """The job whose turn it is, and in order of turn and age whatever of its key fits beside it.

        That one always runs, a prompt over the token limit alone; what does not fit keeps its place. Once a job has
        aged, only older ones head waves before it: whatever comes, it is overtaken for no longer than its patience and
        one wave more.
        """
        for job in self._held_up:
            job.overtaken_s += now - self._cut_at
        self._queue = [job for job in self._queue if self._still_wanted(job, now)]
        wave = self._cut(sorted(self._queue, key=lambda job: job.turn))
        for job in wave:
            job.waiting = False
            self.jobs_overtaken += job.overtaken_s > 0
            self.jobs_aged += job.aged
        self._held_up = self._queue[: self._queue.index(wave[0])] if wave else []
        self._queue = [job for job in self._queue if job.waiting]
        self._cut_at = now
        if wave:
            self.waves[wave[0].levels] += 1
        return wave

    def _still_wanted(self, job: Job, now: float) -> bool:
        wanted = job.wanted(now)
        if not wanted:
            self._drop(Outcome(job, DeadlineExceeded("the deadline passed while the request was waiting")))
        return wanted

    def _cut(self, jobs: list[Job]) -> list[Job]:
        """The first, and whatever of its key fits beside it."""
        wave: list[Job] = []
        load = Load()
        for job in jobs:
            if wave and (job.key != wave[0].key or load.requests == self._limits.requests):
                continue
            heavier = load.plus(job.search, self._limits)
            if not wave or (heavier.rows <= self.rows_limit and heavier.fits(self._limits)):
                wave.append(job)
                load = heavier
        return wave

    def ran_out_of_memory(self, wave: list[Job]) -> None:
        """Later waves have half the rows of this one, or those of its widest search, which then runs alone.

        A search that fails alone says nothing of others.
        """
        rows = [job.search.rows for job in wave]
        if len(wave) > 1:
            self.rows_limit = min(self.rows_limit, max(max(rows), sum(rows) // 2))
        self._clean_waves = 0

    def had_memory(self) -> None:
        """After CLEAN_WAVES such waves the limit of rows rises by a step, up to the setting."""
        self._clean_waves += 1
        if self._clean_waves % CLEAN_WAVES == 0:
            self.rows_limit = min(self.rows_limit - (-self._limits.rows // RECOVERY_STEPS), self._limits.rows)
