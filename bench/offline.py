"""Whole searches without a server: milliseconds of prefill and levels for a matrix of cases, on one device.

    python bench/offline.py CHECKPOINT --cases 1000x1 5000x4 5000x4x512 [--catalog FILE] [--save FILE.json]
    python bench/offline.py CHECKPOINT --matrix --floor [--quantization fp8] --save FILE.json
    python bench/offline.py CHECKPOINT --cases 1000x4 --policy '{"name": "fixed"}' '{"name": "diverse", "cap": 4}'

A case is CONTEXTxREQUESTS[xWIDTH[xTOKENS]]: prompts of that length, prefilled together and searched as one wave, token
ids from a fixed seed. Without a catalog every token is legal and scores are normalised over the vocabulary; with one,
over the level, and its depth is the number of tokens. Times are the device's own (CUDA events); the first waves of a
case, which compile, are left out. `--matrix` takes the cases that this project holds itself to (matrix.py); `--floor`
measures beside each case what this machine could do at best (floor.py). With --save, a markdown table lies beside the
JSON.
"""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from floor import floor
from matrix import Case, cases_of, markdown, name_of
from report import header, quantile, save

from widebeam.config import EngineConfig
from widebeam.constraints.arena import device_bytes
from widebeam.constraints.catalog import Catalog
from widebeam.engine.job import Job
from widebeam.engine.ranks import Ranks
from widebeam.engine.request import SearchResult
from widebeam.engine.runtime import Runtime
from widebeam.engine.spawn import Followers
from widebeam.engine.startup import choose_device
from widebeam.engine.wave import Search, Wave
from widebeam.engine.widths import bound_widths, join_factor
from widebeam.errors import OutOfMemory
from widebeam.model.config import ModelConfig, load_model_config
from widebeam.plan.work import Shape
from widebeam.policies import PolicySpec, level_plan

WARM_UP = 3
LEAST_ROWS = 8192
LARGEST_PAGE = 256
LEAST_FILTER_GIB = 1 / 64
"""One mask over 80 million items; no case has filters."""


class Bench(NamedTuple):
    """A runtime, and the waves to run on it by the names of their cases."""

    runtime: Runtime
    shape: Shape
    codes: int | None
    """Size of the catalog's codebooks, if there is one."""
    waves: dict[str, tuple[Case, list[Job]]]


def make_jobs(case: Case, catalog: Catalog | None, vocab_size: int, policy: PolicySpec | None = None) -> list[Job]:
    """The requests of one wave."""
    rng = np.random.default_rng(0)
    plan = level_plan(policy, case.tokens, case.width)
    widths = bound_widths(plan.widths, catalog, vocab_size, plan.cap)
    return [
        Job(
            Search(
                request_id=f"{case.context}-{b}",
                token_ids=rng.integers(0, vocab_size, case.context).astype(np.int32),
                widths=widths,
                num_returned=widths[-1],
                catalog=catalog,
                normalizer="vocab" if catalog is None else "level",
                join=join_factor(catalog, greedy=False, has_stops=False),
                stop_token_ids=(),
                length_penalty=1.0,
                plan=None if plan.only_widths else plan,
            ),
            submitted_at=time.monotonic(),
            deadline=None,
        )
        for b in range(case.requests)
    ]


def prepare(arguments: argparse.Namespace) -> Bench:
    """The runtime and the waves that the options ask for."""
    folder = Path(arguments.checkpoint)
    model = load_model_config(folder)
    shape = Shape.of(model)
    catalog = Catalog.load(arguments.catalog, vocab_size=model.vocab_size) if arguments.catalog else None
    waves = {}
    for name in cases_of(shape) if arguments.matrix else arguments.cases:
        case = Case.parse(name, arguments.width, arguments.tokens)
        case = case if catalog is None else case._replace(tokens=catalog.depth)
        for policy in arguments.policy or [None]:
            wave = name if policy is None else f"{name} {policy.name}"
            alike = case._replace(width=max(policy.widths)) if policy is not None and policy.widths else case
            waves[wave] = (alike, make_jobs(alike, catalog, model.vocab_size, policy))
    runtime = make_runtime(arguments, folder, model, waves, 0 if catalog is None else device_bytes(catalog))
    if catalog is not None:
        runtime.add_catalog(catalog)
    codes = max(map(len, catalog.level_token_ids)) if catalog is not None else None
    return Bench(runtime, shape, codes, waves)


def make_runtime(
    arguments: argparse.Namespace,
    folder: Path,
    model: ModelConfig,
    waves: dict[str, tuple[Case, list[Job]]],
    catalog_bytes: int,
) -> Runtime:
    """A runtime whose pools hold what the waves need and little more, so that peak memory says something."""
    cases = [case for case, _ in waves.values()]
    longest = max(case.context + case.tokens for case in cases) + 64
    rows = max(LEAST_ROWS, *(case.requests * case.width for case in cases))
    optional: dict[str, Any] = {}
    if arguments.quantization is not None:
        optional["quantization"] = arguments.quantization
    config = EngineConfig(
        model=str(folder),
        dtype=arguments.dtype,
        attention_backend=arguments.attention_backend,
        enforce_eager=arguments.enforce_eager,
        warmup="none",  # each case warms up its own shapes
        max_context_len=longest,
        max_beam_width=max(64, *(case.width for case in cases)),
        max_levels=max(16, *(case.tokens for case in cases)),
        max_wave_requests=max(16, *(case.requests for case in cases)),
        max_wave_tokens=max(case.context * case.requests for case in cases),
        max_wave_rows=rows,
        catalog_memory_gib=catalog_bytes / 2**30,
        filter_memory_gib=LEAST_FILTER_GIB,
        max_total_tokens=max(case.requests * (case.context + LARGEST_PAGE) for case in cases) + longest,
        beam_kv_tokens=max(1, *(Wave([job.search for job in jobs], rows).beam_slots for _, jobs in waves.values())),
        tensor_parallel_size=arguments.tensor_parallel_size,
        **optional,
    )
    return Runtime(config, folder, model, longest, other_ranks(config, folder))


def other_ranks(config: EngineConfig, folder: Path) -> Ranks | None:
    """Those that run the model together with this process, for as long as it lives; it ends with any of them."""
    if config.tensor_parallel_size == 1:
        return None
    followers = Followers(config, folder, lambda _: os._exit(os.EX_SOFTWARE))
    followers.start()
    atexit.register(end_with, followers)
    return Ranks(followers.place, config, choose_device(config.device).type == "cuda")


def end_with(followers: Followers) -> None:
    """End all ranks; this process at once, as NCCL may hold up the interpreter's own end for ever."""
    followers.close()
    sys.stdout.flush()
    os._exit(int(hasattr(sys, "last_value")))  # which an error has set


def run_wave(runtime: Runtime, jobs: list[Job]) -> SearchResult:
    """One wave; the first request's result."""
    result = runtime.run(jobs)[0].result
    if not isinstance(result, SearchResult):
        raise result
    return result


def measure(runtime: Runtime, jobs: list[Job], repeats: int) -> dict[str, Any]:
    """Medians and 90th percentiles over waves of the same jobs, in ms, and what the runtime counted meanwhile."""
    fallbacks, cuda = runtime.fallbacks, runtime.device.type == "cuda"
    started = time.perf_counter()
    for _ in range(WARM_UP):
        run_wave(runtime, jobs)
    warm_up_s = time.perf_counter() - started
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times, host = [], []
    with count_replays() as replays:
        for _ in range(repeats):
            started = time.perf_counter()
            result = run_wave(runtime, jobs)
            host.append((time.perf_counter() - started) * 1e3)
            times.append(result.timing_ms)
    return {
        **spread("total_ms", "p90_ms", [timing.prefill + timing.decode for timing in times]),
        **spread("prefill_ms", "prefill_p90_ms", [timing.prefill for timing in times]),
        **spread("levels_ms", "levels_p90_ms", [timing.decode for timing in times]),
        "host_ms": statistics.median(host),
        "warm_up_s": warm_up_s,
        "returned": len(result.sequences),
        "fallbacks": runtime.fallbacks - fallbacks,
        "replays": len(replays) / repeats,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }


@contextmanager
def count_replays() -> Iterator[list[None]]:
    """A list that gets an element for each graph that is replayed."""
    replays: list[None] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(None)
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", counted):
        yield replays


def spread(median: str, p90: str, times: list[float]) -> dict[str, float | None]:
    return {median: statistics.median(times), p90: quantile(times, 0.9)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases on one runtime. A case for which memory does not suffice says so and stops no other."""
    bench = prepare(arguments)
    cases: dict[str, dict[str, Any]] = {}
    for name, (_, jobs) in bench.waves.items():
        try:
            cases[name] = measure(bench.runtime, jobs, arguments.repeats)
        except (torch.OutOfMemoryError, OutOfMemory):
            cases[name] = {"error": "out of memory"}
        shown = " ".join(f"{key} {value:.4g}" for key, value in cases[name].items() if isinstance(value, float))
        print(name, shown or "out of memory", flush=True)
    bench.runtime.check_integrity()
    if arguments.floor:
        add_floors(cases, bench, fp8=arguments.quantization == "fp8")
    return header(arguments) | {
        "shape": name_of(bench.shape),
        "dtype": str(bench.runtime.dtype).removeprefix("torch."),
        "fallbacks": bench.runtime.fallbacks,
        "cases": cases,
    }


def add_floors(cases: dict[str, dict[str, Any]], bench: Bench, *, fp8: bool) -> None:
    """Beside each case that was measured. By a process of its own, in which cuBLAS has the work space that it asks for
    and the runtime here does without."""
    as_it_asks = partial(os.unsetenv, "CUBLAS_WORKSPACE_CONFIG")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=as_it_asks) as alone:
        for name, found in cases.items():
            if "total_ms" in found:
                case, _ = bench.waves[name]
                best = alone.submit(floor, case, bench.shape, fp8=fp8, codes=bench.codes).result()
                found |= {"floor": best, "over_floor": found["total_ms"] / best["total_ms"]}


def policy(text: str) -> PolicySpec:
    """As a request has it, in JSON."""
    return msgspec.json.decode(text, type=PolicySpec)


def options(doc: str | None) -> argparse.ArgumentParser:
    """What every benchmark of a runtime can be told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--cases", nargs="+", default=["1000x1", "1000x4", "5000x1", "5000x4"])
    parser.add_argument("--matrix", action="store_true", help="the cases kept for the checkpoint's shape")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--catalog", type=Path)
    parser.add_argument(
        "--policy", nargs="+", metavar="JSON", type=policy,
        help='each case by each of these, as in a request: \'{"name": "diverse", "cap": 4}\'',
    )  # fmt: skip
    parser.add_argument("--enforce-eager", action="store_true", help="neither compiled functions nor graphs")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", help="as in `widebeam serve`, such as fp8")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that run the model together")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--save", type=Path, help="JSON file; its table goes beside it, as .md")
    return parser


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--floor", action="store_true", help="measure what the machine could do at best, too")
    chosen = parser.parse_args()
    report = run(chosen)
    print(f"\n{markdown(report)}")
    save(chosen.save, report, markdown(report))
