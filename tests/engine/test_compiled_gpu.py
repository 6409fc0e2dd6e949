"""On a GPU, compiled and captured: the same results as eager, and after warm-up nothing is made any more."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.engine.warm_waves import make_large, make_runtime, make_search, soak
from widebeam.constraints.arena import NODE_BYTES, CatalogArena
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.index import CatalogIndex
from widebeam.engine.compile import made_so_far
from widebeam.engine.engine import Engine
from widebeam.engine.job import Job
from widebeam.engine.request import Sequence
from widebeam.engine.runtime import Runtime
from widebeam.engine.staging import PIECE
from widebeam.kv.prefix import Prefix
from widebeam.model.config import load_model_config
from widebeam.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
LONGEST = 600
GPU: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "max_beam_width": 48, "max_wave_rows": 64, "max_wave_tokens": 512,
    "max_total_tokens": 8192,
}  # fmt: skip
WIDE = GPU | {"max_beam_width": 128, "max_wave_rows": 256}
"""For WAVES."""
EPS = 0.1
"""Largest difference of a score, in bfloat16, where other kernels round elsewhere."""


@pytest.fixture(scope="module")
def large_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Catalog]:
    """A checkpoint that FlashInfer's kernels can run, and a catalog of several hundred SIDs."""
    folder = tmp_path_factory.mktemp("large-heads")
    checkpoint = tiny.save_checkpoint(
        folder / "checkpoint", scale=0.15, codes=48, head_dim=128, hidden_size=128, intermediate_size=192,
        max_position_embeddings=1024,
    )  # fmt: skip
    path = tiny.save_catalog(folder / "items.jsonl", num_items=600, first_codes=20, codes=48)
    return checkpoint, Catalog.load(path, token_id=Tokenizer(checkpoint).token_id)


class Version:
    """What the arena looks at in a catalog."""

    def __init__(self, index: CatalogIndex) -> None:
        self.name, self.index, self.level_token_ids = "x", index, [np.arange(200)] * 3


WAVES = {
    "catalog": (((200, 96, 4), (3, 80, 2), (31, 70, 3)), True, ()),
    "plain": (((90, 80, 6), (17, 40, 3)), False, ()),
    "stops": (((20, 40, 4), (300, 16, 1), (45, 60, 5)), False, (1, 2, 40)),
}
"""Prompt tokens, width and sequences to return of each search; whether over the catalog; stop tokens. Beams are much
wider than what is returned, so that a beam lost to rounding at an early level is none of the best."""


def results(runtime: Runtime, kind: str, catalog: Catalog) -> list[list[Sequence]]:
    specs, constrained, stops = WAVES[kind]
    rng = np.random.default_rng(len(specs))
    searches = [
        make_search(rng.integers(0, 150, tokens), width, n, catalog=catalog if constrained else None, stops=stops)
        for tokens, width, n in specs
    ]
    outcomes = runtime.run([Job(search, 0.0, None) for search in searches])
    return [outcome.result.sequences for outcome in outcomes]  # type: ignore[union-attr]


def assert_alike(expected: list[list[Sequence]], found: list[list[Sequence]], eps: float) -> None:
    """The same sequences, but for those so close to the last place that either side may leave them out."""
    for one, two in zip(expected, found, strict=True):
        assert [s.score for s in one] == pytest.approx([s.score for s in two], abs=eps)
        scores = [{tuple(s.token_ids): s.score for s in sequences} for sequences in (one, two)]
        for mine, others in (scores, scores[::-1]):
            for tokens, score in mine.items():
                if tokens in others:
                    assert score == pytest.approx(others[tokens], abs=eps)
                else:
                    assert score <= min(others.values()) + eps, f"{tokens} is missing"


def refuse(*_: Any) -> None:
    raise AssertionError("torch was asked for a graph that is known")


def test_compiled_equals_eager(large_heads: tuple[Path, Catalog], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run once, captured, and replayed, which must not change a bit. From then on torch has no part in it."""
    checkpoint, catalog = large_heads
    eager = make_runtime(checkpoint, LONGEST, enforce_eager=True, **WIDE)
    eager.add_catalog(catalog)
    expected = {kind: results(eager, kind, catalog) for kind in WAVES}
    del eager
    gc.collect()
    compiled = make_runtime(checkpoint, LONGEST, warmup="none", **WIDE)
    compiled.add_catalog(catalog)
    before = made_so_far(compiled.device)
    replayed = {}
    for kind in WAVES:
        runs = [results(compiled, kind, catalog) for _ in range(4)]
        for found in runs:
            assert_alike(expected[kind], found, EPS)
        assert runs[2] == runs[3], "a replay gave other numbers than the replay before"
        replayed[kind] = runs[3]
    programs = compiled.core.programs
    with monkeypatch.context() as patch:
        for program in (programs.body, programs.last, programs.forward_rows, programs.advance, programs.pack):
            patch.setattr(program, "_program", refuse)
        assert {kind: results(compiled, kind, catalog) for kind in WAVES} == replayed, "behind waves of other kinds"
    after = made_so_far(compiled.device)
    assert after.captured > before.captured and after.compiled > before.compiled
    assert after.skipped == before.skipped, "a function could not be captured"
    assert compiled.fallbacks == 0
    compiled.check_integrity()


def test_after_warm_up_nothing_is_made_and_memory_stands_still(large_heads: tuple[Path, Catalog]) -> None:
    """Waves as in tests/engine/test_warmup.py, which lists those that need graphs of their own."""
    checkpoint, catalog = large_heads
    vocab_size = load_model_config(checkpoint).vocab_size
    runtime = make_runtime(checkpoint, LONGEST, warmup="fast", **GPU)
    runtime.add_catalog(catalog)
    soak(runtime, catalog, 50, 0, vocab_size)
    gc.collect()
    made, allocated = made_so_far(runtime.device), torch.cuda.memory_allocated()
    soak(runtime, catalog, 250, 1, vocab_size)
    gc.collect()
    assert runtime.fallbacks == 0 and made_so_far(runtime.device) == made
    assert torch.cuda.memory_allocated() == allocated


def test_large_prompts_get_graphs_in_traffic(
    large_heads: tuple[Path, Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wave before it on its way; what comes again is replayed, and is what it was."""
    make_large(monkeypatch, 128, 320)
    checkpoint, _ = large_heads
    eager = make_runtime(checkpoint, LONGEST, enforce_eager=True, **WIDE)
    runtime = make_runtime(checkpoint, LONGEST, warmup="fast", **WIDE)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 150, tokens) for tokens in (180, 160)]

    def flights(runtime: Runtime) -> list[list[Sequence]]:
        jobs = [Job(make_search(tokens, 40, 4), 0.0, None) for tokens in prompts]
        both = [runtime.launch(some) for some in ([Job(make_search(prompts[0][:20], 40, 4), 0.0, None)], jobs)]
        outcomes = [outcome for flight in both for outcome in flight.outcomes()]
        return [outcome.result.sequences for outcome in outcomes]  # type: ignore[union-attr]

    made = made_so_far(runtime.device)
    captured = flights(runtime)
    assert made_so_far(runtime.device).captured == made.captured + 2
    assert_alike(flights(eager), captured, EPS)
    with monkeypatch.context() as patch:
        for program in (runtime.core.programs.body, runtime.core.programs.last):
            patch.setattr(program, "_program", refuse)
        assert flights(runtime) == captured
    assert runtime.fallbacks == runtime.late_graphs == 0


def test_an_update_compiles_and_captures_nothing(large_heads: tuple[Path, Catalog], tmp_path: Path) -> None:
    """Loaded on another thread while waves run; answers are those of an engine that has only this version."""
    checkpoint, catalog = large_heads
    vocab_size = load_model_config(checkpoint).vocab_size
    runtime = make_runtime(checkpoint, LONGEST, warmup="fast", **WIDE)
    runtime.add_catalog(catalog)
    soak(runtime, catalog, 50, 0, vocab_size)
    made = made_so_far(runtime.device)
    path = tiny.save_catalog(tmp_path / "items.jsonl", num_items=600, first_codes=20, codes=48)
    path.write_text(path.read_text().replace("<c_7>", "<c_3>").replace("item-9", "new-9"))
    update = Catalog.load(path, token_id=Tokenizer(checkpoint).token_id)
    runtime.reserve(update)
    with ThreadPoolExecutor(1) as pool:
        uploading = pool.submit(runtime.upload, update)
        soak(runtime, catalog, 50, 1, vocab_size)
        uploading.result()
    runtime.add_catalog(update)
    for seed, version in enumerate((update, catalog, update)):
        soak(runtime, version, 50, seed, vocab_size)
    assert runtime.fallbacks == 0 and made_so_far(runtime.device) == made
    alone = make_runtime(checkpoint, LONGEST, enforce_eager=True, **WIDE)
    alone.add_catalog(update)
    assert_alike(results(alone, "catalog", update), results(runtime, "catalog", update), EPS)


def test_prompts_that_begin_alike(large_heads: tuple[Path, Catalog]) -> None:
    """Eager cold, compiled cold, and compiled behind pages of it, alone and in company: after warm-up, without making
    anything."""
    checkpoint, catalog = large_heads
    eager = make_runtime(checkpoint, LONGEST, enforce_eager=True, **WIDE)
    warm = make_runtime(checkpoint, LONGEST, warmup="fast", prefix_cache="on", **WIDE)
    for runtime in (eager, warm):
        runtime.add_catalog(catalog)
    prompts = [np.random.default_rng(seed).integers(0, 150, tokens) for seed, tokens in enumerate((250, 150, 70))]

    def run(runtime: Runtime, *lengths: int) -> tuple[list[list[Sequence]], list[int]]:
        cut = [prompt[:length] for prompt, length in zip(prompts, lengths, strict=False)]
        searches = [make_search(prompt, 64, 4, catalog=catalog) for prompt in cut]
        for search in searches:
            search.prefix = Prefix.of(search.token_ids, runtime.config.page_size)
        outcomes = runtime.run([Job(search, 0.0, None) for search in searches])
        return [o.result.sequences for o in outcomes], [s.num_cached for s in searches]  # type: ignore[union-attr]

    made = None
    for _ in range(2):
        wanted = {(70,): [0], (190,): [64], (250, 150, 70): [128, 0, 0], (249, 150, 70): [192, 128, 64]}
        for lengths, cached in wanted.items():
            found, hits = run(warm, *lengths)
            assert hits == cached
            assert_alike(run(eager, *lengths)[0], found, EPS)
        warm.check_integrity()
        warm.prefixes.flush()
        assert made in (None, made_so_far(warm.device))
        made = made_so_far(warm.device)
    assert warm.fallbacks == 0


def test_uploads_fill_their_places() -> None:
    """Several pieces and versions, on a thread of their own, each readable once it is there."""
    device = torch.device("cuda", 0)
    arena = CatalogArena(NODE_BYTES * 4 * PIECE, device)
    codes = np.random.default_rng(0).integers(0, 200, (2 * PIECE, 3)).astype(np.int32)
    index, _ = CatalogIndex.build(codes)
    assert index.num_nodes > PIECE
    versions: list[Any] = [Version(index) for _ in range(2)]
    for version in versions:
        arena.reserve(version)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(arena.upload, versions))
    for version in versions:
        base = arena.trie(version).lease.base
        for array, own in zip(arena.nodes, (index.first_child, index.code, index.item_lo), strict=False):
            assert np.array_equal(array[base : base + own.size].cpu().numpy(), own)


def test_a_second_engine_has_graphs_of_its_own(large_heads: tuple[Path, Catalog]) -> None:
    """At once with the first, and after it; each on a thread of its own."""
    checkpoint, _ = large_heads
    settings = GPU | {"max_context_len": LONGEST, "max_levels": 16, "warmup": "none"}
    prompts = [np.random.default_rng(seed).integers(0, 150, 40).tolist() for seed in range(3)]

    def answers(engine: Engine) -> list[list[Sequence]]:
        found = [engine.generate(p, n=8, beam_width=32, max_new_tokens=3, ignore_eos=True) for p in prompts]
        return [result.sequences for result in found]  # type: ignore[union-attr]

    first, second, third = (Engine(str(checkpoint), **settings) for _ in range(3))
    try:
        expected = answers(first)
        for _ in range(3):
            assert answers(first) == expected
            assert answers(second) == expected
        first.close()
        assert answers(third) == expected
    finally:
        for engine in (first, second, third):
            engine.close()
