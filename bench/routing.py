"""Simulated users, what a cache has of them, and which replica they meet: the parts of simulate.py."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
import random
from collections import OrderedDict

from returning import NEW_TOKENS

from widebeam.history import anchored_history
from widebeam.plan.replica import Job


@functools.cache
def place(name: str) -> int:
    """Where something lies on the ring."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


class Router:
    """Which replica a user's request goes to."""

    def __init__(self, policy: str, replicas: int, seed: int = 0) -> None:
        self.kind, _, number = policy.partition("-")
        least = {"random": None, "least": None, "hash": 1, "bounded": 101}.get(self.kind, math.inf)
        if (number != "") if least is None else not (number.isdigit() and int(number) >= least):
            raise SystemExit(f"no policy {policy!r}: random, least, hash-POINTS, bounded-PERCENT (over 100)")
        points = int(number) if self.kind == "hash" else 160
        self.factor = int(number) / 100 if self.kind == "bounded" else math.inf
        self.ring = sorted(
            (place(f"{replica}/{point}"), replica) for replica in range(replicas) for point in range(points)
        )
        self.rng, self.replicas = random.Random(seed), replicas

    def choose(self, user: int, loads: list[int]) -> int:
        """`loads`: requests of each replica that wait or run."""
        if self.kind == "random":
            return self.rng.randrange(self.replicas)
        if self.kind == "least":
            least = min(loads)
            return self.rng.choice([replica for replica, load in enumerate(loads) if load == least])
        first = bisect.bisect(self.ring, (place(f"user {user}"), 0))
        bound = math.inf if self.factor == math.inf else math.ceil(self.factor * (sum(loads) + 1) / self.replicas)
        return next(
            self.ring[at % len(self.ring)][1] for at in itertools.count(first)
            if loads[self.ring[at % len(self.ring)][1]] < bound
        )  # fmt: skip


class Histories:
    """Lengths of returning.Histories, without tokens: of each visit the first token's number and how many follow."""

    def __init__(self, limit: int, block: int) -> None:
        self.limit, self.block, self._dropped = limit, block, dict[int, int]()

    def visit(self, user: int) -> range:
        dropped = self._dropped.get(user)
        dropped = random.Random(user).randrange(self.block) if dropped is None else dropped
        self._dropped[user] = dropped = dropped + NEW_TOKENS
        kept = anchored_history(range(dropped, dropped + self.limit), self.limit, self.block, offset=dropped)
        return range(kept[0], kept[-1] + 1)  # not the list itself: it would be kept with the visit


class Visit(Job):
    """A job with the numbers of its tokens."""

    def __init__(self, user: int, tokens: range) -> None:
        super().__init__(0.0, len(tokens), user)
        self.tokens = tokens


class Cache:
    """What one replica's prefix cache has: of each user the last prompt, in whole pages."""

    def __init__(self, tokens: int, page: int) -> None:
        self.room, self.page, self._kept = tokens, page, OrderedDict[int, range]()

    def look_up(self, visit: Visit) -> int:
        """Tokens of the prompt that are there; the last one never is."""
        before = self._kept.get(visit.user, range(0))
        same = len(before) > 0 and before[0] == visit.tokens[0]
        return min(len(before) if same else 0, (visit.context - 1) // self.page * self.page)

    def keep(self, visit: Visit) -> None:
        """The prompt is computed; whoever was away the longest makes room."""
        self.room += len(self._kept.pop(visit.user, range(0)))
        self._kept[visit.user] = pages = visit.tokens[: visit.context // self.page * self.page]
        self.room -= len(pages)
        while self.room < 0:
            self.room += len(self._kept.popitem(last=False)[1])
