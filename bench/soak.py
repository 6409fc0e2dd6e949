"""Many /generate requests against a real server: does each one answer, and does memory stay where it is?

    python bench/soak.py CHECKPOINT --requests 100 --context 5000 --width 256 --tokens 3 [--save FILE] [-- serve flags]
    python bench/soak.py CHECKPOINT --vary --requests 10000 --concurrency 32 -- --catalog a=items.parquet b=more.parquet

Starts `widebeam serve CHECKPOINT`, sends random token ids from a fixed seed, reads back what SGLang clients read, and
reports latency and the server's memory on the host and the GPU along the way. Sends so many requests, and goes on for
--minutes. With --vary, context, width and tokens (two at least) are random up to the values given, and each request
goes to one of the catalogs served or to none; without it, to the first one.

At the end, /metrics must say that all of them ended well, that nothing is left waiting, running or held in the pools
(what the prefix cache keeps is not), and that nothing was run by a slower way or captured late. Nor may memory grow:
the median of the last third of the samples may be --growth-mib above that of the middle third, on the host and on the
GPU. Else the report says what is `wrong`, and the exit status is 1.

The first third is for what a healthy server still takes: caches, graphs that traffic captures, modules that are loaded
at their first use. After it the server of a recorded H200 run (98,420 requests in 5 minutes) took 5 MiB on the host in
four minutes and nothing on the GPU. The allowance of 32 MiB is many times that, and more than a segment of 20 MiB, by
which PyTorch's allocator grows; a leak of 1.5 KiB a request, or 25 MiB a minute, is still found by such a run. A
shorter one finds larger leaks only. Fewer than 9 samples are not judged, and the report says so.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from report import header, origin, quantile, save, table
from servers import machine, metrics, running_server, split_flags

from widebeam.client import AsyncClient
from widebeam.engine.request import NO_CATALOG

LEFT = (
    "requests_in_flight", "requests_waiting", "requests_running", "beam_rows_in_use", "context_pages_in_use",
    "beam_slots_in_use", "context_pages_leased", "beam_slots_leased",
)  # fmt: skip
"""Gauges that are 0 when nothing is left to do."""
COUNTED = ("fallbacks", "late_graphs")
"""Counters of what should never happen."""
LEAST_SAMPLES = 9
"""Three in each third."""
MIB = 1 << 20
REST_S = 10.0
"""Within which the last wave gives back what it held: it does so after its answers."""


def memory_of(pid: int) -> dict[str, int]:
    """Bytes of a process that are resident, and those that it has on GPUs if it uses any."""
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        out = subprocess.run(query, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return {"host": resident}
    used = [line.split(",") for line in out.splitlines()]
    return {"host": resident, "gpu": sum(int(mib) << 20 for owner, mib in used if int(owner) == pid)}


class Soak:
    """Sends requests and checks every answer."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.catalogs: list[str] = []
        self.rng = np.random.default_rng(0)
        self.latencies: list[float] = []
        self.sent: Counter[str] = Counter()
        """By the catalog."""

    def _drawn(self, most: int, least: int = 1) -> int:
        return int(self.rng.integers(min(least, most), most + 1)) if self.arguments.vary else most

    def _catalog(self) -> str:
        """Any of those served, or none of them, each as likely."""
        choice = [*self.catalogs, NO_CATALOG]
        return choice[self.rng.integers(len(choice))] if self.arguments.vary else choice[0]

    async def one(self, client: AsyncClient) -> None:
        arguments, catalog = self.arguments, self._catalog()
        free = catalog == NO_CATALOG
        prompt = self.rng.integers(0, arguments.vocab, self._drawn(arguments.context)).tolist()
        # a width of one is greedy text, and one token a form of its own
        width, tokens = self._drawn(arguments.width, 2), self._drawn(arguments.tokens, 2)
        params = {"beam_width": width, "n": width, "ignore_eos": True}
        if free:
            params["max_new_tokens"] = tokens
        self.sent[catalog] += 1
        sent = time.perf_counter()
        answer = await client.generate(input_ids=prompt, sampling_params=params, catalog=catalog)
        self.latencies.append((time.perf_counter() - sent) * 1e3)
        assert not isinstance(answer, list)
        sequences = {tuple(beam.output_ids) for beam in answer.beams}
        assert len(sequences) == len(answer.beams), "the same beam came twice"
        if free:
            assert len(sequences) == width, f"{len(sequences)} distinct beams of {width}"
            assert all(len(sequence) == tokens for sequence in sequences)

    async def run(self, url: str, pid: int) -> dict[str, Any]:
        arguments, started = self.arguments, time.monotonic()
        places, memory = itertools.count(), []

        async def user(client: AsyncClient) -> None:
            while next(places) < arguments.requests or time.monotonic() - started < arguments.minutes * 60:
                await self.one(client)

        async def sampler() -> None:
            while True:
                memory.append(await asyncio.to_thread(memory_of, pid))
                await asyncio.sleep(arguments.sample_s)

        async with AsyncClient(url, timeout=600) as client:
            self.catalogs = [catalog.name for catalog in await client.catalogs()]
            await self.one(client)
            sampling = asyncio.create_task(sampler())
            await asyncio.gather(*(user(client) for _ in range(arguments.concurrency)))
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling
            memory.append(memory_of(pid))
        seconds = round(time.monotonic() - started, 1)
        found = self._report(memory) | {"seconds": seconds} | judged(await at_rest(url), self.sent.total())
        found["wrong"] += grown(found["memory"], arguments.growth_mib)
        return found

    def _report(self, memory: list[dict[str, int]]) -> dict[str, Any]:
        latencies = self.latencies
        return {
            "sent": dict(sorted(self.sent.items())), "answered": len(latencies),
            "latency_ms": {
                "median": statistics.median(latencies), "p90": quantile(latencies, 0.9),
                "max": max(latencies),
            },
            "memory": {kind: thirds([one[kind] for one in memory if kind in one]) for kind in memory[0]},
        }  # fmt: skip


def thirds(series: Sequence[int]) -> dict[str, float | None]:
    """Of memory over time, in bytes: at first, medians of the middle and of the last third, and what lies between
    them. None for what so few samples do not say."""
    third = len(series) // 3
    found: dict[str, float | None] = {"samples": len(series), "first": series[0]}
    if len(series) < LEAST_SAMPLES:
        return found | {"middle": None, "last": series[-1], "growth": None}
    middle, last = statistics.median(series[third : 2 * third]), statistics.median(series[2 * third :])
    return found | {"middle": middle, "last": last, "growth": last - middle}


def grown(memory: dict[str, dict[str, float | None]], allowed_mib: float) -> list[str]:
    """What is wrong with `thirds` of each kind of memory."""
    growths = {kind: (sizes["growth"] or 0) / MIB for kind, sizes in memory.items()}
    return [
        f"memory on the {kind} grew by {growth:.1f} MiB from the middle third of the run to the last, which is more "
        f"than --growth-mib {allowed_mib:g}"
        for kind, growth in growths.items()
        if growth > allowed_mib
    ]


async def at_rest(url: str) -> dict[str, float]:
    """The server's metrics when nothing is left, or after REST_S."""
    last = time.monotonic() + REST_S
    while True:
        found = await metrics(url)
        if not any(found[name] for name in LEFT) or time.monotonic() > last:
            return found
        await asyncio.sleep(0.05)


def judged(found: dict[str, float], sent: int) -> dict[str, Any]:
    """What metrics say after so many requests, and what of that is wrong."""
    left = {name: found[name] for name in LEFT}
    counted = {name: found[f"{name}_total"] for name in COUNTED}
    searches = by_outcome(found, r'searches_total\{outcome="(\w+)"\}')
    http = by_outcome(found, r'requests_total\{outcome="(\w+)",route="/generate"\}')
    wrong = [f"{name} is {value:g}, not 0" for name, value in (left | counted).items() if value]
    if searches != {"ok": sent}:
        wrong.append(f"searches by outcome are {searches}, not ok: {sent}")
    if http.get("ok") != sent:  # what was refused has been sent again
        wrong.append(f"answers of /generate by outcome are {http}, not ok: {sent}")
    return counted | {"left": left, "searches": searches, "http": http, "wrong": wrong}


def by_outcome(found: dict[str, float], series: str) -> dict[str, int]:
    """Counts that are not 0 of the metrics whose names a pattern matches."""
    matches = ((re.fullmatch(series, name), value) for name, value in found.items())
    return {match[1]: int(value) for match, value in matches if match and value}


def markdown(report: dict[str, Any]) -> str:
    """What came of the requests, what was held at the end, and memory in MiB."""
    sent = ", ".join(f"{catalog}: {count}" for catalog, count in report["sent"].items())
    facts = [("sent, by catalog", sent), ("answered", report["answered"]), ("seconds", report["seconds"])]
    facts += [(f"latency {name}, ms", value) for name, value in report["latency_ms"].items()]
    facts += [(name, int(report[name])) for name in COUNTED]
    facts += [(f"{name} at the end", int(value)) for name, value in report["left"].items()]
    kinds = ("first", "middle", "last", "growth")
    memory = [
        (where, sizes["samples"], *(None if sizes[kind] is None else sizes[kind] / MIB for kind in kinds))
        for where, sizes in report["memory"].items()
    ]
    few = [
        f"Growth of memory on the {where}: too few samples to tell." for where, *_, growth in memory if growth is None
    ]
    return "\n\n".join([
        origin(report), table(["", "value"], facts),
        table(["memory, MiB", "samples", *kinds], memory), *few, "; ".join(report["wrong"]) or "Nothing is wrong.",
    ])  # fmt: skip


async def main(arguments: argparse.Namespace) -> int:
    async with running_server(arguments.checkpoint, arguments.serve) as server:
        result = await Soak(arguments).run(server.url, server.pid)
    report = header(arguments) | {"machine": machine()}
    report |= {"ready_s": round(server.ready_s, 1), "exit_status": server.exit_status} | result
    if server.exit_status:
        report["wrong"].append(f"the server ended with status {server.exit_status}")
    print(json.dumps(report, indent=2))
    for one in report["wrong"]:
        print(f"WRONG: {one}", file=sys.stderr)
    save(arguments.save, report, markdown(report))
    return int(bool(report["wrong"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--sample-s", type=float, default=2.0, help="between two looks at memory")
    parser.add_argument("--growth-mib", type=float, default=32.0, help="most by which memory may grow at the end")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--context", type=int, default=5000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--vary", action="store_true", help="random lengths, widths and catalogs")
    parser.add_argument("--vocab", type=int, default=50_000, help="prompts are drawn from token ids below this")
    parser.add_argument("--save", type=Path, help="JSON file; its tables go beside it, as .md")
    own, serve = split_flags(sys.argv[1:])
    raise SystemExit(asyncio.run(main(parser.parse_args(own, argparse.Namespace(serve=serve)))))
