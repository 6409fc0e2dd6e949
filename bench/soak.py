"""Many /generate requests against a real server: does each one answer, and does memory stay where it is?

    python bench/soak.py CHECKPOINT --requests 100 --context 5000 --width 256 --tokens 3 [--save FILE] [-- serve flags]
    python bench/soak.py CHECKPOINT --vary --requests 10000 --concurrency 32 --context 2000 -- --catalog items.parquet

Starts `widebeam serve CHECKPOINT`, sends random token ids from a fixed seed, reads back what SGLang clients read, and
reports latency, fallbacks, graphs captured late, and the server's memory on the host and the GPU along the way. Sends
so many requests, and goes on for --minutes. With --vary, context, width and tokens (two at least) are random up to the
values given; with a catalog served, half the requests go without it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from servers import counts, machine, running_server, split_flags

from widebeam.client import AsyncClient


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
        self.catalog = "--catalog" in arguments.serve
        self.rng = np.random.default_rng(0)
        self.latencies: list[float] = []

    def _drawn(self, most: int, least: int = 1) -> int:
        return int(self.rng.integers(min(least, most), most + 1)) if self.arguments.vary else most

    async def one(self, client: AsyncClient) -> None:
        arguments, free = self.arguments, not self.catalog
        prompt = self.rng.integers(0, arguments.vocab, self._drawn(arguments.context)).tolist()
        # a width of one is greedy text, and one token a form of its own
        width, tokens = self._drawn(arguments.width, 2), self._drawn(arguments.tokens, 2)
        params = {"beam_width": width, "n": width, "ignore_eos": True}
        options = {}
        if self.catalog and arguments.vary and self.rng.random() < 0.5:
            options, free = {"catalog": "none"}, True
        if free:
            params["max_new_tokens"] = tokens
        sent = time.perf_counter()
        answer = await client.generate(input_ids=prompt, sampling_params=params, **options)
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
            await self.one(client)
            sampling = asyncio.create_task(sampler())
            await asyncio.gather(*(user(client) for _ in range(arguments.concurrency)))
            sampling.cancel()
            memory.append(memory_of(pid))
        return self._report(memory) | await counts(url) | {"seconds": round(time.monotonic() - started, 1)}

    def _report(self, memory: list[dict[str, int]]) -> dict[str, Any]:
        latencies = sorted(self.latencies)
        settled = len(memory) // 5  # until then caches fill
        return {
            "answered": len(latencies),
            "latency_ms": {
                "median": statistics.median(latencies), "p90": latencies[int(len(latencies) * 0.9)],
                "max": latencies[-1],
            },
            "memory": {
                kind: {
                    "first": memory[0][kind], "settled": memory[settled][kind], "last": memory[-1][kind],
                    "growth": memory[-1][kind] - memory[settled][kind],
                }
                for kind in memory[0]
            },
        }  # fmt: skip


async def main(arguments: argparse.Namespace) -> None:
    async with running_server(arguments.checkpoint, arguments.serve) as server:
        result = await Soak(arguments).run(server.url, server.pid)
    what = {key: value for key, value in vars(arguments).items() if key != "save"}
    report = {"date": date.today().isoformat(), "machine": machine(), "arguments": what}
    report |= {"ready_s": round(server.ready_s, 1), "exit_status": server.exit_status} | result
    print(json.dumps(report, indent=2))
    if arguments.save:
        arguments.save.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--sample-s", type=float, default=2.0, help="between two looks at memory")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--context", type=int, default=5000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--vary", action="store_true", help="random lengths and widths, with and without the catalog")
    parser.add_argument("--vocab", type=int, default=50_000, help="prompts are drawn from token ids below this")
    parser.add_argument("--save", type=Path)
    own, serve = split_flags(sys.argv[1:])
    asyncio.run(main(parser.parse_args(own, argparse.Namespace(serve=serve))))
