"""When the GPU thread launches, on a device that only moves when told: a CPU would have run each wave at its launch."""

from __future__ import annotations

import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from widebeam.engine.job import Job, Outcome
from widebeam.engine.scheduler import WaveLimits
from widebeam.engine.search import PIECE, Between
from widebeam.engine.wave import Search
from widebeam.engine.worker import DEPTH, PASSING, TURN_S, Worker
from widebeam.errors import EngineDead, EngineError, OutOfMemory

LIMITS = WaveLimits(
    requests=4, tokens=1000, rows=1000, context_pages=1000, beam_slots=10_000, mask_places=100, page_size=16
)


class Wave:
    """A launched wave whose progress the test decides."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.prefilled, self.done = threading.Event(), threading.Event()
        self.fault: Exception | None = None
        self.prefill_s = 0.1
        self.launched = SimpleNamespace(wait_for_prefill=partial(self.prefilled.wait, 20))

    def outcomes(self) -> list[Outcome]:
        assert self.done.wait(20)
        if self.fault is not None:
            raise self.fault
        return [Outcome(job, f"result of {job.search.request_id}") for job in self.jobs]  # type: ignore[arg-type]

    def finish(self, fault: Exception | None = None) -> None:
        self.fault = fault
        self.prefilled.set()
        self.done.set()


class Bench:
    """A worker over such a device, with everything that it delivers."""

    def __init__(self) -> None:
        self.waves: list[Wave] = []
        self.outcomes: dict[str, Any] = {}
        self.launch_fault: BaseException | None = None
        self.fault_at_boundary: Exception | None = None
        """What a long wave meets when it makes room for others."""
        self.launching = threading.Event()
        """A long wave is being launched."""
        self.boundaries: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """A launching long wave comes to its next boundary for each."""
        self.dead = threading.Event()

        def nothing(*_: Any) -> None:
            """There is no prefix cache, and no other rank."""

        prefixes = SimpleNamespace(
            settle=nothing, look_up=nothing, move_pages=nothing, moves_pages=False, note_prefill=nothing
        )
        runtime: Any = SimpleNamespace(limits=LIMITS, launch=self._launch, prefixes=prefixes, close=nothing)
        self.worker = Worker(lambda: runtime, self._deliver, self.dead.set)
        self.worker.start()
        self.worker.ready.result(20)

    def _launch(self, jobs: list[Job], stopping: Callable[[], bool], between: Between) -> Any:
        if self.launch_fault is not None:
            fault, self.launch_fault = self.launch_fault, None
            raise fault
        wave = Wave(jobs)
        self.waves.append(wave)
        for _ in range((jobs[0].search.levels - 1) // PIECE):
            self.launching.set()
            assert self.boundaries.get(timeout=20)
            if between.others_wait():
                if self.fault_at_boundary is not None:
                    raise self.fault_at_boundary
                between.run_others()
        return wave

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self.outcomes.setdefault(outcome.job.search.request_id, outcome.result)

    def submit(self, *names: str, levels: int = 2, width: int = 4) -> None:
        for name in names:
            search = Search(name, np.zeros(3, dtype=np.int32), (width,) * levels, width, None, "vocab", 1, (), 1.0)
            self.worker.submit(Job(search, time.monotonic(), None))

    def until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < limit, "nothing happens any more"
            time.sleep(0.001)

    def settled(self) -> None:
        """Until the worker has looked at everything that was sent to it."""
        self.worker.call(lambda _: None).result(20)

    def names(self, wave: int) -> list[str]:
        return [job.search.request_id for job in self.waves[wave].jobs]


@pytest.fixture
def bench() -> Any:
    bench = Bench()
    yield bench
    for wave in bench.waves:
        wave.finish()
    bench.worker.stop()
    bench.worker.join()


def test_the_next_wave_is_cut_when_the_last_has_left_its_prefill(bench: Bench) -> None:
    bench.submit("a")
    bench.until(lambda: len(bench.waves) == 1)
    bench.submit("b", "c")
    bench.settled()
    assert len(bench.waves) == 1, "a wave was cut although company may still come"
    bench.submit("d")
    bench.settled()
    bench.waves[0].prefilled.set()
    bench.until(lambda: len(bench.waves) == 2)
    assert bench.names(1) == ["b", "c", "d"]
    assert not bench.outcomes, "the first wave is still running its levels"


def test_no_more_than_two_waves_are_on_the_device(bench: Bench) -> None:
    for count, name in enumerate("abcde", start=1):
        bench.submit(name)
        bench.until(lambda count=count: len(bench.waves) == min(count, DEPTH))
        if len(bench.waves) == count:
            bench.waves[-1].prefilled.set()
        bench.settled()
    assert len(bench.waves) == DEPTH
    bench.waves[0].finish()
    bench.until(lambda: len(bench.waves) == DEPTH + 1)
    assert bench.names(DEPTH) == ["c", "d", "e"]


def test_short_waves_pass_a_long_one(bench: Bench) -> None:
    bench.submit("long", levels=3 * PIECE)
    bench.until(lambda: len(bench.waves) == 1)
    bench.submit("a", "b")
    bench.submit("other", levels=PIECE + 1)
    between_waves = bench.worker.call(lambda _: len(bench.waves))
    bench.submit("c")
    bench.boundaries.put(True)
    bench.until(lambda: len(bench.waves) == 2)
    assert bench.names(1) == ["a", "b", "c"]
    bench.waves[1].finish()
    bench.until(lambda: set(bench.outcomes) == {"a", "b", "c"})
    assert not between_waves.done() and bench.worker.busy is not None
    bench.boundaries.put(True)  # where nobody waits who could pass
    assert between_waves.result(20) == 2
    bench.waves[0].finish()
    bench.until(lambda: len(bench.waves) == 3)
    bench.boundaries.put(True)
    bench.waves[2].finish()
    bench.until(lambda: bench.outcomes.get("other") == "result of other")
    assert bench.outcomes["long"] == "result of long"
    bench.until(lambda: bench.worker.busy is None)


def test_a_long_wave_goes_on_however_many_wait_and_takes_what_it_holds(bench: Bench) -> None:
    bench.submit("long", levels=2 * PIECE + 1, width=500)  # 512 * 16 of 10,000 slots
    bench.until(lambda: len(bench.waves) == 1)
    bench.submit("large", levels=PIECE, width=300)
    bench.submit(*(f"a{k}" for k in range(4 * PASSING + 4)))
    bench.boundaries.put(True)
    bench.until(lambda: len(bench.waves) == 1 + PASSING)
    assert [bench.names(1 + k) for k in range(PASSING)] == [[f"a{4 * k + i}" for i in range(4)] for k in range(PASSING)]
    bench.launch_fault = RuntimeError("this wave alone")
    bench.boundaries.put(True)
    bench.until(lambda: len(bench.outcomes) == 4)
    assert isinstance(bench.outcomes[f"a{4 * PASSING}"], EngineError)
    for wave in bench.waves:
        wave.finish()
    bench.until(lambda: bench.names(-1) == ["large"])
    bench.waves[-1].finish()
    bench.until(lambda: len(bench.outcomes) == 4 * PASSING + 6)
    assert bench.outcomes["long"] == "result of long"


def test_nothing_holds_a_wave_that_was_delivered(bench: Bench) -> None:
    """Nor, with it, the catalog that it searched. One job goes before an older one, in the same wave."""
    bench.submit("before")
    bench.until(lambda: len(bench.waves) == 1)
    search = Search("", np.zeros(3, dtype=np.int32), (4, 4), 4, None, "vocab", 1, (), 1.0)
    jobs = [Job(replace(search, request_id=name), 0.0, None, priority=name == "b") for name in "ab"]
    held = [weakref.ref(job) for job in jobs]
    for job in jobs:
        bench.worker.submit(job)
    bench.settled()
    bench.waves[0].prefilled.set()
    bench.until(lambda: len(bench.waves) == 2)
    assert bench.names(1) == ["b", "a"]
    for wave in bench.waves:
        wave.finish()
    bench.until(lambda: set(bench.outcomes) == {"before", "a", "b"})
    bench.waves.clear()
    del job, jobs, wave
    bench.until(lambda: not any(one() for one in held))


def test_what_the_waves_on_the_device_take(bench: Bench) -> None:
    """Two levels of width 4, and 3 tokens of a page."""
    assert bench.worker.on_device == []
    bench.submit("a")
    bench.until(lambda: len(bench.waves) == 1)
    bench.submit("b", "c")
    bench.settled()
    (first,) = bench.worker.on_device
    assert (first.requests, first.rows, first.tokens, first.pages, first.slots) == (1, 4, 3, 1, 16)
    bench.waves[0].prefilled.set()
    bench.until(lambda: len(bench.waves) == 2)
    assert [(load.requests, load.rows, load.pages) for load in bench.worker.on_device] == [(1, 4, 1), (2, 8, 2)]
    for wave in bench.waves:
        wave.finish()
    bench.until(lambda: bench.worker.on_device == [])
    seen = bench.worker.scheduler.distributions
    assert sum(seen.wave_host_seconds.counts) == 2 and seen.wave_host_seconds.sum > 0
    assert sum(seen.company_wait_seconds.counts) == 1, "the first wave waited for nobody"


def test_results_come_in_order_and_once(bench: Bench) -> None:
    bench.submit("a")
    bench.until(lambda: len(bench.waves) == 1)
    bench.waves[0].prefilled.set()
    bench.submit("b")
    bench.until(lambda: len(bench.waves) == 2)
    bench.waves[1].finish()
    bench.settled()
    assert not bench.outcomes
    bench.waves[0].finish()
    bench.until(lambda: len(bench.outcomes) == 2)
    assert bench.outcomes == {"a": "result of a", "b": "result of b"}


def test_a_wave_that_cannot_be_launched_fails_alone(bench: Bench) -> None:
    bench.submit("a")
    bench.until(lambda: len(bench.waves) == 1)
    bench.waves[0].prefilled.set()
    for name, fault, kind in (("b", torch.OutOfMemoryError(), OutOfMemory), ("c", ValueError("boom"), EngineError)):
        bench.launch_fault = fault
        bench.submit(name)
        bench.until(lambda name=name: name in bench.outcomes)
        assert isinstance(bench.outcomes[name], kind)
    bench.submit("d")
    bench.until(lambda: len(bench.waves) == 2)
    for wave in bench.waves:
        wave.finish()
    bench.until(lambda: len(bench.outcomes) == 4)
    assert bench.outcomes["a"] == "result of a" and bench.outcomes["d"] == "result of d"


def test_waves_are_smaller_after_running_out_of_memory(bench: Bench) -> None:
    bench.submit("a")
    bench.until(lambda: len(bench.waves) == 1)
    bench.submit("b", "c")
    bench.launch_fault = torch.OutOfMemoryError()
    bench.settled()
    bench.waves[0].prefilled.set()
    bench.until(lambda: len(bench.outcomes) == 2)
    assert all(isinstance(bench.outcomes[name], OutOfMemory) for name in "bc")
    assert bench.worker.scheduler.rows_limit == 4
    bench.submit("d")
    bench.until(lambda: len(bench.waves) == 2)
    bench.submit("e", "f")
    bench.settled()
    for wave in bench.waves:
        wave.finish()
    bench.until(lambda: len(bench.waves) == 3)
    assert bench.names(2) == ["e"]


def test_results_that_cannot_be_read_fail_their_wave_alone(bench: Bench) -> None:
    bench.submit("a")
    bench.until(lambda: len(bench.waves) == 1)
    bench.waves[0].finish(ValueError("boom"))
    bench.until(lambda: "a" in bench.outcomes)
    assert isinstance(bench.outcomes["a"], EngineError) and "boom" not in str(bench.outcomes["a"])
    bench.submit("b")
    bench.until(lambda: len(bench.waves) == 2)
    bench.waves[1].finish()
    bench.until(lambda: "b" in bench.outcomes)
    assert bench.outcomes["b"] == "result of b"


def test_a_broken_device_answers_everybody(bench: Bench) -> None:
    bench.submit("a")
    bench.until(lambda: len(bench.waves) == 1)
    bench.waves[0].prefilled.set()
    bench.submit("b")
    bench.until(lambda: len(bench.waves) == 2)
    bench.submit("c")
    bench.settled()
    bench.waves[0].finish(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    bench.until(lambda: len(bench.outcomes) == 3)
    assert bench.dead.is_set()
    assert all(isinstance(outcome, EngineDead) for outcome in bench.outcomes.values())
    bench.submit("d")
    assert isinstance(bench.outcomes["d"], EngineDead)


@pytest.mark.parametrize(
    "fault", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("a bug"), torch.AcceleratorError("CUDA error")]
)
def test_a_long_wave_that_fails_loses_nobody_who_was_to_pass_it(bench: Bench, fault: Exception) -> None:
    """Its state could not be set aside, say; the others were no longer in the queue."""
    bench.fault_at_boundary = fault
    bench.submit("long", levels=PIECE + 1)
    bench.until(bench.launching.is_set)
    bench.submit("a", "b")
    bench.boundaries.put(True)
    if isinstance(fault, torch.AcceleratorError):
        bench.until(lambda: set(bench.outcomes) == {"long", "a", "b"})
        assert all(isinstance(outcome, EngineDead) for outcome in bench.outcomes.values())
        return
    bench.until(lambda: len(bench.waves) == 2)
    assert bench.names(1) == ["a", "b"]
    bench.waves[1].finish()
    bench.until(lambda: set(bench.outcomes) == {"long", "a", "b"})
    assert isinstance(bench.outcomes["long"], EngineError | OutOfMemory)
    assert (bench.outcomes["a"], bench.outcomes["b"]) == ("result of a", "result of b")
    bench.until(lambda: bench.worker.busy is None)


def test_a_wave_after_a_long_idle_time_is_no_hang(bench: Bench) -> None:
    """Whenever a watchdog looks, what it sees began with this wave."""
    seen = []

    class Watched(deque[Any]):
        def append(self, jobs: Any) -> None:
            super().append(jobs)
            seen.append(bench.worker.busy)

    bench.worker._flying = Watched()
    started = time.monotonic()
    bench.submit("a")
    bench.until(lambda: len(bench.waves) == 1)
    assert seen[0] is not None and seen[0].since >= started and seen[0].launching


def test_stopping_lets_launched_waves_end(bench: Bench) -> None:
    bench.submit("a")
    bench.until(lambda: len(bench.waves) == 1)
    bench.submit("b")
    bench.settled()
    bench.worker.stop()
    bench.waves[0].finish()
    bench.worker.join()
    assert bench.outcomes["a"] == "result of a"
    assert isinstance(bench.outcomes["b"], EngineDead)


@pytest.mark.parametrize(("before", "after"), [(0.005, TURN_S), (TURN_S / 2, TURN_S / 2)])
def test_threads_take_short_turns(before: float, after: float) -> None:
    """Whoever has set shorter ones keeps them."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(before)
    try:
        bench = Bench()
        found = sys.getswitchinterval()
        bench.worker.stop()
        bench.worker.join()
    finally:
        sys.setswitchinterval(usual)
    assert found == pytest.approx(after, abs=2e-6)  # it is kept in whole microseconds
