"""Warm-up meets every graph that later waves need, and runs inside small pools.

Some waves still need graphs that warm-up did not meet, which costs time once and is counted. None of those that are
drawn here is of these kinds:

- more than 8192 prompt tokens;
- without a catalog, one token or more than eight; stop tokens in some requests only, if numbers of tokens differ or
  those with stop tokens are greedy text;
- over a catalog, the normalisers `legal` and `vocab` (met with --warmup full); more sequences to return than it has;
- more than 16 requests; a beam pool with fewer slots than rows times levels.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import tiny
from tests.engine.warm_waves import (
    Recorder,
    draw_wave,
    graph_keys,
    keys_of_all,
    make_runtime,
    make_search,
    random_integers,
    soak,
)
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.index import CatalogIndex
from widebeam.engine import warmup
from widebeam.engine.compile import compiled_programs
from widebeam.engine.job import Job
from widebeam.engine.memory import least_sizes
from widebeam.engine.runtime import Runtime
from widebeam.engine.scheduler import Load, WaveLimits
from widebeam.engine.wave import Search
from widebeam.errors import OutOfMemory
from widebeam.kv.prefix import Prefix
from widebeam.model.config import load_model_config
from widebeam.model.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = warmup.row_rungs(8192)
seeds = st.integers(0, 10**6)


@dataclass
class Setting:
    """What decides the waves of a warm-up."""

    limits: WaveLimits
    widest: int
    vocab_size: int
    longest: int

    def waves(self, catalog: Any = None) -> Iterator[list[Search]]:
        yield from warmup.waves(self.limits, self.widest, self.vocab_size, self.longest)
        if catalog is not None:
            yield from warmup.catalog_waves(self.limits, self.widest, self.vocab_size, catalog, ("level",))


@st.composite
def any_settings(draw: st.DrawFn) -> Setting:
    """Whatever a user may set, but for pools that hold not even one small request."""
    page_size, tokens, rows = draw(st.integers(1, 256)), draw(st.integers(1, 30_000)), draw(st.integers(1, 8192))
    longest = draw(st.integers(64, 40_960))
    limits = WaveLimits(
        requests=draw(st.integers(1, 256)),
        tokens=tokens,
        rows=rows,
        context_pages=-(-max(tokens, longest) // page_size) + draw(st.integers(0, 100)),
        beam_slots=draw(st.integers(2 * min(rows, 16), 6 * rows)),
        mask_places=1000,
        page_size=page_size,
    )
    return Setting(limits, draw(st.integers(1, rows)), draw(st.integers(2, 200_000)), longest)


@st.composite
def covered_settings(draw: st.DrawFn, most_rows: int = 8192, least_slots: int = 2) -> Setting:
    """Those of which warm-up meets all rungs, see above. `least_slots`: beam slots for each row."""
    rows, requests = draw(st.sampled_from(ROWS[: ROWS.index(most_rows) + 1])), draw(st.integers(1, 16))
    narrowest = max(16, -(-rows // requests))
    tokens = draw(st.sampled_from([128, 384, 512, 2048, 5120, 8192, 20_480, 30_720]))
    page_size = draw(st.sampled_from([16, 64, 256]))
    limits = WaveLimits(
        requests=requests,
        tokens=tokens,
        rows=rows,
        context_pages=-(-tokens // page_size) + requests + draw(st.integers(0, 500)),
        beam_slots=rows * draw(st.integers(least_slots, 6)),
        mask_places=1000,
        page_size=page_size,
    )
    return Setting(
        limits,
        widest=draw(st.integers(narrowest, max(narrowest, rows))),
        vocab_size=draw(st.integers(narrowest, 2 * rows) | st.just(151_936)),
        longest=tokens + warmup.LEVELS + draw(st.integers(0, 9999)),
    )


def make_catalog(sizes: list[int], items: int, seed: int) -> Any:
    """Random SIDs of so many codes a level; all codes of the first level are in use."""
    rng = np.random.default_rng(seed)
    codes = np.stack([rng.integers(0, size, items + sizes[0]) for size in sizes], axis=1).astype(np.int32)
    codes[: sizes[0], 0] = np.arange(sizes[0])
    index, _ = CatalogIndex.build(codes)
    tokens = [np.arange(size) for size in sizes]
    return SimpleNamespace(index=index, depth=len(sizes), level_token_ids=tokens, num_items=index.num_items)


def catalogs(deepest: int) -> st.SearchStrategy[Any]:
    return st.builds(
        make_catalog, st.lists(st.integers(1, 300), min_size=1, max_size=deepest), st.integers(1, 3000), seeds
    )


@settings(max_examples=300, deadline=None)
@given(any_settings(), catalogs(9))
def test_every_wave_is_one_that_the_scheduler_may_form(setting: Setting, catalog: Any) -> None:
    limits = replace(setting.limits, tokens=max(setting.limits.tokens, setting.longest))  # a long prompt runs alone
    for searches in setting.waves(catalog):
        load = Load()
        for search in searches[: limits.requests]:
            assert 0 < search.num_tokens <= setting.longest - search.levels
            load = load.plus(search, limits)
        assert load.fits(limits), load


def assert_met(setting: Setting, seed: int, *, widest: int | None = None, catalog: Any = None, **kind: Any) -> None:
    """Random waves need no graphs but those of the warm-up."""
    limits, vocab_size = setting.limits, setting.vocab_size
    met = keys_of_all(setting.waves(catalog), limits)
    uncut = min(setting.widest, vocab_size) < min(384, limits.rows)
    longest_prompt = min(limits.tokens, warmup.SPLIT_CONTEXT - 1) if uncut else limits.tokens
    integer = random_integers(seed)
    for _ in range(40):
        searches = draw_wave(
            integer, limits, widest or setting.widest, vocab_size, longest_prompt, catalog=catalog, **kind
        )
        missed = graph_keys(searches, limits) - met if searches else ()
        assert not missed, [(search.num_tokens, search.widths, search.num_returned) for search in searches]


@settings(max_examples=400, deadline=None)
@given(covered_settings(), st.booleans(), seeds)
def test_any_token(setting: Setting, stops: bool, seed: int) -> None:
    assert_met(setting, seed, stops=stops)


@settings(max_examples=400, deadline=None)
@given(covered_settings(most_rows=512, least_slots=4), catalogs(5), seeds)
def test_catalogs_that_can_fill_the_widest_beam(setting: Setting, catalog: Any, seed: int) -> None:
    widest = min(setting.widest, setting.vocab_size)
    assume(make_search([1], widest, catalog=catalog).rows == widest)
    assert_met(setting, seed, catalog=catalog)


@settings(max_examples=400, deadline=None)
@given(covered_settings(most_rows=512, least_slots=4), catalogs(5), seeds)
def test_any_catalog_with_one_request_at_a_time(setting: Setting, catalog: Any, seed: int) -> None:
    widest = max(size for size in ROWS if size <= min(setting.widest, setting.vocab_size))
    assert_met(setting, seed, widest=widest, catalog=catalog, most=1)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Runtimes on a CPU warm up as on a GPU, with the functions that a GPU compiles."""
    recorder = Recorder()
    compiles = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(Runtime, "_compiles", compiles, raising=False)
    monkeypatch.setattr("widebeam.model.reference.TorchBackend.replayable", True)
    monkeypatch.setattr("widebeam.engine.captures.made_so_far", recorder.made_so_far)
    monkeypatch.setattr("widebeam.engine.runtime.compiled_programs", lambda core, _: compiled_programs(core, recorder))
    torch._dynamo.reset()
    return recorder


@pytest.fixture
def uncompiled(pretended: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """And these run as they are."""
    monkeypatch.setattr(
        "widebeam.engine.runtime.compiled_programs", lambda core, _: compiled_programs(core, lambda function: function)
    )


def test_graphs_are_told_apart(checkpoint: Path, pretended: Recorder) -> None:
    """`graph_keys` says of any two waves whether they run the same graphs: what is traced agrees."""
    runtime = make_runtime(checkpoint, max_wave_rows=64, max_beam_width=64, warmup="none", max_total_tokens=4096)
    specs: list[list[tuple[int, int, int, int, tuple[int, ...]]]] = [
        [(20, 20, 20, 3, ())],
        [(100, 18, 1, 3, ()), (28, 4, 4, 3, ())],
        [(200, 20, 20, 3, ())],
        [(20, 40, 20, 3, ())],
        [(20, 20, 20, 4, ())],
        [(20, 20, 20, 5, ())],
        [(20, 10, 10, 3, ()), (20, 9, 9, 2, ())],
        [(20, 20, 20, 3, (1,))],
        [(20, 20, 20, 3, (1, 2)), (20, 1, 1, 3, ())],
    ]
    traced: dict[frozenset[Any], set[Hashable]] = {}
    for spec in specs:
        searches = [
            make_search(np.arange(tokens) % 50, width, n, levels=levels, stops=stops)
            for tokens, width, n, levels, stops in spec
        ]
        pretended.last.clear()
        runtime.run([Job(search, 0.0, None) for search in searches])
        traced[frozenset(graph_keys(searches, runtime.limits))] = set(pretended.last)
    assert len(traced) >= 5
    for keys, graphs in traced.items():
        for other_keys, other_graphs in traced.items():
            both = keys & other_keys
            prompts = sum(key[0] == "prompts" for key in both)
            assert len(graphs & other_graphs) == len(both) + prompts  # prompts have two graphs


def test_no_graph_is_made_after_warm_up(checkpoint: Path, tmp_path: Path, pretended: Recorder) -> None:
    """Each function is traced as it would be compiled, and the integers that it is called with are noted."""
    runtime = make_runtime(
        checkpoint, max_wave_rows=64, max_beam_width=16, max_wave_requests=8, max_wave_tokens=256,
        max_total_tokens=2048,
    )  # fmt: skip
    path = tiny.save_catalog(tmp_path / "wide.jsonl", num_items=100)
    catalog = Catalog.load(path, token_id=Tokenizer(checkpoint).token_id)
    runtime.add_catalog(catalog)
    captured = len(pretended.captured)
    soak(runtime, catalog, 150, 0, load_model_config(checkpoint).vocab_size)
    assert (runtime.fallbacks, len(pretended.captured)) == (0, captured)
    assert captured > 20
    rows = path.read_text().splitlines()
    path.write_text("\n".join(row.replace("<c_15>", "<c_3>").replace("item-9", "new-9") for row in rows))
    update = Catalog.load(path, token_id=Tokenizer(checkpoint).token_id)
    assert not np.array_equal(update.index.code, catalog.index.code)
    runtime.core.beams.high_water = 0
    runtime.add_catalog(update)
    assert runtime.core.beams.high_water == 0  # no wave ran
    soak(runtime, update, 30, 1, load_model_config(checkpoint).vocab_size)
    assert (runtime.fallbacks, len(pretended.captured)) == (0, captured)


def test_later_versions_warm_up_what_is_new_about_them() -> None:
    """Of 30,000 items under 256 codes a level, 1,000 change; then another catalog has as many children elsewhere."""
    limits = WaveLimits(
        requests=16, tokens=20_480, rows=2048, context_pages=9999, beam_slots=8192, mask_places=9999, page_size=64
    )

    def unmet(codes: np.ndarray) -> list[list[Search]]:
        index, _ = CatalogIndex.build(codes)
        books = [np.arange(codes[:, level].max() + 1) for level in range(codes.shape[1])]
        catalog: Any = SimpleNamespace(
            index=index, depth=codes.shape[1], level_token_ids=books, num_items=index.num_items
        )
        waves = list(warmup.catalog_waves(limits, 512, 151_936, catalog, ("level",)))
        found = list(warmup.unmet(waves, met, limits))
        assert keys_of_all(waves, limits) >= keys_of_all(found, limits)
        assert {key for key in keys_of_all(waves, limits) if key[0] != "prompts"} <= met  # type: ignore[index]
        return found

    rng, met = np.random.default_rng(0), set[Hashable]()
    codes = rng.integers(0, 256, (30_000, 3)).astype(np.int32)
    assert len(unmet(codes)) > 5
    codes[rng.choice(30_000, 1000, replace=False)] = rng.integers(0, 256, (1000, 3))
    assert not unmet(codes)
    codes[:100, 2] = 256  # one code more than a rung holds: the last level alone is new, and so is every wave
    more = unmet(codes)
    assert more and not unmet(codes)
    deeper = np.concatenate([codes, rng.integers(0, 3, (30_000, 1)).astype(np.int32)], axis=1)
    assert unmet(deeper) and not unmet(deeper) and not unmet(codes)


def test_large_prompts_are_captured_later(
    checkpoint: Path, pretended: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then they run as they are; either way the search is the same."""
    for module in ("shapes", "compile", "warmup"):
        monkeypatch.setattr(f"widebeam.engine.{module}.COMMON_TOKENS", 256)
    runtime = make_runtime(checkpoint, max_wave_rows=32, max_beam_width=16, max_wave_tokens=1024, max_total_tokens=2048)
    graphed = runtime.core.programs.graphed

    def sizes() -> set[int]:
        return {tokens for requests, tokens, splits in graphed if (requests, splits) == (16, 0)}

    def results() -> list[Any]:
        jobs = [Job(make_search(np.arange(300) * (b + 7) % 50, 8, 8), 0.0, None) for b in range(3)]
        return [[(s.token_ids, s.score) for s in outcome.result.sequences] for outcome in runtime.run(jobs)]

    captured, plain = len(pretended.captured), results()
    assert (sizes(), len(pretended.captured)) == ({128, 256}, captured)
    while runtime.capture_more():
        pass
    assert sizes() == {128, 256, *range(320, 1121, 160)}
    captured, graphed = len(pretended.captured), results()
    assert len(pretended.captured) == captured and runtime.fallbacks == runtime.late_graphs == 0
    for one, other in zip(plain, graphed, strict=True):
        assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
        assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-4)


def test_what_returns_needs_no_graph_that_warm_up_has_not_met(checkpoint: Path, pretended: Recorder) -> None:
    """Hits of one page and of more, alone and in company, as long as few tokens are new."""
    runtime = make_runtime(
        checkpoint, max_wave_rows=32, max_beam_width=16, max_wave_tokens=1024, max_total_tokens=4096, prefix_cache="on"
    )
    assert len(runtime.core.context.cache or ()) == 0

    def run(*prompts: Any) -> list[int]:
        searches = [make_search(tokens, 8, 8) for tokens in prompts]
        for search in searches:
            search.prefix = Prefix.of(search.token_ids, runtime.config.page_size)
        runtime.run([Job(search, 0.0, None) for search in searches])
        return [search.num_cached for search in searches]

    users = [np.arange(length) * (b + 3) % 50 for b, length in enumerate((70, 200, 290))]
    assert run(*users) == [0, 0, 0]
    captured = len(pretended.captured)
    assert run(*users) == [64, 192, 256]
    assert run(np.append(users[0], np.arange(90) % 50)) == [64] and run(users[2][:150], users[1][:10]) == [128, 0]
    assert len(pretended.captured) == captured and runtime.fallbacks == runtime.late_graphs == 0


def test_no_room_for_more_graphs(
    checkpoint: Path, catalog_file: Path, pretended: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large prompts then stay without, which counts; a catalog is refused, and met in full when it comes again."""
    for module in ("shapes", "compile", "warmup"):
        monkeypatch.setattr(f"widebeam.engine.{module}.COMMON_TOKENS", 256)
    runtime = make_runtime(checkpoint, max_wave_rows=32, max_beam_width=16, max_wave_tokens=1024, max_total_tokens=2048)
    catalog = Catalog.load(catalog_file, token_id=Tokenizer(checkpoint).token_id)
    captures, graphed = runtime._captures, set(runtime.core.programs.graphed)
    assert captures is not None

    def no_room(_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(captures, "_run", no_room)
        assert runtime.capture_more() and not runtime.capture_more()
        with pytest.raises(OutOfMemory, match="graphs of catalog"):
            runtime.add_catalog(catalog)
    assert (runtime.fallbacks, runtime.core.programs.graphed) == (1, graphed)
    captured = len(pretended.captured)
    runtime.add_catalog(catalog)
    met = len(pretended.captured)
    assert met > captured
    runtime.run([Job(make_search(np.arange(20), 8, 8, catalog=catalog), 0.0, None)])
    assert (len(pretended.captured), runtime.fallbacks, runtime.late_graphs) == (met, 1, 0)


SMALL: dict[str, Any] = {"max_beam_width": 30, "max_wave_rows": 100, "max_wave_tokens": 256, "max_total_tokens": 2048}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_wave_rows": 16, "max_beam_width": 16},
        {"max_beam_width": 100},
        {"max_beam_width": 5, "max_wave_requests": 7},
        {"max_wave_requests": 1, "max_beam_width": 64, "max_wave_rows": 64},
        {"max_wave_requests": 40, "max_total_tokens": 4096},
        {"beam_kv_tokens": 32},
        {"beam_kv_tokens": 96},
        {"page_size": 8, "max_total_tokens": 256},
        {"page_size": 1, "max_total_tokens": 40},
        {"max_wave_tokens": 10},
        {"max_levels": 1},
        {"beam_kv_tokens": 46},
        {"beam_kv_tokens": 70},
        {"max_total_tokens": None},
        {"max_total_tokens": 1024},
        {"max_wave_rows": 8, "max_beam_width": 8},
        {"max_beam_width": 2, "max_wave_requests": 64, "max_total_tokens": 8192},
    ],
    ids=str,
)
def test_small_pools(checkpoint: Path, catalog_file: Path, uncompiled: None, fields: dict[str, Any]) -> None:
    """Every wave of the warm-up runs and gives back what it held."""
    runtime = make_runtime(checkpoint, **(SMALL | fields))
    runtime.check_integrity()
    runtime.add_catalog(Catalog.load(catalog_file, token_id=Tokenizer(checkpoint).token_id))
    runtime.check_integrity()
    assert runtime.core.context.high_water > 0 and runtime.core.beams.high_water > 0


@pytest.mark.parametrize("width", [1, 64])
def test_a_tiny_vocabulary(tmp_path: Path, uncompiled: None, width: int) -> None:
    """Fewer tokens than beams and rows."""
    checkpoint = tiny.save_checkpoint(tmp_path / "tiny", levels=1, codes=1)
    make_runtime(checkpoint, **(SMALL | {"max_beam_width": width})).check_integrity()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_beam_width": 100},
        {"max_beam_width": 25, "max_wave_requests": 2},
        {"max_beam_width": 40},
        {"beam_kv_tokens": 70},
    ],
    ids=str,
)
def test_the_wave_that_measures_the_work_space_fits(checkpoint: Path, fields: dict[str, Any]) -> None:
    """It runs on a GPU before the pools are made, on the least ones."""
    runtime = make_runtime(
        checkpoint, 512, **({"max_beam_width": 30, "max_wave_rows": 100, "max_wave_tokens": 512} | fields)
    )
    runtime._run_largest_waves(least_sizes(runtime.config, 512))
