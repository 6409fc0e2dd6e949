"""One server in simulated time: how requests gather in waves, by the scheduler's rules in short. Imports no torch.

Of engine/scheduler.py and engine/worker.py it has this: a wave is cut when the last one has left its prefill, so that
two are on the device at most; the oldest request heads it, and of the others, oldest first, comes whatever fits. It has
one kind of search, and no priorities, deadlines or limits of what may wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from widebeam.plan.waves import WaveTime
from widebeam.plan.work import Prompt


@dataclass(eq=False)
class Job:
    """A request. Moments are in seconds."""

    arrived: float
    context: int
    user: int = -1
    cached: int = 0
    """Tokens that the prefix cache has, known when its wave is cut."""
    ended: float = 0.0

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.context, self.cached)


@dataclass(frozen=True)
class Limits:
    """What fits in a wave. A prompt over `tokens` runs alone."""

    requests: int
    tokens: int
    rows: int
    width: int

    def full(self, new_tokens: int) -> int:
        """Requests with so many new tokens each that fit one wave."""
        return max(1, min(self.requests, self.rows // self.width, self.tokens // new_tokens))

    def closing(self, new_tokens: int) -> str:
        """The setting that keeps one more of them out."""
        by = {
            "--max-wave-requests": self.requests,
            "--max-wave-rows": self.rows // self.width,
            "--max-wave-tokens": self.tokens // new_tokens,
        }
        return min(by, key=lambda name: by[name])


class Replica:
    """A queue, and a device that runs its waves one behind the other."""

    def __init__(
        self,
        limits: Limits,
        wave_time: Callable[[Sequence[Prompt]], WaveTime],
        look_up: Callable[[Job], int] = lambda job: 0,
    ) -> None:
        self._limits, self._wave_time, self._look_up = limits, wave_time, look_up
        self.queue: list[Job] = []
        self.in_flight = 0
        """Requests that wait or run; whoever delivers a wave takes them off."""
        self.next_cut = 0.0
        """When the last wave leaves its prefill."""
        self.waves = 0
        self.busy_s = 0.0
        self._device_free = 0.0

    def add(self, job: Job) -> None:
        self.queue.append(job)
        self.in_flight += 1

    def cut(self, now: float) -> list[Job]:
        """The wave that is launched now, each job with the moment of its end."""
        wave = self._take()
        time = self._wave_time([job.prompt for job in wave])
        start = max(now, self._device_free)
        self.next_cut, self._device_free = start + time.prefill / 1e3, start + time.total / 1e3
        self.waves += 1
        self.busy_s += time.total / 1e3
        for job in wave:
            job.ended = self._device_free + time.host / 1e3
        return wave

    def _take(self) -> list[Job]:
        limits, wave, left = self._limits, list[Job](), list[Job]()
        tokens = 0
        for place, job in enumerate(self.queue):
            if len(wave) == limits.requests or (len(wave) + 1) * limits.width > limits.rows:
                left += self.queue[place:]
                break
            job.cached = self._look_up(job)
            new = job.context - job.cached
            if wave and tokens + new > limits.tokens:
                left.append(job)
                continue
            wave.append(job)
            tokens += new
        self.queue = left
        return wave


def open_loop(replica: Replica, rate: float, prompt: Prompt, count: int, seed: int = 0) -> list[float]:
    """Latencies in seconds of `count` equal requests that arrive at random, `rate` a second (Poisson)."""
    rng, moment, jobs = random.Random(seed), 0.0, list[Job]()
    for _ in range(count):
        moment += rng.expovariate(rate)
        jobs.append(Job(moment, prompt.context, cached=prompt.cached))
    waiting = iter(jobs)
    coming = next(waiting, None)
    while coming or replica.queue:
        now = max(replica.next_cut, replica.queue[0].arrived) if replica.queue else float("inf")
        if coming and coming.arrived <= now:
            replica.add(coming)
            coming = next(waiting, None)
        else:
            replica.cut(now)
    return [job.ended - job.arrived for job in jobs]
