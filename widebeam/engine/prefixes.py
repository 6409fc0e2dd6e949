"""What was computed for prompts and is kept for later ones: on the device, and in the host's memory behind it."""

from __future__ import annotations

from collections.abc import Iterable

from widebeam.engine.core import Core
from widebeam.engine.job import Job
from widebeam.engine.wave import Search
from widebeam.kv.prefix_cache import PrefixStats
from widebeam.kv.rates import HostStats


class Prefixes:
    """The prefix cache with its host tier, where there are any. On the GPU thread, but for the numbers."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._before = self._stats()

    def look_up(self, search: Search) -> None:
        """Say what of a prompt is in ContextKV at this moment."""
        if search.prefix is not None and (cache := self._core.context.cache) is not None:
            search.num_cached = cache.peek(search.prefix)

    def move_pages(self, waiting: Iterable[Search]) -> None:
        """Between waves: bring back pages for searches in the queue, oldest first, and save those that are not saved
        yet. Waits for none."""
        if self._core.tier is not None:
            self._core.tier.prefetch(waiting)
            self._core.tier.save()

    @property
    def moves_pages(self) -> bool:
        """Whether copies of pages run: nothing else tells when they are over."""
        return self._core.tier is not None and self._core.tier.busy

    def note_prefill(self, jobs: list[Job], seconds: float) -> None:
        """A wave of these jobs has taken so long to prefill."""
        if self._core.tier is not None:
            self._core.tier.prefill_rate.note(sum(job.search.num_new for job in jobs), seconds)

    def flush(self, salt: bytes | None = None) -> None:
        """Nothing that was computed so far is used again; `salt`: nothing of this salt."""
        self._core.context.flush(salt)
        if self._core.tier is not None:
            self._core.tier.flush(salt)

    def settle(self) -> None:
        """Wait for copies of pages, before memory that they read or write goes away."""
        if self._core.tier is not None:
            self._core.tier.settle()

    @property
    def stats(self) -> PrefixStats:
        """Of what came since this was made, after the warm-up, which left nothing cached; all 0 without a prefix cache.
        On any thread."""
        return PrefixStats(*(now - then for now, then in zip(self._stats(), self._before, strict=True)))

    def _stats(self) -> PrefixStats:
        cache = self._core.context.cache
        return PrefixStats(*[0] * len(PrefixStats._fields)) if cache is None else cache.stats

    @property
    def host_stats(self) -> HostStats:
        """All 0 without a host tier. On any thread."""
        return self._core.tier.stats if self._core.tier is not None else HostStats()
