"""Users who come back: how their histories grow, who comes when, and how an engine serves them in a closed loop."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from report import quantiles

from widebeam import Engine, SearchParams, anchored_history

NEW_TOKENS = 20
"""What a visit adds to a history."""


class Histories:
    """Of all users, by number: random tokens, the same in every replay of the same visits.

    A history is longer than `limit` from the first visit on, and cut as `anchored_history` cuts it. At first its
    beginning is anywhere between two moves, as it is with users who have been coming for long.
    """

    def __init__(self, vocab_size: int, limit: int, block: int) -> None:
        self.vocab_size, self.limit, self.block = vocab_size, limit, block
        self._users: dict[int, tuple[np.random.Generator, array[int]]] = {}
        self._dropped: dict[int, int] = {}
        """Tokens of each user that came before those that are kept."""

    def visit(self, user: int) -> list[int]:
        """The prompt of the user's next visit."""
        if user not in self._users:
            rng = np.random.default_rng((1, user))
            self._dropped[user] = int(rng.integers(self.block))
            self._users[user] = rng, array("i", rng.integers(0, self.vocab_size, self.limit).tolist())
        rng, tokens = self._users[user]
        tokens.extend(rng.integers(0, self.vocab_size, NEW_TOKENS).tolist())
        surplus = len(tokens) - self.limit
        del tokens[:surplus]
        self._dropped[user] += surplus
        return anchored_history(tokens, self.limit, self.block, offset=self._dropped[user])


class Visits(NamedTuple):
    """Users in the order in which they come."""

    warm_up: list[int]
    """Those that only fill the cache."""
    counted: list[int]


def zipf_visits(users: int, exponent: float, warm_up: int, counted: int) -> Visits:
    """Of so many users, the k-th most popular comes in proportion to k ** -exponent."""
    weights = np.arange(1, users + 1) ** -exponent
    drawn = np.random.default_rng(0).choice(users, warm_up + counted, p=weights / weights.sum()).tolist()
    return Visits(drawn[:warm_up], drawn[warm_up:])


def visits_at_rate(users: int, share: float, counted: int) -> Visits:
    """A share of the visits is by one of so many users, each of whom has been there before; all others come once."""
    rng = np.random.default_rng(0)
    returning = rng.permutation(counted) < share * counted
    drawn = np.where(returning, rng.integers(0, users, counted), users + np.arange(counted))
    return Visits(list(range(users)), drawn.tolist())


class Answer(NamedTuple):
    latency_ms: float
    prompt_tokens: int
    cached_tokens: int


async def closed_loop(
    engine: Engine, params: SearchParams, prompts: Iterator[list[int]], concurrency: int
) -> tuple[list[Answer], float]:
    """So many requests in flight until there are no more prompts; the answers, and the seconds that they took."""
    answers: list[Answer] = []

    async def loop() -> None:
        for prompt in prompts:
            sent = time.perf_counter()
            result = await engine.submit(prompt, params)
            answers.append(Answer((time.perf_counter() - sent) * 1e3, result.prompt_tokens, result.cached_tokens))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:  # a search that fails ends everything
        for _ in range(concurrency):
            group.create_task(loop())
    return answers, time.perf_counter() - started


async def replay(
    engine: Engine, params: SearchParams, visits: Visits, histories: Histories, concurrency: int
) -> dict[str, Any]:
    """Serve the visits; what came of those that count."""

    def prompts(users: Sequence[int]) -> Iterator[list[int]]:
        return map(histories.visit, users)

    await closed_loop(engine, params, prompts(visits.warm_up), concurrency)
    before = engine.stats().prefix_restored_tokens
    answers, seconds = await closed_loop(engine, params, prompts(visits.counted), concurrency)
    tokens, cached = (sum(getattr(answer, name) for answer in answers) for name in ("prompt_tokens", "cached_tokens"))
    restored = engine.stats().prefix_restored_tokens - before
    return {
        "visits": len(answers),
        "users": len(set(visits.counted)),
        "prompt_tokens": tokens / len(answers),
        "requests_per_s": len(answers) / seconds,
        "hit_requests": sum(answer.cached_tokens > 0 for answer in answers) / len(answers),
        "hit_tokens": cached / tokens,
        "restored_tokens": restored / tokens,
        **quantiles("latency", [answer.latency_ms for answer in answers]),
    }
