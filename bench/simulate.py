"""Replicas behind a router in simulated time: throughput, latency and prefix-cache hits by routing policy.

    python bench/simulate.py qwen3-1.7b [--replicas 1 2 .. 64] [--policies hash-160 bounded-150 ..] [--save FILE.json]
    python bench/simulate.py qwen3-1.7b --validate ONLINE.json --replicas 1

Waves take what `widebeam plan` says, and gather by its rules (widebeam/plan/replica.py). Users are those of
returning.py: Zipf, ten times as many as fit the caches, histories that grow and are cut in blocks; a cache drops the
user who was away the longest. Closed loops of --concurrency requests a replica, as of history.py; with --load open
loops at that share of what replicas without a cache can do.

    random, least   any replica; the one with the fewest requests that wait or run
    hash-P          consistent hash of the user, with P points a replica on the ring
    bounded-F       hash-160, but on to the next of the ring while a replica has F % of the mean of requests (HAProxy:
                    hash-balance-factor F)

--router-ms: a router that everything passes, one request at a time. --validate: levels of a report of online.py (of
as many replicas, no prefix cache, prompts of one length) beside what is predicted; what it asked for is in the report,
so that of the other options only the shape, the GPU, the quantization, --items and one number of --replicas count.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import header, quantiles, save, table
from returning import zipf_visits
from routing import Cache, Histories, Router, Visit

from widebeam.config import EngineConfig
from widebeam.plan.command import Plan, plan
from widebeam.plan.estimate import CODES
from widebeam.plan.gpus import GPUS
from widebeam.plan.replica import Limits, Replica
from widebeam.plan.shapes import SHAPES
from widebeam.plan.waves import WaveModel

POLICIES = ["random", "least", "hash-16", "hash-160", "bounded-125", "bounded-150", "bounded-200"]
TIMES_THE_POOL = 10
MEASURED = ("requests_per_s", "latency_p50_ms", "latency_p99_ms")


class Fleet:
    """Replicas, their caches and the router before them, in one simulated time."""

    def __init__(self, waves: WaveModel, router: Router, cache_tokens: int, router_ms: float = 0.0) -> None:
        config = EngineConfig(model="")
        limits = Limits(config.max_wave_requests, config.max_wave_tokens, config.max_wave_rows, waves.width)
        self.router, self.router_ms, self.done = router, router_ms, list[Visit]()
        self.caches = [Cache(cache_tokens, config.page_size) for _ in range(router.replicas)]
        self.replicas = [Replica(limits, waves.time, cache.look_up) for cache in self.caches]  # type: ignore[arg-type]
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = itertools.count()
        self._router_free = 0.0
        self._cutting = [False] * router.replicas

    def serve(self, visits: Iterator[Visit], *, concurrency: int = 1, rate: float = 0.0, seed: int = 0) -> None:
        """So many requests in flight until there are no more, or with a rate as they arrive at random (Poisson)."""
        rng = random.Random(seed)
        if rate:
            self._at(rng.expovariate(rate), "due", None)
        for _ in range(0 if rate else concurrency):
            self._arrive(0.0, visits)
        while self._events:
            now, _, kind, what = heapq.heappop(self._events)
            if kind == "due":
                if self._arrive(now, visits):
                    self._at(now + rng.expovariate(rate), "due", None)
            elif kind == "routed":
                at = self.router.choose(what.user, [replica.in_flight for replica in self.replicas])
                self.replicas[at].add(what)
                self._plan_cut(now, at)
            elif kind == "cut":
                self._cut(now, what)
            else:
                at, wave = what
                self.replicas[at].in_flight -= len(wave)
                self.done += wave
                for _ in wave if not rate else ():
                    self._arrive(now, visits)

    def _at(self, moment: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (moment, next(self._order), kind, what))

    def _arrive(self, now: float, visits: Iterator[Visit]) -> bool:
        """The next visit comes to the router, if there is one."""
        visit = next(visits, None)
        if visit is not None:
            visit.arrived, self._router_free = now, max(now, self._router_free) + self.router_ms / 1e3
            self._at(self._router_free, "routed", visit)
        return visit is not None

    def _plan_cut(self, now: float, at: int) -> None:
        if self.replicas[at].queue and not self._cutting[at]:
            self._cutting[at] = True
            self._at(max(now, self.replicas[at].next_cut), "cut", at)

    def _cut(self, now: float, at: int) -> None:
        self._cutting[at] = False
        wave = self.replicas[at].cut(now)
        for visit in wave:
            self.caches[at].keep(visit)  # type: ignore[arg-type]
        self._at(wave[0].ended, "ended", (at, wave))
        self._plan_cut(now, at)

    def summary(self, warm_up: int) -> dict[str, Any]:
        """What came of the visits behind the warm-up."""
        counted, busy = self.done[warm_up:], [replica.busy_s for replica in self.replicas]
        since = self.done[warm_up - 1].ended if warm_up else 0.0
        return {
            "requests_per_s": len(counted) / (counted[-1].ended - since),
            **quantiles("latency", [(visit.ended - visit.arrived) * 1e3 for visit in counted]),
            "hit_tokens": sum(visit.cached for visit in counted) / sum(visit.context for visit in counted),
            "busiest_of_mean": max(busy) * len(busy) / sum(busy),
        }


def model_of(given: argparse.Namespace) -> tuple[WaveModel, float, dict[str, Any]]:
    """A replica's waves, its requests/s without a cache, and its memory."""
    asked = {name: getattr(given, name) for name in ("context", "width", "tokens", "gpu", "quantization", "items")}
    found = plan(Plan(model=given.shape, qps=1.0, **asked))
    kinds = {"fp8": found["fp8"], "codes": CODES if given.items else None}
    waves = WaveModel(SHAPES[given.shape], GPUS[given.gpu], given.width, given.tokens, **kinds)
    return waves, found["speed"]["requests_per_s"], found["memory"]


def compare(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All popularities, routers, sizes and policies."""
    waves, peak, room = model_of(given)
    cases = itertools.product(given.exponents, given.router_ms, given.replicas, given.policies)
    for exponent, router_ms, count, policy in cases:
        users, warm_up = count * TIMES_THE_POOL * room["histories_on_gpu"], count * given.warm_up
        histories = Histories(given.context, given.context // 4)
        drawn = itertools.chain(*zipf_visits(users, exponent, warm_up, count * given.visits))
        fleet = Fleet(waves, Router(policy, count), room["pool_tokens"], router_ms)
        visits = (Visit(user, histories.visit(user)) for user in drawn)
        fleet.serve(visits, concurrency=given.concurrency * count, rate=given.load * peak * count)
        found = fleet.summary(warm_up)
        found["of_cold_peak"] = found["requests_per_s"] / peak / count
        yield {"exponent": exponent, "router_ms": router_ms, "replicas": count, "policy": policy, **found}


def validate(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Levels of a report of online.py, measured and predicted."""
    report = json.loads(given.validate.read_text())
    if report["arguments"]["mixed"] == "True":
        raise SystemExit(f"{given.validate}: prompts of mixed lengths are not simulated")
    for name in ("context", "width", "tokens"):
        setattr(given, name, int(report["arguments"][name]))
    waves, _, _ = model_of(given)
    for level in (one for one in report["levels"] if one["kind"] in ("closed", "open")):
        fleet = Fleet(waves, Router("least", given.replicas[0]), 0)
        rate = level["offered_per_s"] if level["kind"] == "open" else 0.0
        concurrency = 0 if rate else int(level["load"].split()[-1])
        fleet.serve((Visit(user, range(given.context)) for user in range(10_000)), concurrency=concurrency, rate=rate)
        found = fleet.summary(1000)
        yield {"load": level["load"]} | {
            f"{key} {kind}": value[key]
            for key in MEASURED
            for kind, value in (("measured", level), ("predicted", found))
        }


def markdown(report: dict[str, Any]) -> str:
    given = ", ".join(f"{name} {value}" for name, value in report["arguments"].items() if name != "policies")
    columns = [name.replace("_", " ") for name in report["rows"][0]]
    return f"Simulated, {report['date']}: {given}.\n\n{table(columns, [[*row.values()] for row in report['rows']])}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    numbers = {"context": 5000, "width": 256, "tokens": 3, "concurrency": 16, "warm-up": 600, "visits": 400}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--items", type=int)  # of a catalog
    parser.add_argument("--gpu", default="h200", choices=GPUS)
    parser.add_argument("--quantization", default="auto", choices=("auto", "none", "fp8"))
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--exponents", type=float, nargs="+", default=[1.0, 0.6])
    parser.add_argument("--router-ms", type=float, nargs="+", default=[0.0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--validate", type=Path, metavar="ONLINE.json")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args(argv)
    if given.validate and len(given.replicas) != 1:
        parser.error("--validate is for one number of servers: give --replicas N, as many as the report had")
    return given


if __name__ == "__main__":
    chosen = parse()
    made = header(chosen) | {"rows": [*(validate(chosen) if chosen.validate else compare(chosen))]}
    print(markdown(made))
    save(chosen.save, made, markdown(made))
