"""How much may wait and run together, and when to come back if it is too much. Imports no torch and has no clock."""

from __future__ import annotations

import math
import random

from widebeam.config import EngineConfig
from widebeam.engine.scheduler import WaveLimits
from widebeam.engine.wave import Search
from widebeam.errors import Overloaded

WAVES = 64
"""Full waves that the budgets hold by default."""
WINDOW_S = 10.0
"""Busy seconds over which the rate of answers is averaged, with exponentially falling weight."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
JITTER = 0.2
"""Share by which a wait is made longer or shorter at random, so that clients do not come back together."""


def demand(search: Search) -> dict[str, int]:
    """What a search takes of each budget from its admission to its outcome."""
    return {
        "requests": 1,
        "rows": search.rows,
        "row_levels": 1 + sum(search.widths[:-1]),  # rows that the network decodes, over all levels
        "tokens": search.num_tokens,
    }


def flag(budget: str) -> str:
    """The setting that limits it."""
    return f"--max-waiting-{budget.replace('_', '-')}"


def budget_limits(config: EngineConfig, wave: WaveLimits, max_context_len: int) -> dict[str, int]:
    """Each budget's size: as set, or so that any one search fits and WAVES full waves do."""
    return {
        "requests": config.max_waiting_requests,
        "rows": config.max_waiting_rows or WAVES * wave.rows,
        "row_levels": config.max_waiting_row_levels or WAVES * (wave.rows + wave.beam_slots),
        "tokens": config.max_waiting_tokens or WAVES * max(wave.tokens, max_context_len),
    }


class Budgets:
    """What the accepted searches take together. Used on the event loop; the public numbers may be read anywhere."""

    def __init__(self, limits: dict[str, int], seed: int = 0) -> None:
        self.limits = limits
        self.in_use = dict.fromkeys(limits, 0)
        self.refused = dict.fromkeys(limits, 0)
        """Searches refused so far, by the budget that would be free last."""
        self.retry_after_s = 0.0
        """The wait that was told last."""
        self._random = random.Random(seed)
        self._drained = dict.fromkeys(limits, 0.0)
        self._busy_s = 0.0
        """Weighted alike: what was given back, and the time in which there was anything to answer."""
        self._then = 0.0

    def take(self, search: Search, now: float) -> None:
        """Book a search. Raises Overloaded if that is too much for a budget."""
        self._pass_time(now)
        needed = demand(search)
        over = {name: self.in_use[name] + amount - self.limits[name] for name, amount in needed.items()}
        waits = {name: self._wait_s(name, amount) for name, amount in over.items() if amount > 0}
        if waits:
            name = max(waits, key=lambda name: waits[name])
            self.refused[name] += 1
            self.retry_after_s = waits[name] * self._random.uniform(1 - JITTER, 1 + JITTER)
            raise Overloaded(
                f"{self.in_use[name]} {name} are waiting or running, and {needed[name]} more would be over the limit "
                f"of {self.limits[name]} ({flag(name)})",
                retry_after_s=self.retry_after_s,
            )
        for name, amount in needed.items():
            self.in_use[name] += amount

    def give_back(self, search: Search, now: float) -> None:
        """The outcome of a search is known."""
        self._pass_time(now)
        for name, amount in demand(search).items():
            self.in_use[name] -= amount
            self._drained[name] += amount

    def _pass_time(self, now: float) -> None:
        """Forget some of the past, for as long as there was anything to answer: idle time says nothing of the rate."""
        if self.in_use["requests"]:
            kept = math.exp((self._then - now) / WINDOW_S)
            self._busy_s = self._busy_s * kept + WINDOW_S * (1 - kept)
            for name in self._drained:
                self._drained[name] *= kept
        self._then = now

    def _wait_s(self, name: str, amount: int) -> float:
        """Seconds until so much of a budget has drained, at the rate of late."""
        drained = self._drained[name]
        return min(LONGEST_WAIT_S, amount * self._busy_s / drained) if drained else FIRST_WAIT_S
