"""Where the time of a wave goes: milliseconds by kind of kernel and by phase, and how long the device stood idle.

    python bench/breakdown.py CHECKPOINT --cases 5000x4 [--catalog FILE] [--enforce-eager] [--save FILE.json]

Takes the options of offline.py, runs the same waves under the PyTorch profiler after warming up, and shows the wave of
median length. A kernel belongs to the phase in which the host launched it (a whole graph to the phase of its launch):
prefill with level 0, the levels behind it, or collecting the result. `gaps` is the time within a phase, from the end of
the one before, in which no kernel ran. On a CPU PyTorch's operators stand for kernels.
"""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from offline import WARM_UP, options, prepare, run_wave
from report import header, origin, save, table
from torch.profiler import ProfilerActivity, profile, record_function

from widebeam.engine import search
from widebeam.engine.job import Job
from widebeam.engine.runtime import Runtime

KINDS = {
    "collectives": r"nccl|c10d|gloo",
    "attention": r"flashinfer|BatchPrefill|PrefillWith|MergeState|flash_|fmha|attention|sdpa",
    "GEMM": r"gemm|nvjet|xmma|splitK|cublas|cutlass|wgmma|_mm\b|::(mm|bmm|addmm|linear|matmul|add_product)\b"
    r"|triton_tem_",
    "selection": r"topk|top_k|sort|radix|segment|(?<![_:])select(?!_)|bitonic|argmax|cumsum|scan|searchsorted|nonzero"
    r"|logsumexp|log_softmax|candidate|column_best|^_(count|take|rank|columns|merge)$",
    "copies": r"memcpy|memset|direct_copy|copy_kernel|::copy_|CatArray|FillFunctor|::fill_|::zero_",
    "pointwise": r"triton_|elementwise|vectorized|reduce_kernel|norm|silu|rope|rotary|rotate|quant|index|gather|scatter"
    r"|merge_beams|at::native|aten::",
}
"""The first pattern found in a kernel's name decides its kind; a name without any is `other`."""
PHASES = ("prefill", "levels", "collect")
MARK = "widebeam::mark"
"""Recorded where the engine's clock reads the time: before prefill, before the levels, behind them."""
LONGEST_LISTED = 25


class Kernel(NamedTuple):
    """One kernel, copy or fill on the device, in microseconds."""

    name: str
    phase: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        return next((kind for kind, pattern in KINDS.items() if re.search(pattern, self.name, re.I)), "other")


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """What ran on the device, in order, from a Chrome trace; without a device, the operators that no other called."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = sorted(event["ts"] for event in events if event["name"] == MARK and event.get("cat") == "user_annotation")
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    ran = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")] or _outermost(
        events
    )
    kernels = []
    for event in ran:
        at = launched.get(event.get("args", {}).get("correlation"), event["ts"])
        phase = PHASES[min(max(bisect_right(marks, at) - 1, 0), 2)] if marks else "whole"
        kernels.append(Kernel(event["name"], phase, event["ts"], event["ts"] + event["dur"]))
    return sorted(kernels, key=lambda kernel: kernel.start)


def _outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operators on the host that no other operator called."""
    outer: list[dict[str, Any]] = []
    for event in sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["tid"], e["ts"], -e["dur"])):
        if not outer or outer[-1]["tid"] != event["tid"] or event["ts"] >= outer[-1]["ts"] + outer[-1]["dur"]:
            outer.append(event)
    return outer


def split(kernels: list[Kernel]) -> dict[str, dict[str, float]]:
    """Milliseconds by phase and kind. A gap counts for the phase of the kernel that ends it."""
    phases: dict[str, dict[str, float]] = {}
    busy_until = kernels[0].start
    for kernel in kernels:
        kinds = phases.setdefault(kernel.phase, dict.fromkeys([*KINDS, "other", "gaps", "span"], 0.0))
        kinds[kernel.kind] += (kernel.end - kernel.start) / 1e3
        kinds["gaps"] += max(0.0, kernel.start - busy_until) / 1e3
        kinds["span"] += max(0.0, kernel.end - busy_until) / 1e3
        busy_until = max(busy_until, kernel.end)
    return phases


def longest(kernels: list[Kernel]) -> list[tuple[str, str, int, float]]:
    """(kind, name, launches, milliseconds in all) of the kernels that took the most."""
    times: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel)
    sums = [
        (same[0].kind, name, len(same), sum(kernel.end - kernel.start for kernel in same) / 1e3)
        for name, same in times.items()
    ]
    return sorted(sums, key=lambda row: -row[3])[:LONGEST_LISTED]


@contextmanager
def marked_clock() -> Iterator[None]:
    """Show in the trace where the engine's clock reads the time."""
    plain = search.Clock.mark

    def mark(self: search.Clock) -> None:
        with record_function(MARK):
            plain(self)

    with patch.object(search.Clock, "mark", mark):
        yield


def traced(runtime: Runtime, jobs: list[Job]) -> list[Kernel]:
    """The kernels of one wave."""
    activities = [ProfilerActivity.CPU]
    if runtime.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with marked_clock(), profile(activities=activities) as profiler:
        run_wave(runtime, jobs)
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text(errors="replace")))


def breakdown(runtime: Runtime, jobs: list[Job], repeats: int) -> dict[str, Any]:
    """The wave of median length among `repeats`: its parts, and its longest kernels."""
    for _ in range(WARM_UP):
        run_wave(runtime, jobs)
    waves = sorted(
        (traced(runtime, jobs) for _ in range(repeats)), key=lambda kernels: kernels[-1].end - kernels[0].start
    )
    kernels = waves[len(waves) // 2]
    phases = split(kernels)
    span = sum(kinds["span"] for kinds in phases.values())
    after = [kinds for phase, kinds in phases.items() if phase != "prefill"]
    return {
        "phases": phases,
        "span_ms": span,
        "idle": sum(kinds["gaps"] for kinds in phases.values()) / span,
        "idle_after_prefill": sum(kinds["gaps"] for kinds in after) / max(1e-9, sum(kinds["span"] for kinds in after)),
        "kernels": longest(kernels),
    }


def markdown(cases: dict[str, dict[str, Any]]) -> str:
    """A table of phases and one of kernels for each case."""
    blocks = []
    for name, found in cases.items():
        rows = [(phase, *kinds.values()) for phase, kinds in found["phases"].items()]
        blocks += [
            f"{name}, ms under the profiler (idle: {found['idle']:.1%} of the wave, "
            f"{found['idle_after_prefill']:.1%} of what follows prefill)\n",
            table(["phase", *KINDS, "other", "gaps", "span"], rows),
            "",
            table(
                ["kind", "kernel", "launches", "ms"],
                [(k, n[:90].replace("|", "/"), c, ms) for k, n, c, ms in found["kernels"]],
            ),
            "",
        ]
    return "\n".join(blocks)


if __name__ == "__main__":
    chosen = options(__doc__).parse_args()
    bench = prepare(chosen)
    cases = {name: breakdown(bench.runtime, jobs, min(5, chosen.repeats)) for name, (_, jobs) in bench.waves.items()}
    report = header(chosen) | {"cases": cases}
    text = f"{origin(report)}\n\n{markdown(cases)}"
    print(text)
    save(chosen.save, report, text)
