"""Shorter waves pass a long one between its pieces, and neither's results change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.warm_waves import make_runtime, make_search
from widebeam.constraints.catalog import Catalog
from widebeam.engine.job import Job
from widebeam.engine.request import Sampling, SearchResult
from widebeam.engine.runtime import Runtime
from widebeam.engine.search import ALONE, PIECE, Between
from widebeam.engine.wave import Search
from widebeam.model.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def runtime(checkpoint: Path) -> Runtime:
    return make_runtime(checkpoint, max_levels=64, max_wave_rows=128, max_beam_width=64, beam_kv_tokens=6000)


@pytest.fixture(scope="module")
def catalog(checkpoint: Path, catalog_file: Path, runtime: Runtime) -> Catalog:
    catalog = Catalog.load(catalog_file, token_id=Tokenizer(checkpoint).token_id)
    runtime.add_catalog(catalog)
    return catalog


def results(runtime: Runtime, searches: list[Search], between: Between = ALONE) -> list[SearchResult]:
    flight = runtime.launch(
        [Job(replace(search, lease=None), 0.0, None) for search in searches], between=between or Between()
    )
    found = [outcome.result for outcome in flight.outcomes()]
    assert all(isinstance(result, SearchResult) for result in found)
    return found  # type: ignore[return-value]


def prompt(seed: int, tokens: int = 30) -> Any:
    return np.random.default_rng(seed).integers(0, 60, tokens)


LONG: dict[str, list[Search]] = {
    "beams": [make_search(prompt(0), 7, 5, levels=40), make_search(prompt(1), 3, 3, levels=25)],
    "stops": [make_search(prompt(2), 9, 9, levels=33, stops=(3, 4, 5)), make_search(prompt(3), 4, 4, levels=20)],
    "traced": [replace(make_search(prompt(4), 6, 4, levels=20), top_logprobs=3, return_beam_details=True)],
    "drawn": [
        replace(make_search(prompt(seed), 4, 4, levels=30), sampling=Sampling(seed=seed, frequency_penalty=1.0))
        for seed in range(3)
    ],
}


@pytest.mark.parametrize("kind", LONG)
def test_nobody_notices(runtime: Runtime, catalog: Catalog, kind: str) -> None:
    """At every boundary another wave: over a catalog, wider than the long one, drawn, and none at all."""
    others = [
        [make_search(prompt(10), 12, catalog=catalog), make_search(prompt(11, 70), 50, catalog=catalog)],
        [make_search(prompt(12), 60, 60, levels=8, stops=(6, 7)), make_search(prompt(13), 60, 60, levels=8)],
        [replace(make_search(prompt(14), 9, 9, levels=6), sampling=Sampling(seed=5))],
    ]
    alone = results(runtime, LONG[kind])
    expected = [results(runtime, searches) for searches in others]
    passed: list[list[SearchResult]] = []
    boundaries = 0

    def others_wait() -> bool:
        nonlocal boundaries
        boundaries += 1
        return boundaries % 4 != 0

    def run_others() -> None:
        passed.append(results(runtime, others[len(passed) % 3]))

    disturbed = results(runtime, LONG[kind], Between(others_wait=others_wait, run_others=run_others))
    assert len(passed) >= (max(search.levels for search in LONG[kind]) - 1) // PIECE - 1 > 0
    for before, after in zip(alone, disturbed, strict=True):
        assert (after.sequences, after.levels) == (before.sequences, before.levels)
    for place, found in enumerate(passed):
        assert [r.sequences for r in found] == [r.sequences for r in expected[place % 3]]
    runtime.check_integrity()


def test_a_passing_wave_finds_the_long_ones_pages_taken(runtime: Runtime) -> None:
    held: list[tuple[int, int]] = []

    def run_others() -> None:
        held.append((runtime.core.context.pages_used, runtime.core.beams.used))

    results(runtime, LONG["beams"], Between(others_wait=lambda: True, run_others=run_others))
    assert len(held) == 4 and all(pages > 0 and slots > 0 for pages, slots in held)
    runtime.check_integrity()
