"""A running server under load, from another process over HTTP: rates, latencies and what was refused.

    python bench/online.py --url http://127.0.0.1:8000 --concurrency 1 2 4 8 --context 5000 --width 256
    python bench/online.py --checkpoint DIR --mixed --of-peak 0.8 [--catalog FILE] --save FILE.json [-- serve flags]

With --checkpoint it starts `widebeam serve` itself, hands it what follows `--`, and stops it at the end. Unless told
otherwise, that server logs warnings only. --replicas N: so many, each on a GPU of its own; so many --url may be given
as well. Requests are divided evenly among them, but a closed loop of fewer leaves some idle; what /metrics says is the
first one's.

    --concurrency N ..   closed loops: N requests in flight at all times (1 to 64 if no load is asked for)
    --rate R ..          open loops: R requests/s arrive at random (Poisson); --burst ON OFF: only in every ON seconds
    --trace FILE         an open loop with the arrivals of a JSONL file ({"at_s", "context", "width", "tokens"} a line)
    --of-peak S ..       open loops at shares of the peak, which is the closed loop of the highest concurrency
    --overload           --of-peak 2: does the server keep up its goodput and refuse the rest?
    --http-overhead      one request at a time, and what the engine took of it; then GET /health at --health-rate
                         beside a closed loop of the highest concurrency

Prompts are random token ids. Each level runs for --warm-up seconds that do not count, then for --duration seconds that
do: 30, in which a server of 30 requests/s gives 900 answers, so that waves of 4 leave its rate uncertain by less than
1 %. `req/s +-` is the standard error of the rate, as a share of it, by the spread of the rates in ten parts of that
time; where it is more, make --duration longer.

Latency is that of good answers; in an open loop it counts from the moment that the request was due, so that what waits
unsent is not left out. `late p99` is how much of it was this process being late, `client CPU` how busy it was (near 1,
it is the client that was measured); timers are exact to 2 ms. Goodput: good answers a second within --latency-limit.
Queue, prefill and decode are medians of what answers say of their own request, or, where they say nothing, means from
the server's /metrics over the level, warm-up included; so is always `host a wave`, the time in which the server
prepared and launched one.

On one core of an AMD EPYC (2 cores in all) it drives 11,000 requests/s with prompts of 5000 tokens and answers of 256
beams, 30 kB each way, against a server that answers at once from the other core.
Exit status 1 if anything failed, other than by a 429, or a server of its own ended with another status than 0.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

import uvloop
from loadgen import (
    PATHS,
    Load,
    Request,
    Sample,
    Shape,
    make_requests,
    mixed_shapes,
    poisson,
    read_trace,
    settle,
    summary,
)
from loadreport import Level, markdown, plot
from peers import DIALECTS
from report import header, origin, quantile, quantiles, save
from servers import machine, quiet, running_server, split_flags

CONCURRENCY = [1, 2, 4, 8, 16, 32, 64]
TRACE_WARM_UP = 4
"""Requests in flight before a trace begins."""
HEALTH = Request("/health")


@asynccontextmanager
async def servers(arguments: argparse.Namespace) -> AsyncIterator[tuple[list[str], Level]]:
    """The URLs to measure, and facts about the servers if they are ours, which then end with the block."""
    if arguments.url:
        yield arguments.url, {"machine": arguments.machine} if arguments.machine else {}
        return
    flags = ["--catalog", str(arguments.catalog)] if arguments.catalog else []
    facts: Level = {"machine": machine()}
    async with AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            starting = [
                group.create_task(
                    stack.enter_async_context(
                        running_server(arguments.checkpoint, quiet(flags + arguments.serve), environment)
                    )
                )
                for environment in one_gpu_each(arguments.replicas)
            ]
        ours = [task.result() for task in starting]
        facts["ready_s"] = round(max(one.ready_s for one in ours), 1)
        yield [one.url for one in ours], facts
    facts["exit_status"] = next((one.exit_status for one in ours if one.exit_status), 0)


def one_gpu_each(replicas: int) -> Iterator[dict[str, str] | None]:
    """The environment of each of several servers; a single one has this process's."""
    if replicas == 1:
        yield None
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(replicas)] if visible is None else visible.split(",")
    if len(names) < replicas:
        raise SystemExit(f"--replicas {replicas}: CUDA_VISIBLE_DEVICES names {len(names)}")
    yield from ({**os.environ, "CUDA_VISIBLE_DEVICES": name} for name in names[:replicas])


class Bench:
    """The options, the client and what it sends."""

    def __init__(self, arguments: argparse.Namespace, load: Load) -> None:
        self.arguments, self.load = arguments, load
        fixed = Shape(arguments.context, arguments.width, arguments.tokens)
        shapes = [fixed] * arguments.prompts
        if arguments.mixed:
            ranges = arguments.mixed_context, arguments.mixed_width
            shapes = mixed_shapes(arguments.prompts, *ranges, arguments.tokens, arguments.seed)
        self.requests = self._encode(shapes)
        self.first, self.last = arguments.warm_up, arguments.warm_up + arguments.duration
        self.levels: list[Level] = []

    def _encode(self, shapes: list[Shape]) -> list[Request]:
        given = self.arguments
        return make_requests(shapes, given.route, given.dialect, given.vocab, given.seed)

    async def check(self) -> None:
        """One request before all others. What is wrong with all of them is said here."""
        try:
            status, content, _ = await self.load.fetch(self.requests[0])
        except OSError as error:  # as are aiohttp's own of connecting
            raise SystemExit(f"no answer from the server: {error}") from None
        if status != 200:
            raise SystemExit(f"the first request failed: {status}: {content[:500].decode(errors='replace')}")

    async def closed(self, concurrency: int) -> Level:
        run = self.load.closed_loop(self.requests, concurrency, self.last)
        return await self._level(f"closed {concurrency}", "closed", run, self.first, self.last)

    async def open(self, rate: float, name: str, burst: tuple[float, float] | None = None) -> Level:
        """With bursts, what counts is as many of them as there are whole ones in --duration, at least one."""
        first, last = self.first, self.last
        if burst:
            period = sum(burst)
            first = math.ceil(first / period) * period
            last = first + max(1, self.arguments.duration // period) * period
        run = self.load.open_loop(self.requests, poisson(rate, last, self.arguments.seed, burst))
        return await self._level(name, "bursts" if burst else "open", run, first, last)

    async def of_peak(self, share: float, peak: Level) -> Level:
        """An open loop at a share of the peak, and how the two compare."""
        if not peak["goodput_per_s"]:
            raise SystemExit("the peak has no good answers")
        found = await self.open(share * peak["requests_per_s"], f"{share:g} x peak")
        found |= {
            "goodput_of_peak": found["goodput_per_s"] / peak["goodput_per_s"],
            "refused_share": found["refused"] / max(1, found["sent"]),
            "failed_share": sum(found["failed"].values()) / max(1, found["sent"]),
        }
        return found

    async def trace(self, path: Path) -> Level:
        """All arrivals of a file, behind a warm-up with its requests that does not count. Rates are over the time to
        the last answer."""
        moments, shapes = read_trace(path)
        requests = self._encode(shapes)
        await self.load.closed_loop(requests, TRACE_WARM_UP, self.first)
        return await self._level(path.name, "trace", self.load.open_loop(requests, moments), 0.0, moments[-1])

    async def _level(
        self, name: str, kind: str, run: Coroutine[Any, Any, list[Sample]], first: float, last: float
    ) -> Level:
        """What a loop gave between two moments; of a trace, all."""
        settle()
        before = await self._phases()
        samples, busy = await asyncio.gather(run, client_cpu(first, last))
        after = await self._phases()
        if kind == "trace":
            last = math.nextafter(max(sample.ended for sample in samples), math.inf)
        found = summary(samples, first, last, self.arguments.latency_limit)
        phases = means(before, after)
        found["wave_host_ms"] = phases.pop("wave_host_ms", None)
        if found["queue_ms"] is None:
            found |= phases
        found = {"load": name, "kind": kind} | found | {"client_cpu": busy}
        error = "" if found["rate_error"] is None else f" +- {found['rate_error']:.1%}"
        print(
            f"{name}: {found['requests_per_s']:.4g} requests/s{error} in {last - first:.4g} s",
            file=sys.stderr,
            flush=True,
        )
        self.levels.append(found)
        return found

    async def _phases(self) -> dict[str, tuple[float, float]]:
        """Sum in seconds and count of each phase so far, and of launching a wave, from the server's metrics; empty if
        it has none of ours."""
        text = (await self.load.get("/metrics")).decode()
        found = {
            key: float(value) for key, value in re.findall(r"^widebeam_(\w+_seconds_(?:sum|count)) (\S+)", text, re.M)
        }
        names = ("queue", "prefill", "decode", "wave_host")
        if not all(f"{name}_seconds_count" in found for name in names):
            return {}
        return {name: (found[f"{name}_seconds_sum"], found[f"{name}_seconds_count"]) for name in names}

    async def overhead(self) -> Level:
        """One request at a time: what it takes here, in the handler and in the engine, and an empty one beside it."""
        settle()
        before = await self._phases()
        samples = await self.load.closed_loop(self.requests, 1, self.last)
        after = await self._phases()
        good = [sample for sample in samples if sample.due >= self.first and sample.outcome == "ok"]
        if not good:
            raise SystemExit("no good answers to see the overhead of")
        client = [sample.latency_ms for sample in good]
        engine = [sample.engine.total for sample in good if sample.engine]
        found: Level = {"requests": len(good), **quantiles("client", client)}
        if outside := [s.latency_ms - s.handler_ms for s in good if s.handler_ms is not None]:
            found["outside_handler_p50_ms"] = median_low(outside)
        if engine:
            found["engine_p50_ms"] = median_low(engine)
            found["overhead_ms"] = median_low(client) - median_low(engine)
            apart = [sample.latency_ms - sample.engine.total for sample in good if sample.engine]
            found |= quantiles("overhead", apart)
        elif phases := means(before, after):
            phases.pop("wave_host_ms")
            found["client_mean_ms"] = fmean(sample.latency_ms for sample in samples if sample.outcome == "ok")
            found["engine_mean_ms"] = sum(value for value in phases.values() if value is not None)
            found["overhead_ms"] = found["client_mean_ms"] - found["engine_mean_ms"]
        idle = await self.load.closed_loop([HEALTH], 1, self.last)
        return found | quantiles("idle_health", [sample.latency_ms for sample in idle if sample.due >= self.first])

    async def health(self, concurrency: int) -> Level:
        """GET /health at a rate while a closed loop keeps the engine full."""
        settle()
        moments = poisson(self.arguments.health_rate, self.last, self.arguments.seed)
        beside, probes, busy = await asyncio.gather(
            self.load.closed_loop(self.requests, concurrency, self.last),
            self.load.open_loop([HEALTH], moments),
            client_cpu(self.first, self.last),
        )
        found = summary(probes, self.first, self.last, None)
        engine = summary(beside, self.first, self.last, None)
        sent = [(sample.ended - sample.sent) * 1e3 for sample in probes if self.first <= sample.due < self.last]
        keys = ("sent", "ok", "failed", "requests_per_s", "latency_p50_ms", "latency_p90_ms", "latency_p99_ms")
        return {key: found[key] for key in keys} | {
            "latency_max_ms": max((s.latency_ms for s in probes if s.due >= self.first), default=None),
            "from_sending_p99_ms": quantile(sent, 0.99), "late_p99_ms": found["late_p99_ms"], "client_cpu": busy,
            "concurrency_beside": concurrency, "requests_per_s_beside": engine["requests_per_s"],
            "latency_p50_beside_ms": engine["latency_p50_ms"], "failed_beside": engine["failed"],
        }  # fmt: skip


async def client_cpu(first: float, last: float) -> float | None:
    """Share of one core that this process is busy from now + first to now + last."""
    await asyncio.sleep(first)
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(last - first)
    seconds = time.perf_counter() - wall
    return (time.process_time() - cpu) / seconds if seconds > 0.01 else None


def means(before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]) -> dict[str, float | None]:
    """Mean of each phase in ms over the searches between two readings."""
    found: dict[str, float | None] = {}
    for name in before.keys() & after.keys():
        seconds, count = (late - early for early, late in zip(before[name], after[name], strict=True))
        found[f"{name}_ms"] = seconds / count * 1e3 if count else None
    return found


async def measure(arguments: argparse.Namespace) -> Level:
    """Everything that the options ask for."""
    shares = arguments.of_peak + ([2.0] if arguments.overload else [])
    others = arguments.rate or arguments.trace or arguments.http_overhead
    closed = arguments.concurrency or (CONCURRENCY[-1:] if shares else [] if others else CONCURRENCY)
    most = max(closed or CONCURRENCY)
    found: Level = {}
    async with servers(arguments) as (urls, facts), Load(urls, arguments.timeout_s) as load:
        bench = Bench(arguments, load)
        await bench.check()
        by_concurrency = {concurrency: await bench.closed(concurrency) for concurrency in closed}
        for rate in arguments.rate:
            burst = tuple(arguments.burst) if arguments.burst else None
            await bench.open(rate, f"{'bursts' if burst else 'open'} {rate:g}/s", burst)
        if arguments.trace:
            await bench.trace(arguments.trace)
        for share in shares:
            await bench.of_peak(share, by_concurrency[most])
        if arguments.http_overhead:
            found = {"http_overhead": await bench.overhead(), "health": await bench.health(most)}
    return {"cores": os.cpu_count(), "server": facts, "levels": bench.levels} | found


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", nargs="+", action="extend", help="of a server that runs, or of several equal ones")
    source.add_argument("--checkpoint", help="start a server of it")
    source.add_argument("--replot", type=Path, metavar="FILE.json", help="measure nothing: --plot a saved report")
    parser.add_argument("--catalog", type=Path, help="of the server that is started")
    parser.add_argument("--replicas", type=int, default=1, help="servers to start")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[], metavar="N")
    parser.add_argument("--rate", type=float, nargs="+", default=[], metavar="R", help="requests/s")
    parser.add_argument("--burst", type=float, nargs=2, metavar=("ON", "OFF"), help="seconds")
    parser.add_argument("--trace", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--of-peak", type=float, nargs="+", default=[], metavar="SHARE")
    parser.add_argument("--overload", action="store_true")
    parser.add_argument("--http-overhead", action="store_true")
    parser.add_argument("--health-rate", type=float, default=2000.0)
    parser.add_argument("--duration", type=float, default=30.0, metavar="S")
    parser.add_argument("--warm-up", type=float, default=3.0, metavar="S")
    parser.add_argument("--latency-limit", type=float, metavar="MS", help="of goodput; without it all answers are good")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--route", choices=PATHS, default="generate")
    parser.add_argument("--dialect", choices=DIALECTS, default="sglang", help="of /generate, as in peers.py")
    parser.add_argument("--context", type=int, default=5000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--mixed", action="store_true", help="contexts and widths log-uniform in the next two ranges")
    parser.add_argument("--mixed-context", type=int, nargs=2, default=[500, 8000], metavar=("LOW", "HIGH"))
    parser.add_argument("--mixed-width", type=int, nargs=2, default=[32, 512], metavar=("LOW", "HIGH"))
    parser.add_argument("--prompts", type=int, default=256, help="different requests, sent in turn")
    parser.add_argument("--vocab", type=int, default=50_000, help="prompts are drawn from token ids below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="JSON file; its tables go beside it, as .md")
    parser.add_argument("--machine", help="of the server at --url, which does not say: for the report and the plot")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="latency against throughput; needs matplotlib")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; what follows `--` is for `widebeam serve`."""
    parser = options()
    own, serve = split_flags(argv)
    arguments = parser.parse_args(own, argparse.Namespace(serve=serve))
    if (arguments.serve or arguments.catalog or arguments.replicas != 1) and not arguments.checkpoint:
        parser.error("--catalog, --replicas and flags behind -- are for servers that are started: give --checkpoint")
    if arguments.machine and arguments.checkpoint:
        parser.error("--machine is for a server at --url, or --replot: here it is this one")
    if arguments.replicas < 1:
        parser.error(f"--replicas {arguments.replicas} is not 1 or more")
    if arguments.replot and not arguments.plot:
        parser.error("--replot needs --plot FILE.png")
    if arguments.burst and not arguments.rate:
        parser.error("--burst needs --rate")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error(
            "--plot needs matplotlib, which is not installed here: pip install matplotlib, or measure with --save "
            "FILE.json and draw it where there is one, with --replot FILE.json --plot FILE.png"
        )
    return arguments


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.replot:
        report = json.loads(arguments.replot.read_text())
        report["server"] |= {"machine": arguments.machine} if arguments.machine else {}
        plot(report, arguments.plot)
        return 0
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = header(arguments) | runner.run(measure(arguments))
    text = f"{origin(report | report['server'])}\n\n{markdown(report)}"
    print(text)
    save(arguments.save, report, text)
    if arguments.plot:
        plot(report, arguments.plot)
    failed = [level["failed"] for level in report["levels"]]
    failed += [report[part][key] for part, key in (("health", "failed"), ("health", "failed_beside")) if part in report]
    return int(any(failed) or bool(report["server"].get("exit_status")))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
