"""Whole searches without a server: milliseconds of prefill and levels for a matrix of cases, on one device.

    python bench/offline.py CHECKPOINT --cases 1000x1 5000x1 5000x4 --width 256 --tokens 3 [--catalog FILE] [--compile]

A case is CONTEXTxREQUESTS: prompts of that length, prefilled together and searched as one wave, token ids from a fixed
seed. Without a catalog every token is legal and scores are normalised over the vocabulary; with one, over the level.
Times are the device's own (CUDA events); the first waves of a case, which compile, are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from widebeam.config import EngineConfig
from widebeam.constraints.catalog import Catalog
from widebeam.engine.request import SearchResult
from widebeam.engine.runtime import Runtime
from widebeam.engine.scheduler import Job
from widebeam.engine.wave import Search, bound_widths, join_factor
from widebeam.model.config import load_model_config

WARM_UP = 3


def make_jobs(arguments: argparse.Namespace, case: str, catalog: Catalog | None, vocab_size: int) -> list[Job]:
    """The requests of one wave."""
    context, requests = map(int, case.split("x"))
    rng = np.random.default_rng(0)
    levels = arguments.tokens if catalog is None else catalog.depth
    return [
        Job(
            Search(
                request_id=f"{case}-{b}",
                token_ids=rng.integers(0, vocab_size, context).astype(np.int32),
                widths=bound_widths((arguments.width,) * levels, catalog, vocab_size),
                num_returned=arguments.width,
                catalog=catalog,
                normalizer="vocab" if catalog is None else "level",
                join=join_factor(catalog, greedy=False, has_stops=False),
                stop_token_ids=(),
                length_penalty=1.0,
            ),
            submitted_at=time.monotonic(),
            deadline=None,
        )
        for b in range(requests)
    ]


def measure(runtime: Runtime, jobs: list[Job], repeats: int) -> dict[str, Any]:
    """Medians and the 90th percentile over waves of the same jobs."""
    started = time.perf_counter()
    for _ in range(WARM_UP):
        runtime.run(jobs)
    first_s = time.perf_counter() - started
    times = []
    for _ in range(repeats):
        result = runtime.run(jobs)[0].result
        assert isinstance(result, SearchResult)
        times.append((result.timing_ms.prefill + result.timing_ms.decode, result.timing_ms.prefill))
    totals = sorted(total for total, _ in times)
    prefill = statistics.median(prefill for _, prefill in times)
    total = statistics.median(totals)
    return {
        "total_ms": total, "p90_ms": totals[int(0.9 * len(totals))], "prefill_ms": prefill,
        "levels_ms": total - prefill, "warm_up_s": first_s, "returned": len(result.sequences),
    }  # fmt: skip


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases on one runtime."""
    folder = Path(arguments.checkpoint)
    longest = max(int(case.split("x")[0]) for case in arguments.cases) + 64
    tokens = max(int(context) * int(requests) for context, requests in (case.split("x") for case in arguments.cases))
    config = EngineConfig(
        model=str(folder), max_context_len=longest, max_wave_tokens=tokens, max_levels=16,
        max_beam_width=max(arguments.width, 64), enforce_eager=not arguments.compile,
        attention_backend=arguments.attention_backend,
    )  # fmt: skip
    model = load_model_config(folder)
    runtime = Runtime(config, folder, model, longest)
    catalog = Catalog.load(arguments.catalog, vocab_size=model.vocab_size) if arguments.catalog else None
    if catalog is not None:
        runtime.add_catalog(catalog)
    cases = {}
    for case in arguments.cases:
        cases[case] = measure(runtime, make_jobs(arguments, case, catalog, model.vocab_size), arguments.repeats)
        print(case, " ".join(f"{name} {value:.1f}" for name, value in cases[case].items()), flush=True)
    runtime.check_integrity()
    device = torch.cuda.get_device_name() if runtime.device.type == "cuda" else "CPU"
    return {
        "date": date.today().isoformat(), "machine": f"{device}, torch {torch.__version__}, {runtime.dtype}",
        "arguments": {name: str(value) for name, value in vars(arguments).items() if name != "save"}, "cases": cases,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if runtime.device.type == "cuda" else None,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--cases", nargs="+", default=["1000x1", "1000x4", "5000x1", "5000x4"])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--catalog", type=Path)
    parser.add_argument("--compile", action="store_true", help="compiled functions and graphs (GPU only)")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--save", type=Path)
    chosen = parser.parse_args()
    report = run(chosen)
    if chosen.save:
        chosen.save.write_text(json.dumps(report, indent=2) + "\n")
