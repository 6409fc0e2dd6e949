"""A wave between its launch and its outcomes: what is waited for, and how results are read.

Letters: L levels, F finished sequences.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from widebeam.engine.job import Job, Outcome
from widebeam.engine.request import LevelBeams, SearchResult, Sequence, Timing
from widebeam.engine.staging import HostCopy
from widebeam.engine.state import REASONS
from widebeam.engine.trace import TraceCopy
from widebeam.engine.wave import Search
from widebeam.errors import DeadlineExceeded, EngineDead, EngineError, RequestError


@dataclass
class WaveResult:
    """What a wave gave: for each search its sequences, best first, or why it failed."""

    outcomes: list[list[Sequence] | EngineError]
    levels: list[list[LevelBeams] | None]
    """Beams by level, for each search that asks."""
    prefill_ms: float
    decode_ms: float
    cut_short: bool
    """Nobody wanted the results any more, so levels were left out: the sequences are not the search's."""


class Clock:
    """Moments on the device's own time line: to be waited for, and to be told apart once they have passed."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None  # costs a look-up each time
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        if self._stream is not None:
            event = torch.cuda.Event(enable_timing=True, blocking=True)  # who waits for it sleeps
            event.record(self._stream)
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def wait(self, place: int) -> None:
        """Until the device has passed a mark."""
        event = self._marks[place]
        if not isinstance(event, float):
            event.synchronize()

    def wait_for_all(self) -> None:
        """Until the device has run what was launched so far."""
        if self._stream is not None:
            self._stream.synchronize()

    def elapsed_ms(self, first: int, last: int) -> float:
        start, end = self._marks[first], self._marks[last]
        if isinstance(start, float) or isinstance(end, float):
            return (end - start) * 1e3  # type: ignore[operator]
        return start.elapsed_time(end)


@dataclass
class LaunchedWave:
    """A wave that the device has yet to run."""

    searches: list[Search]
    cut_short: bool
    _clock: Clock
    _home: HostCopy
    _trace: TraceCopy | None

    def wait_for_prefill(self) -> None:
        """Until the device has run the prompts: only the levels are left."""
        self._clock.wait(1)

    def result(self) -> WaveResult:
        """Wait for the device and read what the wave gave."""
        self._clock.wait(3)
        outcomes, places = unpack(self.searches, *self._home.arrays())
        levels: list[list[LevelBeams] | None] = [None] * len(outcomes)
        if self._trace is not None:
            levels = self._trace.give([[] if isinstance(one, EngineError) else one for one in outcomes], places)
        clock = self._clock
        return WaveResult(outcomes, levels, clock.elapsed_ms(0, 1), clock.elapsed_ms(1, 2), self.cut_short)


@dataclass(eq=False)
class Flight:
    """The jobs of a launched wave. Whoever holds it, on whatever thread, waits for the device alone."""

    jobs: list[Job]
    launched: LaunchedWave
    started: float
    """When launching began, monotonic seconds."""
    stopping: Callable[[], bool]
    prefill_s: float | None = None
    """Time of its prefill, once its outcomes are known."""

    def outcomes(self) -> list[Outcome]:
        """Wait for the device: exactly one outcome for each job. Raises torch.AcceleratorError if the device broke."""
        result = self.launched.result()
        self.prefill_s = result.prefill_ms / 1e3
        if not result.cut_short:
            return _outcomes(self.jobs, result, self.started)
        if self.stopping():
            return [Outcome(job, EngineDead("the engine has stopped")) for job in self.jobs]
        return [Outcome(job, DeadlineExceeded("the deadline passed during the search")) for job in self.jobs]


def _outcomes(jobs: list[Job], result: WaveResult, started: float) -> list[Outcome]:
    """One outcome for each job of a finished wave."""
    ended = time.monotonic()
    outcomes = []
    for job, sequences, levels in zip(jobs, result.outcomes, result.levels, strict=True):
        if isinstance(sequences, RequestError):
            outcomes.append(Outcome(job, sequences))
            continue
        timing = Timing(
            queue=(started - job.submitted_at) * 1e3,
            prefill=result.prefill_ms,
            decode=result.decode_ms,
            total=(ended - job.submitted_at) * 1e3,
        )
        outcomes.append(Outcome(job, search_result(job, sequences, timing, levels)))
    return outcomes


def search_result(
    job: Job, sequences: list[Sequence], timing: Timing, levels: list[LevelBeams] | None = None
) -> SearchResult:
    """What a job's caller gets."""
    search = job.search
    return SearchResult(
        request_id=search.request_id,
        sequences=sequences,
        prompt_tokens=search.num_tokens,
        cached_tokens=search.num_cached,
        widths=search.widths,
        normalizer=search.normalizer,
        catalog=search.catalog.name if search.catalog else None,
        catalog_version=search.catalog.version if search.catalog else None,
        timing_ms=timing,
        warnings=list(job.warnings),
        levels=levels,
        mask=search.mask,
    )


def unpack(
    searches: list[Search],
    token_LF: np.ndarray,
    logprob_LF: np.ndarray,
    integers: np.ndarray,
    floats: np.ndarray,
    broken_B: np.ndarray,
) -> tuple[list[list[Sequence] | EngineError], list[list[int]]]:
    """Host arrays -> sequences, for each search its own places; empty places (score -inf) are left out.

    And the places that they come from. The places of a sample lie in order of its noise.
    """
    used, L = slice(sum(search.num_returned for search in searches)), max(search.levels for search in searches)
    # plain lists: the elements of an array one by one take twice as long
    length_F, node_F, reason_F = integers[:, used].tolist()
    score_F, cum_F = floats[:, used].tolist()
    token_FL, logprob_FL = token_LF[:L, used].T.tolist(), logprob_LF[:L, used].T.tolist()
    outcomes: list[list[Sequence] | EngineError] = []
    filled: list[list[int]] = []
    start = 0
    for search, broken in zip(searches, broken_B.tolist(), strict=False):
        places = [f for f in range(start, start + search.num_returned) if score_F[f] > -math.inf and not broken]
        start += search.num_returned
        if search.plan is not None and search.plan.noise:
            places.sort(key=lambda f: -score_F[f])
        filled.append(places)
        if broken:
            outcomes.append(EngineError("the model's logits are not finite numbers", code="non_finite_logits"))
            continue
        outcomes.append(
            [
                Sequence(
                    token_ids=token_FL[f][: length_F[f]],
                    logprobs=logprob_FL[f][: length_F[f]],
                    cum_logprob=cum_F[f],
                    score=score_F[f],
                    finish_reason=REASONS[reason_F[f]],  # type: ignore[arg-type]
                    node=node_F[f] if search.catalog is not None else -1,
                )
                for f in places
            ]
        )
    return outcomes, filled
