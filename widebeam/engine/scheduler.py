"""Which requests form the next wave. Pure Python, no torch, no clock of its own. Used on the GPU thread only.

A wave runs to its end, so its jobs have similar numbers of levels. It is headed by the job of the highest priority,
among those of the fewest levels, among those the oldest; but a job that younger ones have held up for long goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from widebeam.constraints.filters import ItemMask
from widebeam.engine.job import LEVEL_RUNGS, Job, Outcome
from widebeam.engine.shapes import rung
from widebeam.engine.stats import Distributions
from widebeam.engine.wave import Search
from widebeam.errors import DeadlineExceeded

CLEAN_WAVES, RECOVERY_STEPS = 64, 8
"""A limit of rows that was lowered for want of memory rises by a step after so many waves, back to the setting."""

CLOSED_BY = ("empty", "requests", "tokens", "rows", "pages", "slots", "masks", "levels", "kind")
"""What may keep the next job in turn out of a wave: that there is none, a limit, or that it is of another rung of
levels, or of another kind (catalog version, normaliser, drawn or not)."""


@dataclass(frozen=True)
class WaveLimits:
    """What fits in one wave."""

    requests: int
    tokens: int
    rows: int
    context_pages: int
    beam_slots: int
    mask_places: int
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
    slots: int = 0
    masks: frozenset[ItemMask] = frozenset()
    """Distinct ones: requests of equal filters mostly share one."""

    @property
    def mask_places(self) -> int:
        return sum(mask.places for mask in self.masks)

    @staticmethod
    def of(searches: Iterable[Search], limits: WaveLimits) -> Load:
        """What these need."""
        load = Load()
        for search in searches:
            load = load.plus(search, limits)
        return load

    def plus(self, search: Search, limits: WaveLimits) -> Load:
        """With one more search."""
        beam_rows, levels = self.beam_rows + search.beam_rows, max(self.levels, search.levels)
        return Load(
            self.requests + 1,
            self.tokens + search.num_new,
            self.rows + search.rows,
            beam_rows,
            levels,
            self.pages + limits.pages_for(search.num_tokens),
            rung(beam_rows, limits.rows) * (levels - 1),
            self.masks if search.mask is None else self.masks | {search.mask},
        )

    def over(self, limits: WaveLimits) -> str | None:
        """A limit that it exceeds, by its name in CLOSED_BY."""
        limited = (
            ("requests", self.requests, limits.requests),
            ("tokens", self.tokens, limits.tokens),
            ("rows", self.rows, limits.rows),
            ("pages", self.pages, limits.context_pages),
            ("slots", self.slots, limits.beam_slots),
            ("masks", self.mask_places, limits.mask_places),
        )
        return next((name for name, amount, limit in limited if amount > limit), None)

    def fits(self, limits: WaveLimits) -> bool:
        return self.over(limits) is None

    def held_by(self, limits: WaveLimits) -> bool:
        """Whether the pools have room for it, whatever else is over."""
        return (
            self.pages <= limits.context_pages
            and self.slots <= limits.beam_slots
            and self.mask_places <= limits.mask_places
        )


class Scheduler:
    """A queue from which waves are cut. The public numbers may be read on any thread."""

    def __init__(
        self,
        limits: WaveLimits,
        drop: Callable[[Outcome], None],
        look_up: Callable[[Search], None] = lambda search: None,
    ) -> None:
        """`look_up` says by `num_cached` what of a prompt need not be computed at this moment."""
        self._limits = limits
        self._drop = drop
        self._look_up = look_up
        self._queue: list[Job] = []
        """What waits, oldest first."""
        self._held_up: list[Job] = []
        """Those of the queue that are older than the head of the last wave, or of a long one that goes on beside it."""
        self._cut_at = 0.0
        self._clean_waves = 0
        self.rows_limit = limits.rows
        """Rows that a wave of several jobs may have: lower than the setting for a while after running out of memory."""
        self.waves = dict.fromkeys(LEVEL_RUNGS, 0)
        """Waves cut so far, by their rung of levels."""
        self.jobs_overtaken = self.jobs_aged = 0
        """Jobs in those waves that a younger one's wave had overtaken, and that had waited for as long as they may."""
        self.waves_passing = 0
        """Those waves that ran between pieces of a longer one."""
        self.jobs_dropped = 0
        """Jobs that left the queue without running."""
        self.closed_by = dict.fromkeys(CLOSED_BY, 0)
        """Those waves by what kept the next job in turn out."""
        self.distributions = Distributions()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> Iterator[Search]:
        """The searches of the queue that somebody still waits for, oldest first."""
        return (job.search for job in self._queue if not job.cancelled)

    def add(self, job: Job) -> None:
        self._queue.append(job)

    def clear(self) -> list[Job]:
        """Give up the whole queue, when the engine ends."""
        jobs, self._queue = self._queue, []
        return jobs

    def next_wave(self, now: float, beside: Load | None = None) -> list[Job]:
        """The job whose turn it is, and in order of turn and age whatever of its key fits beside it.

        That one always runs, a prompt over the token limit alone; what does not fit keeps its place. Once a job has
        aged, only older ones head waves before it: whatever comes, it is overtaken for no longer than its patience and
        one wave more.

        `beside` is what a long wave holds that a short one may pass: then only jobs of the fewest levels count, and
        none for which that leaves no room.
        """
        for job in self._held_up:
            job.overtaken_s += now - self._cut_at
        self._queue = [job for job in self._queue if self._still_wanted(job, now)]
        in_turn = sorted(self._queue, key=lambda job: job.turn)
        limits = self._limits
        if beside is not None:
            left = {
                "context_pages": limits.context_pages - beside.pages,
                "beam_slots": limits.beam_slots - beside.slots,
                "mask_places": limits.mask_places - beside.mask_places,
            }
            limits = replace(limits, **left)
            in_turn = [job for job in in_turn if job.levels == LEVEL_RUNGS[0] and self.load([job]).held_by(limits)]
        wave = self._cut(in_turn, limits)
        self.waves_passing += bool(wave) and beside is not None
        for job in wave:
            job.waiting = False
        older = self._queue.index(wave[0]) if wave else 0
        if beside is not None:  # the long wave goes on holding up whom it has held up so far
            held_up = set(self._held_up)
            older = max(older, sum(job in held_up for job in self._queue))
        self._held_up = [job for job in self._queue[:older] if job.waiting]
        self._queue = [job for job in self._queue if job.waiting]
        self._cut_at = now
        return wave

    def _still_wanted(self, job: Job, now: float) -> bool:
        wanted = job.wanted(now)
        if not wanted:
            self.jobs_dropped += 1
            self._drop(Outcome(job, DeadlineExceeded("the deadline passed while the request was waiting")))
        return wanted

    def _cut(self, jobs: list[Job], limits: WaveLimits) -> list[Job]:
        """The first, and whatever of its key fits beside it."""
        wave = jobs[:1]
        for job in wave:
            self._look_up(job.search)
        load = self.load(wave)
        closed_by = None
        for job in jobs[1:]:
            obstacle = self._obstacle(job, wave[0], load, limits)
            if obstacle is None:
                wave.append(job)
                load = load.plus(job.search, self._limits)
            closed_by = closed_by or obstacle
        if wave:
            self._count(wave, load, closed_by or "empty")
        return wave

    def _obstacle(self, job: Job, head: Job, load: Load, limits: WaveLimits) -> str | None:
        """What keeps a job out of the wave of another one, with so much in it already; one of CLOSED_BY."""
        if job.key != head.key:
            return "kind" if job.levels == head.levels else "levels"
        if load.requests == limits.requests:
            return "requests"
        self._look_up(job.search)
        heavier = load.plus(job.search, limits)
        return "rows" if heavier.rows > self.rows_limit else heavier.over(limits)

    def load(self, jobs: list[Job]) -> Load:
        """What jobs take together."""
        return Load.of((job.search for job in jobs), self._limits)

    def _count(self, wave: list[Job], load: Load, closed_by: str) -> None:
        self.waves[wave[0].levels] += 1
        self.closed_by[closed_by] += 1
        seen = self.distributions
        seen.wave_requests.add(load.requests)
        seen.wave_rows.add(load.rows)
        seen.wave_prompt_tokens.add(load.tokens)
        for job in wave:
            self.jobs_overtaken += job.overtaken_s > 0
            self.jobs_aged += job.aged
            seen.beam_width.add(max(job.search.widths))
            seen.prompt_length_tokens.add(job.search.num_tokens)

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
