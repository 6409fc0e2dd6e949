"""Which jobs share a wave and whose turn it is: against the rules restated, with a clock that the test sets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from widebeam.constraints.filters import ItemMask
from widebeam.engine.job import Job, Outcome
from widebeam.engine.scheduler import CLEAN_WAVES, Load, Scheduler, WaveLimits
from widebeam.engine.shapes import LEAST_ROWS, rung, token_rung
from widebeam.engine.wave import Search
from widebeam.errors import DeadlineExceeded

LIMITS = WaveLimits(requests=4, tokens=100, rows=64, context_pages=20, beam_slots=256, mask_places=100, page_size=8)


def make_job(
    name: str, tokens: int = 10, width: int = 4, levels: int = 3, normalizer: Any = "vocab", **fields: Any
) -> Job:
    search = Search(
        request_id=name, token_ids=np.zeros(tokens, dtype=np.int32), widths=(width,) * levels, num_returned=1,
        catalog=None, normalizer=normalizer, join=1, stop_token_ids=(), length_penalty=1.0,
    )  # fmt: skip
    return Job(search, submitted_at=0.0, **({"deadline": None} | fields))


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


# Who shares a wave


def test_jobs_share_a_wave_up_to_its_limits() -> None:
    assert cut([make_job(name) for name in "abcdef"])[0] == ["abcd", "ef"]  # requests
    assert cut([make_job("a", tokens=60), make_job("b", tokens=50), make_job("c", tokens=30)])[0] == ["ac", "b"]
    assert cut([make_job("a", width=40), make_job("b", width=30), make_job("c", width=20)])[0] == ["ac", "b"]
    assert cut([make_job("a", levels=100, width=1), make_job("b", levels=65, width=4)])[0] == ["a", "b"]  # beam slots


def test_masks_share_their_pool() -> None:
    """Each takes its places once, however many requests have it; one that passes a long wave finds what that leaves."""
    masks = [ItemMask.everything(64 * 39) for _ in range(4)]  # 40 places of 100 each

    def masked(name: str, mask: ItemMask, **fields: Any) -> Job:
        job = make_job(name, **fields)
        job.search.mask = mask
        return job

    one, two, three, _ = masks
    jobs = [masked("a", one), masked("b", two), masked("c", three), masked("d", one), make_job("e")]
    assert cut(jobs)[0] == ["abde", "c"]
    scheduler = Scheduler(LIMITS, lambda _: None)
    for name, mask in zip("abc", masks, strict=False):
        scheduler.add(masked(name, mask))
    long = Load.of([masked("l", one, levels=10).search], LIMITS)
    assert names(scheduler.next_wave(0.0, long)) == "a"
    assert names(scheduler.next_wave(0.0, long.plus(masked("m", three).search, LIMITS))) == ""
    assert names(scheduler.next_wave(0.0)) == "bc"
    assert scheduler.closed_by["masks"] == 1


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


def test_jobs_of_similar_numbers_of_levels_share_a_wave() -> None:
    levels = {"a": 1, "b": 8, "c": 9, "d": 16, "e": 17, "f": 3, "g": 512, "h": 257}
    jobs = [make_job(name, width=1, tokens=1, levels=count) for name, count in levels.items()]
    waves, _ = cut(jobs)
    assert waves == ["abf", "cd", "e", "g", "h"], "the beam slots keep g and h apart"


# Whose turn it is


def test_the_highest_priority_goes_first_then_the_fewest_levels_then_the_oldest() -> None:
    jobs = [
        make_job("a", tokens=80, levels=64, width=1), make_job("b", tokens=80), make_job("c", tokens=80),
        make_job("d", tokens=80, levels=64, width=1, priority=1), make_job("e", tokens=80, priority=-1),
        make_job("f", tokens=80, levels=128, width=1, priority=1), make_job("g", tokens=80, priority=100),
    ]  # fmt: skip
    assert cut(jobs)[0] == ["g", "d", "f", "b", "c", "a", "e"]


def turn_of(old: Job, newcomer: dict[str, Any]) -> int:
    """Waves of newcomers, 1/16 s each, that run before `old` does, if there is always one more."""
    scheduler = Scheduler(LIMITS, lambda _: None)
    scheduler.add(old)
    for count in range(1000):
        scheduler.add(make_job("x", tokens=80, **newcomer))
        if old in scheduler.next_wave(count / 16):
            assert (scheduler.jobs_overtaken, scheduler.jobs_aged) == (1, 1)
            return count
    raise AssertionError("starved")


def test_nobody_starves() -> None:
    assert turn_of(make_job("old", tokens=80), {"priority": 100}) == 8  # half a second
    assert turn_of(make_job("old", tokens=80, levels=64, width=1), {}) == 52  # 0.05 s a level: 3.2 s
    assert turn_of(make_job("old", tokens=80, levels=64, width=1), {"priority": 1}) == 52


def test_waiting_behind_older_ones_is_not_being_overtaken() -> None:
    """If a long queue aged everybody, a loaded server would know neither priorities nor short searches."""
    scheduler = Scheduler(LIMITS, lambda _: None)
    for count in range(100):
        scheduler.add(make_job("old", tokens=80))
        scheduler.next_wave(float(count) if count % 2 else float(count - 1))  # twice as many as can run
        scheduler.add(make_job("old", tokens=80))
    late = make_job("late", tokens=80, priority=1)
    scheduler.add(late)
    assert scheduler.next_wave(1000.0) == [late]
    assert scheduler.jobs_aged == 0


def test_a_long_wave_holds_up_others_to_its_end() -> None:
    """Whoever is asked for between its pieces, and whether or not a short wave passes."""
    scheduler = Scheduler(LIMITS, lambda _: None)
    old, head = make_job("old", levels=20), make_job("long", levels=14, width=1, priority=1)
    for job in (old, make_job("young", levels=20, normalizer="level"), head):
        scheduler.add(job)
    assert scheduler.next_wave(0.0) == [head]
    held = scheduler.load([head])
    assert scheduler.next_wave(0.25, held) == []
    assert scheduler.next_wave(0.5, held) == []
    short = make_job("short")
    scheduler.add(short)
    assert scheduler.next_wave(0.625, held) == [short]
    assert scheduler.next_wave(0.75, held) == []
    for name in "xy":
        scheduler.add(make_job(name, tokens=80, priority=100))
    assert names(scheduler.next_wave(0.875)) == "x"
    assert old.overtaken_s == 0.875
    assert scheduler.next_wave(1.0) == [old]  # 0.05 s a level


def test_every_decision_is_counted() -> None:
    scheduler = Scheduler(LIMITS, lambda _: None)
    for levels in (64, 3, 3, 20):
        scheduler.add(make_job("a", levels=levels, width=1))
    assert [len(scheduler.next_wave(now)) for now in (0.0, 0.25, 0.375, 9.0)] == [2, 1, 1, 0]
    assert scheduler.waves == {8: 1, 16: 0, 32: 1, 64: 1, 128: 0, 256: 0, 512: 0}
    assert (scheduler.jobs_overtaken, scheduler.jobs_aged) == (1, 0)
    assert {reason: count for reason, count in scheduler.closed_by.items() if count} == {"levels": 2, "empty": 1}
    for levels in (64, 3):
        scheduler.add(make_job("a", levels=levels, width=1))
    assert scheduler.waves_passing == 0
    assert len(scheduler.next_wave(9.5, Load())) == 1 and scheduler.next_wave(9.75, Load()) == []
    assert scheduler.waves_passing == 1


def test_a_wave_is_closed_by_what_keeps_the_next_in_turn_out() -> None:
    def closed_by(*jobs: Job) -> str:
        scheduler = Scheduler(LIMITS, lambda _: None)
        for job in jobs:
            scheduler.add(job)
        scheduler.next_wave(0.0)
        (reason,) = (reason for reason, count in scheduler.closed_by.items() if count)
        return reason

    assert closed_by(*[make_job("a") for _ in range(4)]) == "empty"
    assert closed_by(*[make_job("a") for _ in range(5)]) == "requests"
    assert closed_by(make_job("a", tokens=60), make_job("b", tokens=50), make_job("c", width=60)) == "tokens"
    assert closed_by(make_job("a", tokens=150), make_job("b")) == "tokens"
    assert closed_by(make_job("a", width=40), make_job("b", width=30)) == "rows"
    assert closed_by(*[make_job(name, tokens=17 if name == "a" else 1) for name in "ab"]) == "empty"
    assert closed_by(make_job("a", levels=100, width=1), make_job("b", levels=65, width=4)) == "slots"
    assert closed_by(make_job("a"), make_job("b", normalizer="level")) == "kind"
    assert closed_by(make_job("a"), make_job("b", levels=9, width=1)) == "levels"
    few = replace(LIMITS, context_pages=3)
    scheduler = Scheduler(few, lambda _: None)
    for tokens in (9, 9):  # two pages each
        scheduler.add(make_job("a", tokens=tokens))
    scheduler.next_wave(0.0)
    assert scheduler.closed_by["pages"] == 1


def test_what_waves_were_like_is_counted() -> None:
    scheduler = Scheduler(LIMITS, lambda _: None)
    for job in (make_job("a", tokens=3), make_job("b", tokens=20, width=9), make_job("c", normalizer="level")):
        scheduler.add(job)
    while scheduler.next_wave(0.0):
        pass
    seen = scheduler.distributions
    assert (sum(seen.wave_requests.counts), seen.wave_requests.sum) == (2, 3)
    assert (sum(seen.wave_rows.counts), seen.wave_rows.sum) == (2, 4 + 9 + 4)
    assert (sum(seen.wave_prompt_tokens.counts), seen.wave_prompt_tokens.sum) == (2, 33)
    assert (sum(seen.beam_width.counts), seen.beam_width.sum) == (3, 17)
    assert (sum(seen.prompt_length_tokens.counts), seen.prompt_length_tokens.sum) == (3, 33)


# Memory


def test_running_out_of_memory_halves_the_rows_of_later_waves() -> None:
    scheduler = Scheduler(LIMITS, lambda _: None)
    for name in "abcdef":
        scheduler.add(make_job(name, width=16))
    wave = scheduler.next_wave(0.0)
    assert names(wave) == "abcd"
    scheduler.ran_out_of_memory(wave)
    assert scheduler.rows_limit == 32
    for name in "gh":
        scheduler.add(make_job(name, width=16))
    wave = scheduler.next_wave(0.0)
    assert names(wave) == "ef"
    scheduler.ran_out_of_memory(wave)
    assert scheduler.rows_limit == 16
    scheduler.ran_out_of_memory([make_job("x", width=60), make_job("y", width=1)])
    assert scheduler.rows_limit == 16, "it never rises for want of memory"
    scheduler.add(make_job("i", width=40))
    assert [names(scheduler.next_wave(0.0)) for _ in range(3)] == ["g", "h", "i"]  # a wider one than that runs alone
    scheduler.ran_out_of_memory([make_job("j", width=1)])
    assert scheduler.rows_limit == 16, "a search that fails alone says nothing of others"


def test_the_limit_of_rows_recovers_step_by_step() -> None:
    scheduler = Scheduler(LIMITS, lambda _: None)
    scheduler.ran_out_of_memory([make_job(name, width=14) for name in "abcd"])
    found = [28]
    for _ in range(6):
        for _ in range(CLEAN_WAVES):
            assert scheduler.rows_limit == found[-1]
            scheduler.had_memory()
        found.append(scheduler.rows_limit)
    assert found == [28, 36, 44, 52, 60, 64, 64]
    for _ in range(CLEAN_WAVES - 1):
        scheduler.had_memory()
    scheduler.ran_out_of_memory([make_job(name, width=8) for name in "ab"])
    scheduler.had_memory()
    assert scheduler.rows_limit == 8, "waves before the shortage do not count"


# All of it, at random


def group(job: Job) -> tuple[str, int]:
    return job.search.normalizer, max(8, 2 ** math.ceil(math.log2(job.search.levels)))


def fit_together(jobs: list[Job], rows_limit: int) -> bool:
    rows = sum(job.search.rows for job in jobs)
    deepest = max(job.search.levels for job in jobs)
    return (
        len(jobs) <= LIMITS.requests
        and rows <= rows_limit
        and sum(job.search.num_tokens for job in jobs) <= LIMITS.tokens
        and sum(-(-job.search.num_tokens // LIMITS.page_size) for job in jobs) <= LIMITS.context_pages
        and rung(sum(job.search.beam_rows for job in jobs), LIMITS.rows) * (deepest - 1) <= LIMITS.beam_slots
    )


def patience(job: Job) -> float:
    return max(0.5, 0.05 * job.search.levels)


class Arrivals(RuleBasedStateMachine):
    """Jobs of all kinds come, are cancelled and become late while waves are cut. Times are binary: sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[Outcome] = []
        self.scheduler = Scheduler(LIMITS, self.dropped.append)
        self.now = 0.0
        self.jobs: list[Job] = []
        """All that ever came, in order of arrival."""
        self.waiting: list[Job] = []
        self.ran: list[tuple[Job, float]] = []
        """The heads of all waves so far, and for how long each ran until the next was cut."""
        self.last_wave: list[Job] = []

    def held_up_s(self, job: Job) -> float:
        """For how long younger ones' waves have run while it waited."""
        place = self.jobs.index(job)
        return sum(seconds for head, seconds in self.ran if self.jobs.index(head) > place)

    @rule(
        tokens=st.integers(1, 160), width=st.integers(1, 64), levels=st.integers(1, 5) | st.integers(1, 100),
        normalizer=st.sampled_from(["vocab", "vocab", "level"]), priority=st.sampled_from([0, 0, 0, 1, -3]),
        patience_s=st.none() | st.integers(1, 200),
    )  # fmt: skip
    def arrive(
        self, tokens: int, width: int, levels: int, normalizer: str, priority: int, patience_s: int | None
    ) -> None:
        width = min(width, max(1, LIMITS.beam_slots // (2 * levels)))
        deadline = None if patience_s is None else self.now + patience_s / 16
        job = make_job(
            str(len(self.jobs)), tokens, width, levels, normalizer, priority=priority, deadline=deadline
        )  # fmt: skip
        self.scheduler.add(job)
        self.jobs.append(job)
        self.waiting.append(job)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.waiting)).cancelled = True

    @precondition(lambda self: self.last_wave)
    @rule()
    def run_out_of_memory(self) -> None:
        self.scheduler.ran_out_of_memory(self.last_wave)

    @rule(waves=st.integers(1, 3 * CLEAN_WAVES))
    def have_memory(self, waves: int) -> None:
        for _ in range(waves):
            self.scheduler.had_memory()

    @rule(ran=st.integers(0, 40))
    def cut_a_wave(self, ran: int) -> None:
        """`ran`: sixteenths of a second since the last one was cut."""
        self.now += ran / 16
        if self.last_wave:
            self.ran.append((self.last_wave[0], ran / 16))
        gone = {job for job in self.waiting if job.cancelled or (job.deadline is not None and job.deadline <= self.now)}
        already = len(self.dropped)
        rows_limit = self.scheduler.rows_limit
        assert 1 <= rows_limit <= LIMITS.rows
        wave = self.scheduler.next_wave(self.now)
        assert {outcome.job for outcome in self.dropped[already:]} == gone
        assert len(self.dropped) == already + len(gone) == self.scheduler.jobs_dropped
        self.waiting = [job for job in self.waiting if job not in gone]
        assert bool(wave) == bool(self.waiting)
        if wave:
            self.check(wave, rows_limit)
            self.waiting = [job for job in self.waiting if job not in wave]
        self.last_wave = wave
        assert len(self.scheduler) == len(self.waiting)

    def check(self, wave: list[Job], rows_limit: int) -> None:
        held_up_s = {job: self.held_up_s(job) for job in self.waiting}
        aged = [job for job in self.waiting if held_up_s[job] >= patience(job)]
        if aged:
            assert wave[0] is aged[0], "somebody is overtaken for longer than allowed"
        else:
            urgent = [job for job in self.waiting if job.priority == max(job.priority for job in self.waiting)]
            fewest = min(group(job)[1] for job in urgent)
            assert wave[0] is next(job for job in urgent if group(job)[1] == fewest)
        assert set(wave) <= set(self.waiting) and len(set(wave)) == len(wave), "a job runs twice"
        assert len(wave) == 1 or fit_together(wave, rows_limit)
        mates = [job for job in self.waiting if group(job) == group(wave[0])]
        turns = sorted(mates, key=lambda job: (job not in aged, 0 if job in aged else -job.priority))  # then by age
        assert wave == [job for job in turns if job in wave]
        for job in turns:
            if job not in wave:
                before = [other for other in wave if turns.index(other) < turns.index(job)]
                assert not fit_together([*before, job], rows_limit), "it was passed over although it fits"
        longest = max((seconds for _, seconds in self.ran), default=0.0)
        assert all(held_up_s[job] <= patience(job) + longest for job in self.waiting)

    def teardown(self) -> None:
        while self.waiting or self.last_wave:
            self.cut_a_wave(16)
        assert sum(self.scheduler.waves.values()) == sum(self.scheduler.closed_by.values()) == len(self.ran)


TestArrivals = Arrivals.TestCase
TestArrivals.settings = settings(max_examples=200, stateful_step_count=40)


@given(st.integers(1, 100_000))
def test_rungs_cover_and_waste_at_most_a_third(size: int) -> None:
    assert size <= rung(size) <= max(LEAST_ROWS, -(-size * 3 // 2))
    assert rung(rung(size)) == rung(size)
    assert rung(size, max(size, LEAST_ROWS)) == max(size, LEAST_ROWS)
    assert size <= token_rung(size) <= max(size + 127, size * 9 // 8) and token_rung(token_rung(size)) == token_rung(
        size
    )
