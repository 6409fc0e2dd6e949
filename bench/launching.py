"""What it costs the host to launch a wave: milliseconds of the GPU thread, in all and by part.

    python bench/launching.py CHECKPOINT --cases 1000x4 [--catalog FILE] [--save FILE.json]

Takes the options of offline.py. Waves run one at a time, and each is waited for: as in a server, code that launches ran
a wave ago and has left the processor's caches. Garbage is looked at as in `widebeam serve`. Parts are timed in waves of
their own, since that costs time, too; each counts without the parts within it. On a CPU to launch a wave is to run it.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

from offline import Bench, options, prepare, run_wave, spread
from report import header, origin, save, table

from widebeam import Engine
from widebeam.engine import runtime as runtime_module
from widebeam.engine import search as search_module
from widebeam.engine.job import Job
from widebeam.engine.runtime import Runtime
from widebeam.engine.staging import HostCopy, Places

WARM_UP = 6
PARTS: dict[str, list[tuple[Any, str]]] = {
    "wave": [(runtime_module, "Wave"), (runtime_module, "acquire"), (runtime_module, "release")],
    "arrays": [(search_module, "prompt_arrays"), (search_module, "wave_data"), (search_module, "send_masks")],
    "copies": [(Places, "put"), (Places, "copy"), (HostCopy, "__init__")],
}
"""Functions by what they are for. Beside them plans, and replays of graphs: the device's functions."""


class Timer:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner: list[float] = []
        """Of each call that goes on, the time of calls within it."""

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                whole = time.perf_counter() - started
                self.seconds[part] += whole - self._inner.pop()
                if self._inner:
                    self._inner[-1] += whole

        return call

    @contextmanager
    def of(self, runtime: Runtime) -> Iterator[None]:
        """Within it all parts are timed."""
        programs = runtime.core.programs
        functions = {field.name: getattr(programs, field.name) for field in fields(programs)}
        timed = {name: self.timed("replays", one) for name, one in functions.items() if callable(one)}
        plans = {type(plan) for plan in runtime.core.plans.made}
        with ExitStack() as stack:
            for part, places in (PARTS | {"plans": [(kind, "plan") for kind in plans]}).items():
                for owner, name in places:
                    stack.enter_context(patch.object(owner, name, self.timed(part, getattr(owner, name))))
            stack.enter_context(patch.object(runtime.core, "programs", replace(programs, **timed)))
            yield


def launches(runtime: Runtime, jobs: list[Job], repeats: int) -> list[float]:
    """Milliseconds of each launch."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        flight = runtime.launch(jobs)
        times.append((time.perf_counter() - started) * 1e3)
        flight.outcomes()
    return times


def measure(bench: Bench, jobs: list[Job], repeats: int) -> dict[str, Any]:
    """Of one case: the launch as it is, and its parts, which add up to a launch with timers."""
    for _ in range(WARM_UP):
        run_wave(bench.runtime, jobs)
    Engine.freeze()
    whole, timer = launches(bench.runtime, jobs, repeats), Timer()
    with timer.of(bench.runtime):
        split = launches(bench.runtime, jobs, repeats)
    parts = {part: timer.seconds[part] * 1e3 / repeats for part in [*PARTS, "plans", "replays"]}
    parts["other"] = sum(split) / repeats - sum(parts.values())
    return {**spread("launch_ms", "p90_ms", whole), "least_ms": min(whole), "parts": parts}


def markdown(report: dict[str, Any]) -> str:
    """One row for each case."""
    rows = [
        (name, found["launch_ms"], found["p90_ms"], found["least_ms"], *found["parts"].values())
        for name, found in report["cases"].items()
    ]
    columns = [*PARTS, "plans", "replays", "other"]
    return (
        f"{origin(report)} Milliseconds of the host a wave; parts are "
        f"means of waves with timers.\n\n{table(['case', 'launch', 'p90', 'least', *columns], rows)}"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    bench = prepare(arguments)
    cases = {name: measure(bench, jobs, arguments.repeats) for name, (_, jobs) in bench.waves.items()}
    return header(arguments) | {"fallbacks": bench.runtime.fallbacks, "cases": cases}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.set_defaults(cases=["1000x4"], repeats=41)
    chosen = parser.parse_args()
    report = run(chosen)
    print(markdown(report))
    save(chosen.save, report, markdown(report))
