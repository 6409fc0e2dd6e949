"""A whole level is one graph: forward, head, normaliser, legality, selection, re-pathing; no break, no read-back.

So is prefill with level 0, whose prompts may be padded to a rung.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from widebeam.config import EngineConfig
from widebeam.constraints.arena import CatalogArena
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filters import ItemMask
from widebeam.engine import search as search_module
from widebeam.engine.compile import EAGER, compiled_programs
from widebeam.engine.core import Programs
from widebeam.engine.job import Job
from widebeam.engine.pool_sizes import PoolSizes
from widebeam.engine.runtime import Runtime
from widebeam.engine.staging import Places
from widebeam.engine.wave import Search, narrowed
from widebeam.engine.widths import bound_widths, join_factor
from widebeam.model.config import load_model_config
from widebeam.model.tokenizer import Tokenizer
from widebeam.policies import LevelPlan

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.usefixtures("one_thread")


def make_runtime(checkpoint: Path, device: str, **settings: Any) -> Runtime:
    fixed = {
        "max_wave_rows": 256,
        "max_beam_width": 64,
        "max_levels": 32,
        "max_wave_tokens": 512,
        "max_total_tokens": 1024,
    }
    config = EngineConfig(**({"model": str(checkpoint), "device": device, "dtype": "float32"} | fixed | settings))
    return Runtime(config, checkpoint, load_model_config(checkpoint), 512)


def make_jobs(catalog: Catalog | None, normalizer: Any, stops: tuple[int, ...]) -> list[Job]:
    jobs = []
    for seed, widths in ((0, (5, 9, 4)), (1, (16, 16, 16))):
        tokens = np.random.default_rng(seed).integers(0, 50, 20 + 30 * seed).astype(np.int32)
        search = Search(
            request_id=str(seed), token_ids=tokens, widths=bound_widths(widths, catalog, 64), num_returned=4,
            catalog=catalog, normalizer=normalizer, stop_token_ids=stops, length_penalty=1.0,
            join=join_factor(catalog, greedy=False, has_stops=bool(stops)),
        )  # fmt: skip
        jobs.append(Job(search, 0.0, None))
    return jobs


@pytest.fixture(scope="module", params=DEVICES)
def traced(request: pytest.FixtureRequest, checkpoint: Path, catalog_file: Path) -> tuple[Runtime, Catalog, Programs]:
    """A runtime, and its functions as the compiler traces them; what is traced serves all tests."""
    runtime = make_runtime(checkpoint, request.param)
    catalog = Catalog.load(catalog_file, token_id=Tokenizer(checkpoint).token_id)
    runtime.add_catalog(catalog)
    torch._dynamo.reset()

    def trace(function: Any) -> Any:
        return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")

    return runtime, catalog, compiled_programs(runtime.core, trace)


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize(
    ("constrained", "normalizer", "stops"),
    [(True, "level", ()), (True, "legal", ()), (True, "vocab", ()), (False, "vocab", ()), (False, "vocab", (2, 20))],
)
def test_a_level_traces_whole_and_gives_the_same(
    traced: tuple[Runtime, Catalog, Programs], padded: bool, constrained: bool, normalizer: Any,
    stops: tuple[int, ...],
) -> None:  # fmt: skip
    runtime, catalog, programs = traced

    def results() -> Any:
        outcomes = runtime.run(make_jobs(catalog if constrained else None, normalizer, stops))
        return [[(s.token_ids, s.score) for s in outcome.result.sequences] for outcome in outcomes]  # type: ignore[union-attr]

    runtime.core.programs = EAGER
    eager = results()
    runtime.core.programs = programs if padded else replace(programs, graphed=set())
    for one, two in zip(eager, results(), strict=True):
        assert [tokens for tokens, _ in one] == [tokens for tokens, _ in two]
        assert [score for _, score in one] == pytest.approx([score for _, score in two], abs=1e-4)
    explained = torch._dynamo.utils.counters["graph_break"]
    assert not explained, explained
    runtime.check_integrity()


@pytest.mark.parametrize("kind", ["filters", "policies", "policies of texts", "suppressed", "all of a catalog's"])
def test_rarer_forms_trace_whole_and_give_the_same(traced: tuple[Runtime, Catalog, Programs], kind: str) -> None:
    """One of a wave's two searches asks for more than the other."""
    runtime, catalog, programs = traced
    if kind in ("filters", "policies") and runtime.device.type == "cpu":
        pytest.skip("what is traced for all of a catalog's is both of these; on a GPU their kernels differ")
    constrained = kind not in ("suppressed", "policies of texts")

    def results() -> Any:
        first, second = make_jobs(
            catalog if constrained else None,
            "level" if constrained else "vocab",
            (2, 20) if kind == "policies of texts" else (),
        )
        if kind in ("filters", "all of a catalog's"):
            first.search = narrowed(
                first.search, ItemMask.of_rows(np.arange(0, catalog.num_items, 3), catalog.num_items)
            )
        if kind in ("policies", "policies of texts", "all of a catalog's"):
            first.search = replace(first.search, plan=LevelPlan((), noise=True, seed=-3))
            second.search = replace(second.search, plan=LevelPlan((), margin=1.5, mass=0.8, floor=2, cap=2))
        if kind == "suppressed":
            second.search = replace(second.search, special_token_ids=(0, 1, 2, 3))
        outcomes = runtime.run([first, second])
        return [[(s.token_ids, s.score) for s in outcome.result.sequences] for outcome in outcomes]  # type: ignore[union-attr]

    runtime.core.programs = EAGER
    eager = results()
    runtime.core.programs = programs
    for one, two in zip(eager, results(), strict=True):
        assert [tokens for tokens, _ in one] == [tokens for tokens, _ in two]
        assert [score for _, score in one] == pytest.approx([score for _, score in two], abs=1e-4)
    explained = torch._dynamo.utils.counters["graph_break"]
    assert not explained, explained


def test_versions_and_catalogs_share_one_compiled_form(
    traced: tuple[Runtime, Catalog, Programs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their sizes, and wherever they lie; the last one's codebooks are padded to another rung."""
    runtime, catalog, programs = traced
    few, many = (tmp_path / name for name in ("few.jsonl", "many.jsonl"))
    few.write_text("".join(json.dumps({"item_id": i, "sid": [i % 9, i % 50, 3]}) + "\n" for i in range(300)))
    rows = [[i % 9, i % 50, 20 + i % 30] for i in range(300)]
    many.write_text("".join(json.dumps({"item_id": i, "sid": sid}) + "\n" for i, sid in enumerate(rows)))
    others = [replace(catalog), Catalog.load(few), Catalog.load(many)]
    counted = []
    for version in [catalog, *others]:
        if version is others[-1]:
            monkeypatch.setattr("widebeam.constraints.arena.code_rung", lambda codes: 512)
        runtime.add_catalog(version)

        def results(version: Catalog = version) -> list[list[list[int]]]:
            outcomes = runtime.run(make_jobs(version, "level", ()))
            return [[s.token_ids for s in outcome.result.sequences] for outcome in outcomes]  # type: ignore[union-attr]

        runtime.core.programs = EAGER
        eager = results()
        runtime.core.programs = programs
        assert results() == eager
        counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(counted)) == 1 and counted[0] > 0, counted


@pytest.mark.gpu
def test_nothing_is_read_back_between_prefill_and_result(checkpoint: Path, catalog_file: Path) -> None:
    """Every synchronising call in a wave but the last copy raises."""
    runtime = make_runtime(checkpoint, "cuda")
    catalog = Catalog.load(catalog_file, token_id=Tokenizer(checkpoint).token_id)
    runtime.add_catalog(catalog)
    runtime.run(make_jobs(catalog, "level", ()))
    collect = search_module.collect

    def allowed(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return collect(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "collect", allowed)
        try:
            torch.cuda.set_sync_debug_mode("error")
            outcomes = runtime.run(make_jobs(catalog, "level", ()))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(len(outcome.result.sequences) == 4 for outcome in outcomes)  # type: ignore[union-attr]


def test_a_trie_costs_what_its_children_cost(checkpoint: Path, catalog_file: Path) -> None:
    catalog = Catalog.load(catalog_file, token_id=Tokenizer(checkpoint).token_id)
    arena = CatalogArena(1 << 20, torch.device("cpu"))
    arena.reserve(catalog)
    arena.upload(catalog)
    trie = arena.trie(catalog)
    index = catalog.index
    nodes = torch.arange(int(index.level_start[1]), int(index.level_start[2]))
    real_children = int((index.first_child[nodes + 1] - index.first_child[nodes]).sum())
    row, child, real, _ = trie.level(1, Places(torch.device("cpu"))).expand(
        nodes, torch.ones_like(nodes, dtype=torch.bool), real_children
    )
    assert bool(real.all()) and real_children == index.nodes_at(2)
    assert child.tolist() == list(range(int(index.level_start[2]), int(index.level_start[3])))
    assert row.tolist() == sorted(row.tolist())


def test_the_largest_wave_fits_the_least_pools(checkpoint: Path) -> None:
    """What a GPU runs at start to measure its work space: all rows of a wave, on pools of the least size."""
    runtime = make_runtime(checkpoint, "cpu", max_wave_rows=100, max_wave_requests=3, beam_kv_tokens=400)
    shapes = []
    run = search_module.launch_wave

    def noting(core: Any, wave: Any, *rest: Any) -> Any:
        shapes.append((len(wave.searches), max(shape.rows_in for shape in wave.shapes)))
        return run(core, wave, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("widebeam.engine.runtime.launch_wave", noting)
        for slots, expected in ((400, (2, 100)), (20, (1, 24))):
            runtime._run_largest_waves(PoolSizes(16, slots + 4))
            assert shapes.pop() == expected
    runtime.check_integrity()
