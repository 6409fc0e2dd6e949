"""Two servers, one client: latency, throughput and agreement on the same prompts, side by side.

    python bench/peers.py http://127.0.0.1:8000 http://127.0.0.1:30000 --requests 64 --concurrency 4 --context 1000
    python bench/peers.py http://127.0.0.1:30000 --checkpoint DIR [-- serve flags]

Both speak SGLang's /generate; with --checkpoint the first one is `widebeam serve DIR`, started here and stopped at the
end. `--dialects` says, server by server, how it is asked for beams: `sglang` (beam_width and n, as released; the
default), `fork` (use_beam_search and n, as in older forks) or `n` (n alone, NVIDIA's SID-GR). The servers are measured
one after the other, each warmed up with other prompts. Prompts are random token ids from a fixed seed, or the lists of
ids in a JSON file (`--prompts`). `overlap` is the share of a prompt's sequences that both returned: for that to mean
anything, both need the same checkpoint and no catalog. Exit status 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from report import header, origin, quantile, save, table
from servers import machine, quiet, running_server, split_flags

DIALECTS = ("sglang", "fork", "n")
Tokens = tuple[int, ...]


class Answer(NamedTuple):
    """What a server said to one prompt: sequences best first, or why it said nothing."""

    latency_ms: float
    sequences: list[Tokens]
    scores: list[float]
    error: str | None = None


def sampling_params(dialect: str, width: int, tokens: int) -> dict[str, Any]:
    """`sampling_params` that ask for all beams of a width, without an early end."""
    asked: dict[str, dict[str, Any]] = {
        "sglang": {"beam_width": width, "n": width},
        "fork": {"use_beam_search": True, "n": width},
        "n": {"n": width, "temperature": 0.0},
    }
    return asked[dialect] | {"max_new_tokens": tokens, "ignore_eos": True}


async def ask(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], params: dict[str, Any]) -> Answer:
    """One request, and the beams of its answer."""
    body = {"input_ids": list(prompt), "sampling_params": params}
    started = time.perf_counter()
    try:
        async with session.post(f"{url.rstrip('/')}/generate", json=body) as response:
            content = await response.read()
        latency_ms = (time.perf_counter() - started) * 1e3
        if response.status != 200:
            return Answer(latency_ms, [], [], f"{response.status}: {content[:200].decode(errors='replace')}")
        beams = json.loads(content)["meta_info"]["beam_results"]
        sequences = [tuple(beam["output_ids"]) for beam in beams]
        return Answer(latency_ms, sequences, [beam["meta_info"]["sequence_score"] for beam in beams])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        return Answer((time.perf_counter() - started) * 1e3, [], [], f"{type(error).__name__}: {error}")


async def ask_all(
    url: str, prompts: Sequence[Sequence[int]], params: dict[str, Any], concurrency: int, timeout_s: float
) -> tuple[list[Answer], float]:
    """All prompts, so many at a time; the answers in order, and the seconds that they took together."""
    gate = asyncio.Semaphore(concurrency)
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:

        async def one(prompt: Sequence[int]) -> Answer:
            async with gate:
                return await ask(session, url, prompt, params)

        started = time.perf_counter()
        answers = await asyncio.gather(*map(one, prompts))
        return answers, time.perf_counter() - started


def overlap(one: Sequence[Tokens], other: Sequence[Tokens]) -> float:
    """Share of the sequences that both returned, of the larger list; 1 if both are empty."""
    most = max(len(one), len(other))
    return len(set(one) & set(other)) / most if most else 1.0


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Latency of what was answered, in ms, and how much that was."""
    good = [answer.latency_ms for answer in answers if answer.error is None]
    errors = [answer.error for answer in answers if answer.error is not None]
    return {
        "p50_ms": quantile(good, 0.5), "p90_ms": quantile(good, 0.9), "p99_ms": quantile(good, 0.99),
        "requests_per_s": len(good) / seconds, "answered": len(good), "errors": len(errors),
        "first_error": errors[0] if errors else None,
    }  # fmt: skip


def agreement(one: Sequence[Answer], other: Sequence[Answer]) -> dict[str, float] | None:
    """How alike the results of two servers are, over the prompts that both answered."""
    pairs = [(a.sequences, b.sequences) for a, b in zip(one, other, strict=True) if a.error is None and b.error is None]
    if not pairs:
        return None
    overlaps = [overlap(a, b) for a, b in pairs]
    return {
        "prompts": len(pairs), "top1": share([a[:1] == b[:1] for a, b in pairs]),
        "overlap": statistics.mean(overlaps), "overlap_min": min(overlaps),
        "exact_sets": share([set(a) == set(b) for a, b in pairs]),
    }  # fmt: skip


def share(true: Sequence[bool]) -> float:
    return sum(true) / len(true)


def load_prompts(arguments: argparse.Namespace) -> list[list[int]]:
    if arguments.prompts is not None:
        return json.loads(arguments.prompts.read_text())
    rng = np.random.default_rng(0)
    return rng.integers(0, arguments.vocab, (arguments.requests, arguments.context)).tolist()


@asynccontextmanager
async def both(arguments: argparse.Namespace) -> AsyncIterator[list[str]]:
    """The URLs of the two; one of our own ends with the block."""
    if arguments.checkpoint is None:
        yield arguments.urls
        return
    async with running_server(arguments.checkpoint, quiet(arguments.serve)) as server:
        yield [server.url, *arguments.urls]


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both servers, one after the other."""
    async with both(arguments) as urls:
        return await compare(arguments, urls)


async def compare(arguments: argparse.Namespace, urls: Sequence[str]) -> dict[str, Any]:
    prompts = load_prompts(arguments)
    servers, answers = [], []
    for url, dialect in zip(urls, arguments.dialects, strict=True):
        params = sampling_params(dialect, arguments.width, arguments.tokens)
        limits = (arguments.concurrency, arguments.timeout_s)
        others = [prompt[::-1] for prompt in prompts[: arguments.warm_up]]  # which no prefix cache takes for ours
        await ask_all(url, others, params, *limits)
        found, seconds = await ask_all(url, prompts, params, *limits)
        servers.append({"url": url, "dialect": dialect} | summary(found, seconds))
        answers.append(found)
    return {"servers": servers, "agreement": agreement(*answers)}


def markdown(report: dict[str, Any]) -> str:
    servers, alike = report["servers"], report["agreement"]
    blocks = [table(["", "first", "second"], [(key, *(server[key] for server in servers)) for key in servers[0]])]
    if alike is not None:
        blocks.append(table(["agreement", "value"], alike.items()))
    return "\n\n".join(blocks)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; what follows `--` is for `widebeam serve`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--checkpoint", help="start a server of it, as the first of the two")
    parser.add_argument("--dialects", nargs=2, choices=DIALECTS, default=["sglang", "sglang"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=50_000, help="prompts are drawn from token ids below this")
    parser.add_argument("--prompts", type=Path, help="JSON list of lists of token ids, instead of random ones")
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--save", type=Path, help="JSON file; its tables go beside it, as .md")
    own, serve = split_flags(argv)
    arguments = parser.parse_args(own, argparse.Namespace(serve=serve))
    wanted = 2 if arguments.checkpoint is None else 1
    if len(arguments.urls) != wanted:
        parser.error(f"{len(arguments.urls)} URLs, not {wanted}: two servers are compared, --checkpoint being one")
    if serve and arguments.checkpoint is None:
        parser.error("flags behind -- are for a server that is started: give --checkpoint")
    return arguments


if __name__ == "__main__":
    chosen = parse(sys.argv[1:])
    report = header(chosen) | asyncio.run(run(chosen))
    if chosen.checkpoint is not None:
        report["machine"] = machine()
    text = f"{origin(report)}\n\n{markdown(report)}"
    print(text)
    save(chosen.save, report, text)
    raise SystemExit(any(server["errors"] for server in report["servers"]))
