"""A search on its way through the engine: whose turn it is, whom it may run beside, how it ends. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from widebeam.engine.request import SearchResult
from widebeam.engine.wave import Search
from widebeam.errors import RequestError

LEVEL_RUNGS = (8, 16, 32, 64, 128, 256, 512)
"""Jobs whose numbers of levels lie on the same rung may share a wave."""
LEAST_PATIENCE_S, PATIENCE_S_PER_LEVEL = 0.5, 0.05
"""For how long waves of younger jobs may hold up a job. By level, so that long jobs, which hold up everybody else once
they run, get a bounded share of a device that is busy with short ones."""


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
    grown: Callable[[SearchResult], None] | None = None
    """Takes its texts as they are between pieces of the search. Called on the GPU thread, must not block."""

    @property
    def levels(self) -> int:
        """Levels of the search, as a rung."""
        return LEVEL_RUNGS[bisect_left(LEVEL_RUNGS, self.search.levels)]

    @property
    def key(self) -> Hashable:
        """Jobs of one wave have equal keys: one catalog version, one head, about as many levels, drawn or not."""
        search = self.search
        return (id(search.catalog), search.normalizer, self.levels, search.sampling is None)

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
