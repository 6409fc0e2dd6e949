"""How long work takes on this machine, by itself or right behind other work.

Many launches of it run in one CUDA graph, over buffers that together exceed the cache, on random data, so that neither
launching nor a warm cache flatters it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import ParamSpec

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
REPEATS = 11 if CUDA else 1
REPEATS_BEHIND = 5
COLD_BYTES = (256 << 20) if CUDA else 0
"""Distinct buffers in turn hold so much, several times an L2 cache, as the weights and pages of all layers do."""
GRAPH_MS, MOST_LAUNCHES = 1.0, 256
"""A graph lasts about so long, so that its own start does not count."""
Call = Callable[[], object]
_before: Call | None = None
"""What runs before each timing."""
P = ParamSpec("P")


@contextmanager
def behind(work: Call) -> Iterator[None]:
    """Within this every timing begins right behind that work: at its power limit a GPU runs at a lower clock, and still
    does for a while."""
    global _before
    _before, kept = work, _before
    try:
        yield
    finally:
        _before = kept


def remembered(function: Callable[P, float]) -> Callable[P, float]:
    """Measure once for each size, and for what runs before."""
    known: dict[Hashable, float] = {}

    @wraps(function)
    def once(*sizes: P.args, **named: P.kwargs) -> float:
        key = (_before, sizes)
        if key not in known:
            known[key] = function(*sizes, **named)
        return known[key]

    return once


def launch_ms(calls: Sequence[Call]) -> float:
    """Median milliseconds of a launch; `calls` are the same work on different buffers."""
    if not CUDA:
        return statistics.median(_host_ms(calls) for _ in range(REPEATS)) / len(calls)
    for call in calls:
        call()
    torch.cuda.synchronize()
    launches = len(calls)
    while True:
        ms = _graph_ms(list(itertools.islice(itertools.cycle(calls), launches)))
        if ms >= GRAPH_MS / 2 or launches >= MOST_LAUNCHES:
            return ms / launches
        launches = min(MOST_LAUNCHES, int(launches * GRAPH_MS / ms) + 1)


def _host_ms(calls: Sequence[Call]) -> float:
    if _before is not None:
        _before()
    started = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - started) * 1e3


def _graph_ms(calls: Sequence[Call]) -> float:
    """Median milliseconds of one replay of all calls."""
    replay = graph_of(calls)
    times = []
    for _ in range(3 + (REPEATS if _before is None else REPEATS_BEHIND)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if _before is not None:
            _before()
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def graph_of(calls: Sequence[Call]) -> Call:
    """What replays all calls as one graph. It holds them too: a graph does not keep what it reads."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return partial(_replay, graph, tuple(calls))


def _replay(graph: torch.cuda.CUDAGraph, _held: Sequence[Call]) -> None:
    graph.replay()


def distinct(nbytes: int) -> int:
    """How many buffers of a size are used in turn."""
    return max(1, min(64, COLD_BYTES // nbytes + 1))
