"""What is compiled and captured before anybody needs it: at start, for a new catalog, and while nobody waits; and of
the rest a little at a time in traffic."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from widebeam.engine import warmup
from widebeam.engine.compile import Made, captured_at_once, made_so_far
from widebeam.engine.core import FATAL, Core
from widebeam.engine.scheduler import WaveLimits
from widebeam.engine.search import group_size, prompt_groups
from widebeam.engine.shapes import (
    COMMON_TOKENS,
    CONTEXT_SPLITS,
    GROUP_TOKENS,
    REQUEST_RUNGS,
    Size,
    token_rung,
    token_rungs,
)
from widebeam.engine.wave import Search, Wave
from widebeam.faults import counted
from widebeam.progress import progress

log = logging.getLogger(__name__)
EVERY_S = 20.0
"""Between two captures that traffic waits for: each takes about as long as the wave."""


class Captures:
    """Runs waves of made-up prompts, so that later ones find what they need, and counts what was made later than that.

    Only where functions are compiled; `core` is that with its final pools.
    """

    def __init__(
        self,
        core: Core,
        limits: WaveLimits,
        mode: Literal["fast", "full", "none"],
        run: Callable[[list[Search]], object],
    ) -> None:
        """`run` runs one wave and waits for it."""
        self._core, self._limits, self._mode, self._run = core, limits, mode, run
        self._device = core.state.level.device
        self._made: Made | None = None
        """As of the end of the last warm-up; None in the middle of one, and where there is none."""
        self._met: set[Hashable] = set()
        self._larger: deque[tuple[Size, list[Search]]] = deque()
        """Of prompts that have no graph yet, each with a wave that meets it."""
        self._full = False
        """Some size could not be captured; no other is tried."""
        self._in_traffic = -math.inf
        """When traffic last waited for a capture."""
        self._told = False
        self.fallbacks = 0
        """Forms compiled after warm-up, and sizes that could not be captured; those that were left after one count with
        it."""
        self.late_graphs = 0
        """Graphs captured after warm-up, for sizes that it did not meet."""
        self.ungraphed_prompts = 0
        """Groups of prompts that were launched kernel by kernel since warm-up."""

    def start(self, widest: int, vocab_size: int, longest: int, policies: bool = False) -> None:
        """The first warm-up, over any token. Most of the larger prompts follow while nobody waits, or now if all is to
        be met."""
        context, graphed = self._core.context, self._core.programs.graphed
        limits, every = self._limits, self._mode == "full"
        if self._mode == "none":
            splits = (0,) if context.cache is None else (0, *CONTEXT_SPLITS)
            graphed.update(itertools.product(REQUEST_RUNGS, token_rungs(GROUP_TOKENS), splits))
            return
        self._meet_all(list(warmup.waves(limits, widest, vocab_size, longest, policies)))
        started = time.perf_counter()
        reusing: list[tuple[Size | None, list[Search]]] = []
        if context.cache is not None:
            reusing.extend(warmup.reusing(limits, vocab_size, longest, context.page_size, every))
            for size, searches in progress(reusing, "capturing prompts behind prefixes", "size"):
                if size is None:
                    with self._uncounted():
                        self._run(searches)
                elif not self._capture(size, searches):
                    break
            else:  # more requests together are rare: captured when they come
                graphed.update(itertools.product(REQUEST_RUNGS, token_rungs(COMMON_TOKENS), CONTEXT_SPLITS))
            context.flush()
        first, later = warmup.large_prompts(limits, widest, vocab_size, longest)
        first, later = (first + later, []) if every else (first, later)
        for size, searches in progress(first, "capturing large prompts", "size"):
            if self._full or not self._capture(size, searches):
                break
        self._larger.extend(later)
        self._say(len(reusing) + len(first), started)

    def add(self, waves: Iterable[list[Search]]) -> None:
        """Of waves over a catalog, run those of which a level needs what none of an earlier one has met."""
        met = set(self._met)  # a warm-up that fails has met nothing
        if self._mode != "none" and (planned := list(warmup.unmet(waves, met, self._limits))):
            self._meet_all(planned)
            self._met = met

    def _meet_all(self, planned: list[list[Search]]) -> None:
        started = time.perf_counter()
        with self._uncounted():
            for searches in progress(planned, "compiling and capturing waves", "wave"):
                self._meet(searches)
        self._say(len(planned), started)

    def _say(self, waves: int, started: float) -> None:
        if waves:
            log.info("warm-up: %s in %.1f s, %s", counted(waves, "wave"), time.perf_counter() - started, self._made)

    def _meet(self, searches: list[Search]) -> None:
        """Run a wave until its graphs are captured."""
        known = -1
        while (compiled := made_so_far(self._device).compiled) > known:  # again if it compiled, which puts that off
            known = compiled
            with captured_at_once():
                self._run(searches)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """What is made meanwhile is not made late."""
        self._made = None
        try:
            yield
        finally:
            self._made = made_so_far(self._device)

    def capture_more(self) -> bool:
        """Capture prompts of one more size, if there is one left, for up to half a second: for when nobody waits.

        There are too many sizes over COMMON_TOKENS for a quick start. Until then they take the graphs of larger ones.
        """
        if self._full or not self._larger:
            return False
        self._capture(*self._larger.popleft())
        return True

    @contextmanager
    def around(self, wave: Wave) -> Iterator[None]:
        """While a wave is launched. Where somebody waits all the time, sizes that come are captured now and then."""
        size = self._missing(wave)
        if size is None:
            yield
            return
        self.note()  # of a longer wave that this one passes
        before = self._made
        with self._given(size), captured_at_once():
            yield
        if before is not None and self._made is not None:  # what the wave compiled beside it is no part of that
            self._made = self._made._replace(compiled=before.compiled, skipped=before.skipped)
        self._in_traffic = time.monotonic()

    def _missing(self, wave: Wave) -> Size | None:
        """A size of the wave's prompts that is to get its graphs now. Of others those without any graph are counted."""
        if self._made is None:
            return None
        may = not self._full and time.monotonic() >= self._in_traffic + EVERY_S
        missing = None
        for group in prompt_groups(wave.searches):
            tokens = sum(search.num_new for search in group.searches)
            _, splits, graphed = group_size(self._core, wave.requests, group.searches)
            size = wave.requests, token_rung(tokens), splits
            served = graphed if splits else size in self._core.programs.graphed  # behind prefixes a larger one will do
            if may and missing is None and not served and size[1] <= GROUP_TOKENS:
                missing = size
            elif not graphed and size != missing:
                self._count_ungraphed(tokens)
        return missing

    def _count_ungraphed(self, tokens: int) -> None:
        if not self.ungraphed_prompts:
            log.info("prompts of %d tokens were launched kernel by kernel, as no graph is for so many", tokens)
        self.ungraphed_prompts += 1

    def _capture(self, size: Size, searches: list[Search]) -> bool:
        """Give prompts of one size their graphs; False if that cannot be."""
        try:
            with self._given(size):
                self._meet(searches)
        except FATAL:
            raise
        except Exception:  # it is counted
            return False
        return True

    @contextmanager
    def _given(self, size: Size) -> Iterator[None]:
        """Prompts of one size get their graphs within. If that cannot be it is counted, and no other size gets any."""
        graphed = self._core.programs.graphed
        graphed.add(size)
        try:
            with self._uncounted():
                yield
        except FATAL:
            raise
        except Exception as error:  # out of memory, above all
            log.warning("prompts of %d tokens get no graph, nor do others after them: %s", size[1], error)
            graphed.discard(size)
            self._full = True
            self.fallbacks += 1
            raise

    def note(self) -> None:
        """Behind a wave: count what it needed and warm-up did not meet, and log the first that was compiled.

        Compiling takes seconds and is a fallback; capturing takes about as long as the wave, once for its sizes.
        """
        if self._made is None or (made := made_so_far(self._device)) == self._made:
            return
        self.late_graphs += made.captured - self._made.captured
        fallbacks = made.compiled + made.skipped - self._made.compiled - self._made.skipped
        if fallbacks and not self._told:
            log.warning("a wave had a form that warm-up did not meet, which costs seconds once: %s", made)
            self._told = True
        self.fallbacks, self._made = self.fallbacks + fallbacks, made
