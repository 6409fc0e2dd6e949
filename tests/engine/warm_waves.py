"""Waves that warm-up is meant to have met, what tells one captured graph from another, and warm-up on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from widebeam.config import EngineConfig
from widebeam.constraints.catalog import Catalog
from widebeam.engine.compile import Made, compiled_programs
from widebeam.engine.job import Job
from widebeam.engine.runtime import Runtime
from widebeam.engine.scheduler import Load, WaveLimits
from widebeam.engine.search import prompt_groups
from widebeam.engine.shapes import COMMON_TOKENS, token_rung
from widebeam.engine.wave import Search, Wave
from widebeam.engine.widths import bound_widths, join_factor
from widebeam.model.config import load_model_config

Integers = Callable[[int, int], int]
"""Draws an integer between two, both possible."""


def make_runtime(checkpoint: Path, longest: int = 300, **fields: Any) -> Runtime:
    """On a CPU in float32, unless told otherwise."""
    fixed: dict[str, Any] = {"model": str(checkpoint), "device": "cpu", "dtype": "float32", "max_levels": 16}
    return Runtime(EngineConfig(**(fixed | fields)), checkpoint, load_model_config(checkpoint), longest)


def random_integers(seed: int) -> Integers:
    rng = np.random.default_rng(seed)
    return lambda low, high: int(rng.integers(low, high + 1))


def make_search(
    token_ids: Any,
    width: int | tuple[int, ...],
    num_returned: int | None = None,
    *,
    levels: int = 3,
    catalog: Catalog | None = None,
    stops: tuple[int, ...] = (),
    vocab_size: int = 1 << 30,
) -> Search:
    """A search of one width, or one a level, as admission makes it; not the greedy kind."""
    if isinstance(width, int):
        width = (width,) * (catalog.depth if catalog is not None else levels)
    widths = bound_widths(width, catalog, vocab_size)
    return Search(
        request_id="x", token_ids=np.asarray(token_ids, dtype=np.int32), widths=widths,
        num_returned=num_returned or widths[-1], catalog=catalog,
        normalizer="vocab" if catalog is None else "level", stop_token_ids=stops, length_penalty=1.0,
        join=join_factor(catalog, greedy=False, has_stops=bool(stops)),
    )  # fmt: skip


def draw_wave(
    integer: Integers,
    limits: WaveLimits,
    widest: int,
    vocab_size: int,
    longest_prompt: int,
    *,
    catalog: Catalog | None = None,
    stops: bool = False,
    most: int | None = None,
) -> list[Search]:
    """Searches of any widths and lengths that the scheduler would let share a wave.

    `stops`: they have stop tokens. `most`: at most so many.
    """
    searches: list[Search] = []
    load = Load()
    longest_prompt, widest = integer(1, longest_prompt), integer(1, min(widest, vocab_size))
    for _ in range(integer(1, min(limits.requests, most or limits.requests))):
        levels = catalog.depth if catalog is not None else integer(2, 8)
        widths = (integer(1, widest),) * levels if integer(0, 2) else tuple(integer(1, widest) for _ in range(levels))
        search = make_search(
            np.arange(integer(1, longest_prompt)) * 7919 % vocab_size, widths, catalog=catalog,
            stops=(1, 2) if stops else (), vocab_size=vocab_size,
        )  # fmt: skip
        search.num_returned = integer(1, search.widths[-1])
        heavier = load.plus(search, limits)
        if heavier.fits(limits):
            searches.append(search)
            load = heavier
        elif not searches:
            return []
    return searches


def graph_keys(searches: list[Search], limits: WaveLimits) -> set[Hashable]:
    """The graphs that a wave runs, each as all that its capture depends on: sizes, and integers that are no data.

    `Recorder` sees the same from inside; see test_graphs_are_told_apart.
    """
    wave = Wave(searches, limits.rows)
    keys: set[Hashable] = set()
    for group in prompt_groups(wave.searches):
        tokens = token_rung(sum(search.num_new for search in group.searches))
        if tokens <= COMMON_TOKENS:
            keys.add(("prompts", wave.requests, tokens))
    keys |= wave.graphs
    return keys


def keys_of_all(waves: Iterable[list[Search]], limits: WaveLimits) -> set[Hashable]:
    """The graphs that these waves run, cut to the most requests as the runtime cuts them."""
    return {key for searches in waves for key in graph_keys(searches[: limits.requests], limits)}


class Recorder:
    """Stands in for the compiler: traces as it would, and notes the integers by which graphs would be captured."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.captured: set[Hashable] = set()
        self.last: set[Hashable] = set()
        """Those of the calls since it was cleared."""

    def __call__(self, function: Any) -> Any:
        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            self.compiled.append(function.__name__)
            name = f"{function.__name__} {len(self.compiled)}"

            def run(*inputs: Any) -> Any:
                key = (name, *(value for value in inputs if isinstance(value, int)))
                self.captured.add(key)
                self.last.add(key)
                return graph.forward(*inputs)

            return run

        return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)

    def made_so_far(self, _: torch.device) -> Made:
        return Made(len(self.compiled), len(self.captured), 0)


def soak(runtime: Runtime, catalog: Catalog, requests: int, seed: int, vocab_size: int) -> int:
    """Run waves of random searches, with the catalog, without it, and with stop tokens; how many searches ran."""
    integer, done = random_integers(seed), 0
    widest, limits = runtime.config.max_beam_width, runtime.limits
    longest = min(limits.tokens, runtime._max_context_len)
    while done < requests:
        kind = integer(0, 2)
        searches = draw_wave(
            integer, limits, widest, vocab_size, longest, catalog=catalog if kind == 0 else None, stops=kind == 1,
            most=requests - done,
        )  # fmt: skip
        if not searches:  # the first one drawn was larger than any wave
            continue
        outcomes = runtime.run([Job(search, 0.0, None) for search in searches])
        for search, outcome in zip(searches, outcomes, strict=True):
            found = outcome.result.sequences  # type: ignore[union-attr]
            assert 0 < len(found) <= search.num_returned
            assert len({tuple(sequence.token_ids) for sequence in found}) == len(found)
            assert [s.score for s in found] == sorted((s.score for s in found), reverse=True)
        done += len(searches)
    runtime.check_integrity()
    return done


@contextmanager
def pretending(compiler: Any) -> Iterator[None]:
    """Runtimes on a CPU warm up as on a GPU, with what this makes of the functions that a GPU compiles."""
    with pytest.MonkeyPatch.context() as patch:
        compiles = property(lambda self: True, lambda self, value: None)
        patch.setattr(Runtime, "_compiles", compiles, raising=False)
        patch.setattr("widebeam.model.reference.TorchBackend.replayable", True)
        patch.setattr("widebeam.engine.runtime.compiled_programs", lambda core, _: compiled_programs(core, compiler))
        yield


def make_large(monkeypatch: pytest.MonkeyPatch, common: int, step: int) -> None:
    """Prompts of more than `common` tokens are large, and have graphs behind prefixes every `step`."""
    for module in ("shapes", "compile", "warmup", "captures"):
        monkeypatch.setattr(f"widebeam.engine.{module}.COMMON_TOKENS", common)
    for module in ("warmup", "core"):
        monkeypatch.setattr(f"widebeam.engine.{module}.LARGE_STEP", step)
