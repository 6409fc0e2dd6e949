"""Many /generate requests against a real server: does each one answer, and does memory stay where it is?

    python bench/soak.py CHECKPOINT --requests 100 --context 5000 --width 256 --tokens 3 [--save FILE] [-- serve flags]
    python bench/soak.py CHECKPOINT --vary --requests 10000 --concurrency 32 --context 2000 -- --catalog items.parquet

Starts `widebeam serve CHECKPOINT`, sends random token ids from a fixed seed, reads back what SGLang clients read, and
reports latency, fallbacks, and the memory of the server process (on a GPU: of the device) along the way. With --vary,
context, width and tokens are random up to the values given; with a catalog served, half the requests go without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from widebeam.client import AsyncClient


def machine() -> str:
    """The GPU's name, or the processor's kind where there is none."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, check=True
        )
        return out.stdout.decode().splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return platform.machine()


def device_memory(pid: int) -> tuple[str, int]:
    """Bytes in use on the GPU, or resident in the process where there is none."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, check=True
        )
        return "gpu", int(out.stdout.split()[0]) << 20
    except (OSError, subprocess.CalledProcessError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return "rss", pages * 4096


async def start_server(arguments: argparse.Namespace) -> tuple[asyncio.subprocess.Process, str, float]:
    """The server process, its URL, and the seconds until it was ready."""
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "widebeam", "serve", arguments.checkpoint, "--port", "0", *arguments.serve,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode():
        if line.startswith("ready on "):
            return process, line.removeprefix("ready on ").strip(), time.perf_counter() - started
    raise SystemExit(f"the server ended with status {await process.wait()}")


async def fallback_count(url: str) -> float:
    """What the server's metrics say of slower ways taken."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("widebeam_fallbacks_total"))


async def soak(arguments: argparse.Namespace, url: str, pid: int) -> dict[str, Any]:
    """Send all requests, `concurrency` at a time; check every answer."""
    rng = np.random.default_rng(0)
    gate = asyncio.Semaphore(arguments.concurrency)
    latencies: list[float] = []
    memory: list[int] = []
    kind = "rss"

    catalog = "--catalog" in arguments.serve

    def drawn(most: int, least: int = 1) -> int:
        return int(rng.integers(least, most + 1)) if arguments.vary else most

    async def one(client: AsyncClient, place: int) -> None:
        nonlocal kind
        prompt = rng.integers(0, arguments.vocab, drawn(arguments.context)).tolist()
        width, tokens = drawn(arguments.width, 2), drawn(arguments.tokens)  # a width of one is greedy text
        free = {"catalog": "none"} if catalog and arguments.vary and place % 2 else {}
        async with gate:
            sent = time.perf_counter()
            params = {"beam_width": width, "n": width, "ignore_eos": True}
            if free or not catalog:
                params["max_new_tokens"] = tokens
            answer = await client.generate(input_ids=prompt, sampling_params=params, **free)
            latencies.append((time.perf_counter() - sent) * 1e3)
        beams = answer["meta_info"]["beam_results"]
        sequences = {tuple(beam["output_ids"]) for beam in beams}
        assert len(sequences) == len(beams), "the same beam came twice"
        if free or not catalog:
            assert len(sequences) == width, f"{len(sequences)} distinct beams of {width}"
            assert all(len(sequence) == tokens for sequence in sequences)
        if place % max(1, arguments.requests // 100) == 0:
            kind, used = await asyncio.to_thread(device_memory, pid)
            memory.append(used)

    async with AsyncClient(url, timeout=600) as client:
        await one(client, 0)
        await asyncio.gather(*(one(client, place) for place in range(arguments.requests)))
        fallbacks = await fallback_count(url)
    latencies.sort()
    return {
        "answered": len(latencies),
        "fallbacks": fallbacks,
        "latency_ms": {
            "median": statistics.median(latencies), "p90": latencies[int(len(latencies) * 0.9)], "max": latencies[-1]
        },
        "memory_bytes": {"kind": kind, "first": memory[0], "median": statistics.median(memory), "last": memory[-1]},
        "growth_bytes": memory[-1] - memory[1],
    }  # fmt: skip


async def main(arguments: argparse.Namespace) -> None:
    process, url, ready_s = await start_server(arguments)
    try:
        result = await soak(arguments, url, process.pid)
    finally:
        process.terminate()
        status = await process.wait()
    what = {key: value for key, value in vars(arguments).items() if key != "save"}
    report = {"date": date.today().isoformat(), "machine": machine(), "arguments": what}
    report |= {"ready_s": round(ready_s, 1), "exit_status": status} | result
    print(json.dumps(report, indent=2))
    if arguments.save:
        arguments.save.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--context", type=int, default=5000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--vary", action="store_true", help="random lengths and widths, with and without the catalog")
    parser.add_argument("--vocab", type=int, default=50_000, help="prompts are drawn from token ids below this")
    parser.add_argument("--save", type=Path)
    own, _, serve = " ".join(sys.argv[1:]).partition(" -- ")  # what follows -- is for `widebeam serve`
    arguments = parser.parse_args(own.split())
    arguments.serve = serve.split()
    asyncio.run(main(arguments))
