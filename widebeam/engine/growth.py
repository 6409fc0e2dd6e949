"""The texts of a wave between two of its pieces: what has ended, and what still grows.

Letters: L levels, R rows.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from widebeam.engine.flight import Clock, search_result, unpack
from widebeam.engine.job import Job
from widebeam.engine.request import Sequence, Timing
from widebeam.engine.staging import HostCopy
from widebeam.engine.wave import Search, Wave
from widebeam.errors import EngineError


@dataclass
class Growth:
    """Texts on their way to the host. Text i of a search is its row i while it grows, and at its place i then."""

    wave: Wave
    level: int
    """Tokens that those have which grow."""
    clock: Clock
    """Of the wave."""
    ended: HostCopy
    growing: HostCopy

    def tell(self, jobs: list[Job], started: float) -> None:
        """Wait for the device, and tell those that follow a text. `started`: when the wave was launched, monotonic."""
        self.clock.wait_for_all()
        outcomes, places = unpack(self.wave.searches, *self.ended.arrays())
        token_LR, logprob_LR, cum_R = self.growing.arrays()
        first_row = first_place = 0
        for job, search, ended, own, rows in zip(
            jobs, self.wave.searches, outcomes, places, self.wave.rows(self.level - 1), strict=True
        ):
            if job.grown and not isinstance(ended, EngineError):
                texts: dict[int, Sequence] = {place - first_place: text for place, text in zip(own, ended, strict=True)}
                for text in range(rows):
                    row = first_row + text
                    if cum_R[row] > -math.inf:
                        texts[text] = _grown(search, token_LR[:, row].tolist(), logprob_LR[:, row].tolist())
                job.grown(search_result(job, [texts[text] for text in sorted(texts)], self._timing(job, started)))
            first_row, first_place = first_row + rows, first_place + search.num_returned

    def _timing(self, job: Job, started: float) -> Timing:
        now, prefill = time.monotonic(), self.clock.elapsed_ms(0, 1)
        return Timing(
            queue=(started - job.submitted_at) * 1e3,
            prefill=prefill,
            decode=(now - started) * 1e3 - prefill,
            total=(now - job.submitted_at) * 1e3,
        )


def _grown(search: Search, token_ids: list[int], logprobs: list[float]) -> Sequence:
    cum = sum(logprobs)
    return Sequence(
        token_ids=token_ids,
        logprobs=logprobs,
        cum_logprob=cum,
        score=cum / len(token_ids) ** search.length_penalty,
        finish_reason=None,
    )
