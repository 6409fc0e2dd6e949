"""How much may wait and run together: the books kept again by hand, waits against a queue that drains steadily."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from widebeam import Engine, EngineConfig, SearchParams
from widebeam.engine.admission import admit
from widebeam.engine.budgets import FIRST_WAIT_S, JITTER, LONGEST_WAIT_S, Budgets
from widebeam.engine.limits import Limits
from widebeam.engine.scheduler import WaveLimits
from widebeam.engine.wave import Search
from widebeam.errors import InvalidRequest, Overloaded
from widebeam.policies import PolicySpec

LIMITS = {"requests": 8, "rows": 100, "row_levels": 300, "tokens": 500}


def make_search(tokens: int = 10, widths: tuple[int, ...] = (4, 4, 4), returned: int = 1) -> Search:
    return Search("x", np.zeros(tokens, dtype=np.int32), widths, returned, None, "vocab", 1, (), 1.0)


class Books(RuleBasedStateMachine):
    """Searches come and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.budgets = Budgets(LIMITS)
        self.now = 0.0
        self.held: list[Search] = []
        self.refused = 0

    def totals(self, searches: list[Search]) -> dict[str, int]:
        return {
            "requests": len(searches),
            "rows": sum(max(1, *search.widths[:-1], search.num_returned) for search in searches),
            "row_levels": sum(sum((1, *search.widths)) - search.widths[-1] for search in searches),
            "tokens": sum(len(search.token_ids) for search in searches),
        }

    @rule(tokens=st.integers(1, 200), widths=st.lists(st.integers(1, 40), min_size=2, max_size=6), data=st.data())
    def take(self, tokens: int, widths: list[int], data: st.DataObject) -> None:
        search = make_search(tokens, tuple(widths), data.draw(st.integers(1, widths[-1])))
        wanted = self.totals([*self.held, search])
        full = {name for name, amount in wanted.items() if amount > LIMITS[name]}
        before = dict(self.budgets.refused)
        if not full:
            self.budgets.take(search, self.now)
            self.held.append(search)
            return
        with pytest.raises(Overloaded, match="over the limit") as caught:
            self.budgets.take(search, self.now)
        (named,) = (name for name, count in self.budgets.refused.items() if count > before[name])
        assert named in full and f"--max-waiting-{named.replace('_', '-')}" in str(caught.value)
        assert caught.value.retry_after_s == self.budgets.retry_after_s
        assert 0 <= self.budgets.retry_after_s <= LONGEST_WAIT_S * (1 + JITTER)
        self.refused += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.held) - 1))
        self.budgets.give_back(self.held.pop(place), self.now)

    @rule(seconds=st.floats(0, 1e5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def books_agree(self) -> None:
        assert self.budgets.in_use == self.totals(self.held)
        assert all(self.budgets.in_use[name] <= limit for name, limit in LIMITS.items())
        assert sum(self.budgets.refused.values()) == self.refused

    def teardown(self) -> None:
        for search in self.held:
            self.budgets.give_back(search, self.now)
        assert set(self.budgets.in_use.values()) == {0}


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=40)


def refusal(budgets: Budgets, search: Search, now: float) -> float:
    with pytest.raises(Overloaded) as caught:
        budgets.take(search, now)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def near(wait_s: float) -> Any:
    return pytest.approx(wait_s, rel=JITTER + 0.05)


def drained(seconds: float, every: float, idle: float = 0.0) -> tuple[Budgets, float]:
    """Budgets that are full of requests, one of which is answered and replaced at each beat; and the time."""
    budgets = Budgets(LIMITS)
    now = idle
    for _ in range(LIMITS["requests"]):
        budgets.take(make_search(), now)
    for _ in range(round(seconds / every)):
        now += every
        budgets.give_back(make_search(), now)
        budgets.take(make_search(), now)
    return budgets, now


@pytest.mark.parametrize("seconds", [2, 8, 300])
@pytest.mark.parametrize("every", [0.05, 0.5, 2])
def test_a_wait_is_what_the_excess_takes_to_drain(seconds: float, every: float) -> None:
    """From the first answers on, and also behind a long time in which nobody asked."""
    for idle in (0.0, 1e6):
        budgets, now = drained(seconds, every, idle)
        assert refusal(budgets, make_search(), now) == near(every)  # one place is missing
        assert refusal(budgets, make_search(tokens=500), now) == near(8 * every)  # all 80 tokens are


def test_the_rate_is_that_of_late() -> None:
    budgets, now = drained(100, 0.1)
    for _ in range(30):
        now += 2.0
        budgets.give_back(make_search(), now)
        budgets.take(make_search(), now)
    assert refusal(budgets, make_search(), now) == near(2.0)


def test_before_the_first_answer_and_in_a_standstill() -> None:
    budgets, now = drained(0, 1)
    assert refusal(budgets, make_search(), now + 3) == near(FIRST_WAIT_S)
    budgets, now = drained(5, 0.5)
    assert refusal(budgets, make_search(), now + 1000) == near(LONGEST_WAIT_S)


def test_waits_differ_and_repeat_with_the_seed() -> None:
    def waits(seed: int) -> list[float]:
        budgets = Budgets(LIMITS, seed)
        for _ in range(LIMITS["requests"]):
            budgets.take(make_search(), 0.0)
        return [refusal(budgets, make_search(), 0.0) for _ in range(200)]

    told = waits(1)
    assert told == waits(1) != waits(2)
    assert min(told) >= (1 - JITTER) * FIRST_WAIT_S and max(told) <= (1 + JITTER) * FIRST_WAIT_S
    assert max(told) - min(told) > JITTER * FIRST_WAIT_S and len(set(told)) == len(told)


# Admission

WAVE = WaveLimits(requests=4, tokens=1000, rows=256, context_pages=100, beam_slots=2000, mask_places=100, page_size=16)


def limits(**fields: Any) -> Limits:
    return Limits(EngineConfig(model="x", **fields), 1000, 1200, frozenset({2}), (), WAVE)


@pytest.mark.parametrize(
    ("setting", "params", "code", "param"),
    [
        ("max_waiting_rows", {"beam_width": 20}, "beam_too_wide", "beam_width"),
        ("max_waiting_row_levels", {"beam_width": 5, "max_new_tokens": 5}, "search_too_large", "max_new_tokens"),
        ("max_waiting_tokens", {}, "context_too_long", "input_ids"),
    ],
)
def test_what_no_budget_can_ever_hold_is_a_bad_request(
    setting: str, params: dict[str, Any], code: str, param: str
) -> None:
    prompt, wanted = [1] * 20, SearchParams(**({"max_new_tokens": 3} | params))
    with pytest.raises(InvalidRequest, match=setting.replace("_", "-")) as caught:
        admit(prompt, wanted, None, limits(**{setting: 19}))
    assert (caught.value.code, caught.value.param, caught.value.status) == (code, param, 400)
    assert admit(prompt, wanted, None, limits(**{setting: 21}))


def test_by_default_budgets_hold_whatever_can_run() -> None:
    assert limits().budgets == {"requests": 1024, "rows": 64 * 256, "row_levels": 64 * 2256, "tokens": 64 * 1200}
    for params in ({"beam_width": 256, "max_new_tokens": 8}, {"beam_width": 16, "max_new_tokens": 120}):
        assert admit([1] * 1000, SearchParams(**params), None, limits())
    schedule = PolicySpec(name="scheduled", widths=(1, 256, 256, 1))
    assert admit([1], SearchParams(policy=schedule, max_new_tokens=4), None, limits())


# In an engine


async def test_budgets_are_free_again_whatever_the_end(checkpoint: Path) -> None:
    config: dict[str, Any] = {"device": "cpu", "max_wave_rows": 256, "max_beam_width": 128, "max_waiting_rows": 100}
    async with Engine(str(checkpoint), **config) as engine:
        release = threading.Event()
        engine._worker.call(lambda _: release.wait(20))
        wide = SearchParams(beam_width=40, max_new_tokens=3)
        tasks = [asyncio.create_task(engine.submit([5] * 7, wide)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="max-waiting-rows"):
            await engine.submit([5], wide)
        stats = engine.stats()
        assert (stats.requests_waiting, stats.rows_waiting, stats.tokens_waiting) == (2, 80, 14)
        assert stats.requests_running == 0
        assert (stats.requests_in_flight, stats.rows_in_flight, stats.row_levels_in_flight) == (2, 80, 162)
        assert (stats.requests_refused, stats.requests_refused_by["rows"]) == (1, 1) and stats.retry_after_seconds > 0
        tasks[0].cancel()
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(engine.submit([5], wide)))  # at once, though the first still lies in the queue
        await asyncio.sleep(0)
        release.set()
        cancelled, *others = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(cancelled, asyncio.CancelledError)
        assert not any(isinstance(outcome, BaseException) for outcome in others)
        stats = engine.stats()
        assert not any((stats.requests_in_flight, stats.rows_in_flight, stats.row_levels_in_flight))
        assert not any((stats.tokens_in_flight, stats.requests_waiting))
        assert stats.waves_by_levels[8] == stats.waves and stats.wave_rows_limit == 256


def test_a_batch_over_the_budgets_waits_for_itself(checkpoint: Path) -> None:
    engine = Engine(str(checkpoint), device="cpu", max_wave_rows=256, max_beam_width=128, max_waiting_rows=10)
    try:
        results = engine.generate([[5, i] for i in range(5)], beam_width=5, max_new_tokens=2)
        assert isinstance(results, list) and len(results) == 5
        assert engine.stats().requests_refused > 0
    finally:
        engine.close()
