"""Which jobs share a wave: against the rules restated, with a clock that the test sets."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from widebeam.engine.scheduler import Job, Outcome, Scheduler, WaveLimits
from widebeam.engine.shapes import LEAST_ROWS, rung, token_rung
from widebeam.engine.wave import Search
from widebeam.errors import DeadlineExceeded

LIMITS = WaveLimits(requests=4, tokens=100, rows=64, context_pages=20, beam_slots=256, page_size=8)


def make_job(
    name: str, tokens: int = 10, width: int = 4, levels: int = 3, normalizer: Any = "vocab", **fields: Any
) -> Job:
    search = Search(
        request_id=name, token_ids=np.zeros(tokens, dtype=np.int32), widths=(width,) * levels, num_returned=1,
        catalog=None, normalizer=normalizer, join=1, stop_token_ids=(), length_penalty=1.0,
    )  # fmt: skip
    return Job(search, submitted_at=0.0, deadline=fields.get("deadline"), cancelled=fields.get("cancelled", False))


def names(wave: list[Job]) -> str:
    return "".join(job.search.request_id for job in wave)


def cut(jobs: list[Job], now: float = 0.0) -> tuple[list[str], list[Outcome]]:
    """All waves that come of these jobs, and what was dropped."""
    dropped: list[Outcome] = []
    scheduler = Scheduler(LIMITS, dropped.append)
    for job in jobs:
        scheduler.add(job)
    waves = []
    while wave := scheduler.next_wave(now):
        waves.append(names(wave))
    assert len(scheduler) == 0
    return waves, dropped


def test_jobs_share_a_wave_up_to_its_limits() -> None:
    assert cut([make_job(name) for name in "abcdef"])[0] == ["abcd", "ef"]  # requests
    assert cut([make_job("a", tokens=60), make_job("b", tokens=50), make_job("c", tokens=30)])[0] == ["ac", "b"]
    assert cut([make_job("a", width=40), make_job("b", width=30), make_job("c", width=20)])[0] == ["ac", "b"]
    assert cut([make_job("a", levels=100, width=1), make_job("b", width=4)])[0] == ["a", "b"]  # beam slots


def test_a_prompt_over_the_limit_runs_alone() -> None:
    assert cut([make_job("a"), make_job("b", tokens=150), make_job("c")])[0] == ["ac", "b"]
    assert cut([make_job("b", tokens=150), make_job("a"), make_job("c")])[0] == ["b", "ac"]


def test_different_heads_form_waves_of_their_own() -> None:
    jobs = [make_job("a"), make_job("b", normalizer="level"), make_job("c"), make_job("d", normalizer="level")]
    assert cut(jobs)[0] == ["ac", "bd"]


def test_late_and_cancelled_jobs_cost_no_wave() -> None:
    jobs = [make_job("a", deadline=1.0), make_job("b", cancelled=True), make_job("c", deadline=3.0)]
    waves, dropped = cut(jobs, now=2.0)
    assert waves == ["c"]
    assert [outcome.job.search.request_id for outcome in dropped] == ["a", "b"]
    assert isinstance(dropped[0].result, DeadlineExceeded)


@given(
    st.lists(
        st.tuples(st.integers(1, 160), st.integers(1, 64), st.integers(1, 4), st.sampled_from(["vocab", "level"])),
        min_size=1,
        max_size=30,
    )
)
def test_every_job_runs_once_within_the_limits_and_the_oldest_first(specs: list[tuple[int, int, int, str]]) -> None:
    dropped: list[Outcome] = []
    scheduler = Scheduler(LIMITS, dropped.append)
    jobs = [make_job(str(i), *spec) for i, spec in enumerate(specs)]
    for job in jobs:
        scheduler.add(job)
    waiting = list(jobs)
    while waiting:
        wave = scheduler.next_wave(0.0)
        assert wave[0] is waiting[0], "the oldest job did not run"
        assert len({job.key for job in wave}) == 1
        if len(wave) > 1:
            rows = sum(job.search.rows for job in wave)
            assert len(wave) <= LIMITS.requests and rows <= LIMITS.rows
            assert sum(job.search.num_tokens for job in wave) <= LIMITS.tokens
            assert rung(rows, LIMITS.rows) * (max(job.search.levels for job in wave) - 1) <= LIMITS.beam_slots
        for job in wave:
            waiting.remove(job)
    assert not dropped and len(scheduler) == 0


@given(st.integers(1, 100_000))
def test_rungs_cover_and_waste_at_most_a_third(size: int) -> None:
    assert size <= rung(size) <= max(LEAST_ROWS, -(-size * 3 // 2))
    assert rung(rung(size)) == rung(size)
    assert rung(size, max(size, LEAST_ROWS)) == max(size, LEAST_ROWS)
    assert size <= token_rung(size) <= max(size + 127, size * 9 // 8) and token_rung(token_rung(size)) == token_rung(
        size
    )
