"""Prompts that begin in ContextKV already: the same search as a cold one, for any cut and any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.engine.warm_waves import make_runtime, make_search
from widebeam.constraints.catalog import Catalog
from widebeam.engine.compile import compiled_programs
from widebeam.engine.job import Job
from widebeam.engine.request import SearchResult
from widebeam.engine.runtime import Runtime
from widebeam.engine.wave import Search
from widebeam.kv.prefix import Prefix
from widebeam.model.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = 8


@pytest.fixture(params=["as they are", "for graphs"])
def warm(checkpoint: Path, request: pytest.FixtureRequest) -> Runtime:
    runtime = make_runtime(checkpoint, prefix_cache="on", page_size=PAGE, max_total_tokens=4096, max_wave_requests=20)
    if request.param == "for graphs":  # padded, and by way of the buffer between body and last layer
        runtime.core.programs = compiled_programs(runtime.core, lambda function: function)
    return runtime


@pytest.fixture
def cold(checkpoint: Path) -> Runtime:
    return make_runtime(checkpoint, page_size=PAGE, max_total_tokens=4096, max_wave_requests=20)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, length).astype(np.int32)


def sharing(token_ids: np.ndarray, width: int = 6, salt: bytes = b"", **kind: Any) -> Search:
    search = make_search(token_ids, width, **kind)
    search.prefix = Prefix.of(search.token_ids, PAGE, salt)
    return search


def run(runtime: Runtime, searches: list[Search]) -> list[SearchResult]:
    results = [outcome.result for outcome in runtime.run([Job(search, 0.0, None) for search in searches])]
    runtime.check_integrity()
    assert not [result for result in results if not isinstance(result, SearchResult)]
    return results  # type: ignore[return-value]


def assert_same(ones: list[SearchResult], others: list[SearchResult]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert [s.token_ids for s in one.sequences] == [s.token_ids for s in other.sequences]
        assert [s.score for s in one.sequences] == pytest.approx([s.score for s in other.sequences], abs=1e-4)


def test_every_cut(warm: Runtime, cold: Runtime) -> None:
    """The first tokens of a prompt came before, however many: whole pages of them are used."""
    whole = prompt(5 * PAGE + 3)
    wanted = run(cold, [make_search(whole, 6)])
    for known in range(1, len(whole) + 1):
        warm.prefixes.flush()
        run(warm, [sharing(np.concatenate([whole[:known], prompt(4, seed=known)]))])
        again = sharing(whole)
        assert_same(run(warm, [again]), wanted)
        behind = prompt(4, seed=known)[: len(whole) - known] == whole[known : known + 4]
        agreed = known + int(np.argmin(np.append(behind, False)))
        assert again.num_cached == min(agreed, len(whole) - 1) // PAGE * PAGE


def test_company(warm: Runtime, cold: Runtime, checkpoint: Path, tmp_path: Path) -> None:
    """Hits of different lengths, misses, and twice the same prompt, in one wave; over a catalog too."""
    path = tiny.save_catalog(tmp_path / "wide.jsonl", num_items=100)
    catalog = Catalog.load(path, token_id=Tokenizer(checkpoint).token_id)
    for runtime in (warm, cold):
        runtime.add_catalog(catalog)
    base = [prompt(length, seed) for seed, length in enumerate((40, 3 * PAGE, 9, 70))]
    run(warm, [sharing(tokens) for tokens in base[:2]])
    mixed = [np.concatenate([base[0][:33], prompt(5)]), base[1], base[2], base[2], np.append(base[1], 7), base[3]]
    for offered in (None, catalog):
        searches = [sharing(tokens, 3 + b, catalog=offered) for b, tokens in enumerate(mixed)]
        wanted = run(cold, [make_search(tokens, 3 + b, catalog=offered) for b, tokens in enumerate(mixed)])
        assert_same(run(warm, searches), wanted)
        if offered is None:
            assert [search.num_cached for search in searches] == [32, 2 * PAGE, 0, 0, 2 * PAGE, 0]
        else:
            assert [search.num_cached for search in searches] == [32, 2 * PAGE, PAGE, PAGE, 3 * PAGE, 64]


def test_company_in_groups(warm: Runtime, cold: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than the least rung has, in several groups of either kind; one that is larger than a group, too."""
    monkeypatch.setattr("widebeam.engine.search.GROUP_TOKENS", 40)
    known = [prompt(length, length) for length in (17, 30, 90)]
    run(warm, [sharing(tokens) for tokens in known])
    mixed = [np.append(known[b % 3], prompt(1 + 5 * b, b)) if b % 3 else prompt(1 + 3 * b, b) for b in range(20)]
    searches = [sharing(tokens, 3) for tokens in mixed]
    assert_same(run(warm, searches), run(cold, [make_search(tokens, 3) for tokens in mixed]))
    assert [search.num_cached for search in searches] == [(0, 3 * PAGE, 11 * PAGE)[b % 3] for b in range(20)]


def test_salts_share_nothing(warm: Runtime) -> None:
    whole = prompt(50)
    run(warm, [sharing(whole, salt=b"one")])
    other, same = sharing(whole, salt=b"two"), sharing(whole, salt=b"one")
    run(warm, [other])
    run(warm, [same])
    assert (other.num_cached, same.num_cached) == (0, 48)
    warm.prefixes.flush(b"one")
    one, two = sharing(whole, salt=b"one"), sharing(whole, salt=b"two")
    run(warm, [one, two])
    assert (one.num_cached, two.num_cached) == (0, 48)


def test_a_wave_that_fails_leaves_nothing(warm: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was to write may not be there."""
    whole = prompt(50)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr("widebeam.engine.search.selection", fail)
        run(warm, [sharing(whole)])
    warm.check_integrity()
    search = sharing(whole)
    run(warm, [search])
    assert search.num_cached == 0


def test_more_users_than_fit(warm: Runtime, cold: Runtime) -> None:
    """Pages of those who were long away make room; whoever returns in time is answered from what is there."""
    rng = np.random.default_rng(3)
    histories = [prompt(60, seed) for seed in range(90)]  # 720 pages; there are 512
    hits = 0
    for _ in range(60):
        users = rng.choice(20 if rng.random() < 0.7 else 90, 4, replace=False)
        for user in users:
            histories[user] = np.append(histories[user], rng.integers(0, 50, 3))[:200].astype(np.int32)
        searches = [sharing(histories[user]) for user in users]
        assert_same(run(warm, searches), run(cold, [make_search(histories[user], 6) for user in users]))
        hits += sum(search.num_cached > 0 for search in searches)
    assert hits > 80
