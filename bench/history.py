"""What the prefix cache is worth to returning users, and what it costs all others, on one device.

    python bench/history.py CHECKPOINT [--parts single replay cold] [--save FILE.json] [-- flags of widebeam serve]

Everything runs three times, each time in a process of its own: with the cache off, on, and on with --host-gib of host
memory behind it, unless that is 0. Prompts are random token ids.

    single   one request of --context tokens, of which --known have been computed before; what is behind them is new at
             each repeat. Beside it the same cold. From the host: after other users have filled the pool on the device.
    replay   a closed loop of returning users (returning.py), whose histories grow by 20 tokens a visit. `zipf`: ten
             times as many of them as fit the pool. `hits`: most visits are by a user who has been there before, and
             whose history is still there unless its beginning has moved, so that four of five hit.
    cold     prompts that nobody has sent before, while the pool is full of others: the cache must cost nothing.

Times are in milliseconds: those of `call` are the whole one, all others of single and cold the device's own, of which
the total begins with what is restored from the host. Aimed at
on an H200 with Qwen3-1.7B's shape and the defaults here: single 10.5 from the device (13 at most) and 20 from the host
(25), `hits` at least 2.5 times as fast as without the cache, cold within 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from historyreport import markdown
from offline import spread
from report import header, save
from returning import Histories, closed_loop, replay, visits_at_rate, zipf_visits
from servers import split_flags

from widebeam import Engine, EngineConfig, SearchParams
from widebeam.config import Config
from widebeam.errors import ConfigError
from widebeam.settings import parse as parse_settings

PARTS = ("single", "replay", "cold")
WARM_UP = 3
MORE_OFTEN = 3
"""Cold requests for each repeat of the others: a difference of 2 % is small."""
TIMES_THE_POOL = 10
"""Users of `zipf` for each that fits the pool; those of `hits` who come back fill half of it."""
SAVING_S = 0.2
"""Time to save prompts in the host's memory: the one in question, and then those that push it out."""

COUNTING_S = 0.05
"""Until a copy that is over is counted."""


class Bench:
    """A running engine and what it is asked. `fit`: see `measure`."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace, mode: str, fit: int | None) -> None:
        self.engine, self.arguments, self.mode = engine, arguments, mode
        free: dict[str, Any] = {"max_new_tokens": arguments.tokens, "ignore_eos": True}
        levels = free if engine.config.catalog is None else {}
        self.params = SearchParams(n=arguments.width, beam_width=arguments.width, **levels)
        self.fit = fit or engine.stats().context_pages // -(-arguments.context // engine.config.page_size)
        self._rng = np.random.default_rng(0)

    def prompts(self, length: int, known: list[int] | None = None) -> Iterator[list[int]]:
        """Of so many tokens, all different behind those that are known, without an end."""
        known = known or []
        while True:
            yield known + self._rng.integers(0, self.engine.model_config.vocab_size, length - len(known)).tolist()

    async def flood(self) -> None:
        """Fill the pool with prompts of others: whatever was cached before is evicted."""
        context, page_size = self.arguments.context, self.engine.config.page_size
        count = -(-self.engine.stats().context_pages // max(1, (context - 1) // page_size)) + 1
        prompts = itertools.islice(self.prompts(context), count)
        await closed_loop(self.engine, SearchParams(max_new_tokens=1, catalog="none"), prompts, 1)

    async def times(self, prompts: Iterator[list[int]], repeats: int, flooded: bool = False) -> dict[str, Any]:
        """Medians and 90th percentiles of one request at a time, in ms."""
        results, calls, restores = [], [], []
        for prompt in itertools.islice(prompts, WARM_UP + repeats):
            if flooded:
                await asyncio.sleep(SAVING_S)
                await self.flood()
                await asyncio.sleep(SAVING_S)
            before, sent = self.restoring_ms, time.perf_counter()
            results.append(await self.engine.submit(prompt, self.params))
            calls.append((time.perf_counter() - sent) * 1e3)
            await asyncio.sleep(COUNTING_S if flooded else 0)
            restores.append(self.restoring_ms - before)
        times = [result.timing_ms for result in results[WARM_UP:]]
        totals = [timing.prefill + timing.decode for timing in times]
        return {
            **spread("total_ms", "p90_ms", [sum(both) for both in zip(totals, restores[WARM_UP:], strict=True)]),
            **spread("restore_ms", "restore_p90_ms", restores[WARM_UP:]),
            **spread("prefill_ms", "prefill_p90_ms", [timing.prefill for timing in times]),
            **spread("levels_ms", "levels_p90_ms", [timing.decode for timing in times]),
            **spread("call_ms", "call_p90_ms", calls[WARM_UP:]),
            "cached_tokens": [result.cached_tokens for result in results[WARM_UP:]],
            "returned": len(results[-1].sequences),
        }

    @property
    def restoring_ms(self) -> float:
        """Time that copies from the host took, of those that are known to be over."""
        return self.engine.stats().prefix_transfer_seconds["to_device"] * 1e3

    async def single(self) -> dict[str, Any]:
        """By where the first tokens of the prompt are."""
        context, repeats = self.arguments.context, self.arguments.repeats
        found = {"nowhere": await self.times(self.prompts(context), repeats)}
        if self.mode != "off":
            returning = self.prompts(context, next(self.prompts(self.arguments.known)))
            found["device"] = await self.times(returning, repeats)
            if self.mode == "host":
                found["host"] = await self.times(returning, repeats, flooded=True)
        return found

    async def replay(self) -> dict[str, Any]:
        """Both replays, by name."""
        given, vocab_size = self.arguments, self.engine.model_config.vocab_size
        users = given.users or self.fit * TIMES_THE_POOL
        replays = {
            "zipf": zipf_visits(users, given.exponent, given.warm_up, given.visits),
            "hits": visits_at_rate(max(1, self.fit // 2), given.hit_rate, given.visits),
        }
        found = {}
        for name, visits in replays.items():
            histories = Histories(vocab_size, given.context, given.block or max(1, given.context // 4))
            found[name] = await replay(self.engine, self.params, visits, histories, given.concurrency)
        return found

    async def cold(self) -> dict[str, Any]:
        """Prompts that are nowhere, in a full pool."""
        await self.flood()
        return await self.times(self.prompts(self.arguments.context), MORE_OFTEN * self.arguments.repeats)

    def memory(self) -> dict[str, Any]:
        """The pool on the device and what is in it now, and what warm-up had not met of all that ran."""
        stats, page_size = self.engine.stats(), self.engine.config.page_size
        page_bytes = self.engine._runtime.core.context.page_bytes
        return {
            "pages": stats.context_pages, "page_tokens": page_size, "page_bytes": page_bytes,
            "token_bytes": page_bytes / page_size, "cached_pages": stats.prefix_cached_pages,
            "idle_pages": stats.prefix_idle_pages, "evicted_pages": stats.prefix_evicted_pages,
            "fallbacks": stats.fallbacks, "late_graphs": stats.late_graphs,
        }  # fmt: skip


def config_of(arguments: argparse.Namespace, mode: str) -> EngineConfig:
    """The engine's settings in one of the three modes."""
    flags = ["--max-context-len", str(arguments.context + 64), "--max-beam-width", str(max(64, arguments.width))]
    flags += [*arguments.serve, "--prefix-cache", "off" if mode == "off" else "on"]
    if mode == "host":
        flags += ["--prefix-cache-host-gib", str(arguments.host_gib)]
    config: EngineConfig = parse_settings(Config, [arguments.checkpoint, *flags], "history.py CHECKPOINT --").engine
    return config


def modes_of(arguments: argparse.Namespace) -> list[str]:
    return ["off", "on", "host"] if arguments.host_gib > 0 else ["off", "on"]


async def measure(arguments: argparse.Namespace, mode: str, fit: int | None) -> dict[str, Any]:
    """All parts in one mode. `fit`: for how many users the replay is made; None: those that fit this engine's pool."""
    found: dict[str, Any] = {}
    async with Engine(config_of(arguments, mode)) as engine:
        engine.freeze()  # as in `widebeam serve`
        bench = Bench(engine, arguments, mode, fit)
        found["users_that_fit"] = bench.fit
        for part in arguments.parts:
            started = time.perf_counter()
            found[part] = await getattr(bench, part)()
            print(f"{mode}, {part}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        await engine.check_integrity()
        found["memory"] = bench.memory()
    return found


Measured = Callable[[argparse.Namespace, str, int | None], dict[str, Any]]


def here(arguments: argparse.Namespace, mode: str, fit: int | None) -> dict[str, Any]:
    return asyncio.run(measure(arguments, mode, fit))


def apart(arguments: argparse.Namespace, mode: str, fit: int | None) -> dict[str, Any]:
    """By a process of its own, which leaves nothing on the device."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        return alone.submit(here, arguments, mode, fit).result()


def run(arguments: argparse.Namespace, measured: Measured = apart) -> dict[str, Any]:
    """All modes one after the other, and saved one after the other: each has the whole device. Replays are the same in
    all."""
    modes: dict[str, Any] = {}
    report = header(arguments) | {"modes": modes}
    for mode in modes_of(arguments):
        fit = modes["off"]["users_that_fit"] if modes else None
        modes[mode] = measured(arguments, mode, fit)
        save(arguments.save, report, markdown(report))
    return report


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; what follows `--` is for the engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--context", type=int, default=5000, help="tokens of a prompt; of the replay, at most")
    parser.add_argument("--known", type=int, default=4900, help="tokens of it that single has been asked before")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=3, help="without a catalog")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--host-gib", type=float, default=16.0)
    parser.add_argument("--concurrency", type=int, default=16, help="of the replays, as are all that follow")
    parser.add_argument("--visits", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=500, help="visits of zipf before those that count")
    parser.add_argument("--users", type=int, help="of zipf; by default ten times as many as fit the pool")
    parser.add_argument("--exponent", type=float, default=1.0, help="of their popularity")
    parser.add_argument("--hit-rate", type=float, default=0.82, help="of hits: visits by users who come back")
    parser.add_argument("--block", type=int, help="of anchored_history, in tokens; by default a quarter of --context")
    parser.add_argument("--save", type=Path, help="JSON file; its tables go beside it, as .md")
    own, serve = split_flags(argv)
    arguments = parser.parse_args(own, argparse.Namespace(serve=serve))
    if not 0 < arguments.known < arguments.context:
        parser.error(f"--known {arguments.known} is not between 0 and --context {arguments.context}")
    try:
        for mode in modes_of(arguments):
            config_of(arguments, mode)
    except ConfigError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    chosen = parse(sys.argv[1:])
    print(f"\n{markdown(run(chosen))}")
