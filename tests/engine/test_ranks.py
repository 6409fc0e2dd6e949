"""A model divided among two processes: the same results as in one, whatever is searched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.engine.warm_waves import make_search
from widebeam.config import EngineConfig
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filters import ItemMask
from widebeam.engine.compile import EAGER
from widebeam.engine.engine import Engine
from widebeam.engine.job import Job
from widebeam.engine.ranks import Place, Ranks, torchrun_place
from widebeam.engine.request import Sampling, SearchResult
from widebeam.engine.runtime import Runtime
from widebeam.engine.scoring import catalog_candidates, vocabulary_candidates
from widebeam.engine.search import ALONE, Between
from widebeam.engine.spawn import Followers
from widebeam.engine.step import forward_rows
from widebeam.engine.wave import Search, narrowed
from widebeam.errors import ConfigError
from widebeam.kv.prefix import Prefix
from widebeam.model.config import load_model_config
from widebeam.model.tokenizer import Tokenizer
from widebeam.policies import LevelPlan

pytestmark = pytest.mark.usefixtures("one_thread")
LEVELS, CODES = 3, 100
PAGE = 16


class Both:
    """The same engine twice: divided among two processes, and whole."""

    def __init__(self, divided: Runtime, whole: Runtime, load: Any) -> None:
        self.divided, self.whole, self.load = divided, whole, load
        self.vocab_size = whole.core.model.config.vocab_size
        self.catalogs: dict[Runtime, Catalog] = {}
        self.new_version()

    def new_version(self, **shape: Any) -> None:
        """Of the catalog, on both."""
        self.catalogs = {runtime: self.load(**shape) for runtime in (self.divided, self.whole)}
        for runtime, catalog in self.catalogs.items():
            runtime.add_catalog(catalog)

    def run(self, runtime: Runtime, searches: list[Search], between: Between = ALONE) -> list[SearchResult]:
        jobs = [Job(replace(search, lease=None, num_cached=0), 0.0, None) for search in searches]
        results = [outcome.result for outcome in runtime.launch(jobs, between=between).outcomes()]
        assert all(isinstance(result, SearchResult) for result in results), results
        return results  # type: ignore[return-value]

    def check(self, make: Any) -> list[SearchResult]:
        """Searches, made for either's catalog, give the same. The results."""
        expected, found = (self.run(each, make(self.catalogs[each])) for each in (self.whole, self.divided))
        assert_same(expected, found)
        self.divided.check_integrity()
        return found


def assert_same(expected: list[SearchResult], found: list[SearchResult]) -> None:
    for one, two in zip(expected, found, strict=True):
        assert len(one.sequences) > 0 and one.cached_tokens == two.cached_tokens
        assert [s.token_ids for s in one.sequences] == [s.token_ids for s in two.sequences]
        assert [s.finish_reason for s in one.sequences] == [s.finish_reason for s in two.sequences]
        scores, others = [s.score for s in one.sequences], [s.score for s in two.sequences]
        assert others == pytest.approx(scores, abs=2e-5)
        likely, theirs = ([s.top_logprobs for s in result.sequences] for result in (one, two))
        if likely[0] is not None:
            assert np.array(theirs) == pytest.approx(np.array(likely), abs=2e-5)
        assert (one.levels is None) == (two.levels is None)
        if one.levels is not None and two.levels is not None:
            assert [level.token_ids for level in one.levels] == [level.token_ids for level in two.levels]


SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_levels": 32, "max_wave_rows": 128, "max_beam_width": 64,
    "page_size": PAGE, "prefix_cache": "on", "hang_timeout_s": 30.0, "beam_kv_tokens": 4000,
}  # fmt: skip


@pytest.fixture(scope="module")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three columns of tokens, of which the second rank has one; a bias that is added once; a head of its own."""
    folder = tmp_path_factory.mktemp("divisible")
    return tiny.save_checkpoint(folder, scale=0.3, codes=CODES, attention_bias=True, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def both(divisible: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Both]:
    """With other settings, too, if a test's parameter has some."""
    settings = SETTINGS | getattr(request, "param", {}) | {"model": str(divisible)}
    files = tmp_path_factory.mktemp("catalogs")
    token_id = Tokenizer(divisible).token_id

    def load(**shape: Any) -> Catalog:
        return Catalog.load(tiny.save_catalog(files / "items.jsonl", codes=CODES, **shape), token_id=token_id)

    config = EngineConfig(**settings, tensor_parallel_size=2)
    ended: list[str] = []
    followers = Followers(config, divisible, ended.append)
    followers.start()
    try:
        model = load_model_config(divisible)
        divided = Runtime(
            config, divisible, model, model.max_position_embeddings, Ranks(followers.place, config, False)
        )
        alone = EngineConfig(**settings)
        whole = Runtime(alone, divisible, model, model.max_position_embeddings)
        yield Both(divided, whole, load)
        divided.close()
        assert [process.wait(20) for process in followers._processes] == [0] and not ended
    finally:
        followers.close()


def prompt(both: Both, seed: int, tokens: int = 30) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, both.vocab_size, tokens)


@pytest.mark.parametrize("normalizer", ["level", "legal", "vocab"])
@pytest.mark.parametrize("more", ["plain", "filters", "noise", "traced"])
def test_over_a_catalog(both: Both, normalizer: Any, more: str) -> None:
    """Two requests in a wave; the first asks for more."""
    if (more, normalizer) == ("traced", "legal"):
        normalizer = "level"

    def make(catalog: Catalog) -> list[Search]:
        first, second = (
            replace(make_search(prompt(both, seed, 20 + 30 * seed), 12, catalog=catalog), normalizer=normalizer)
            for seed in range(2)
        )
        if more == "filters":
            first = narrowed(first, ItemMask.of_rows(np.arange(0, catalog.num_items, 3), catalog.num_items))
        if more == "noise":
            first = replace(first, plan=LevelPlan((), noise=True, seed=-7))
        if more == "traced":
            first = replace(first, top_logprobs=4, return_beam_details=True)
        return [first, second]

    both.check(make)


TEXTS: dict[str, dict[str, Any]] = {
    "beams": {},
    "stops": {"stop_token_ids": (2, 3, 40, 290), "join": 2},
    "suppressed": {"special_token_ids": (0, 1, 2, 3, 130, 280)},
    "noise": {"plan": LevelPlan((), noise=True, seed=5)},
    "noise of some": {"plan": LevelPlan((), noise=True, seed=5), "special_token_ids": (0, 1, 2, 3, 130, 280)},
    "few alike": {"plan": LevelPlan((), cap=2)},
    "given up": {"plan": LevelPlan((), margin=1.0, mass=0.9)},
    "traced": {"top_logprobs": 5, "return_beam_details": True},
}


@pytest.mark.parametrize("kind", TEXTS)
def test_over_any_token(both: Both, kind: str) -> None:
    first, second = make_search(prompt(both, 3), 20, levels=5), make_search(prompt(both, 4, 70), 40, 9, levels=4)
    both.check(lambda _: [replace(first, **TEXTS[kind]), second])


def test_drawn_texts(both: Both) -> None:
    """Of the same noise; what bends the logits looks at all of them."""
    bent = Sampling(seed=1, top_p=0.9, top_k=50, frequency_penalty=1.0, repetition_penalty=1.2, logit_bias={200: 3.0})
    drawn = [make_search(prompt(both, 5), 4, 4, levels=6), make_search(prompt(both, 6), 3, 3, levels=5)]
    both.check(lambda _: [replace(drawn[0], sampling=bent), replace(drawn[1], sampling=Sampling(seed=2))])


def test_prompts_that_begin_alike_share_pages(both: Both) -> None:
    """The leader alone keeps books; the followers' pages hold the same."""
    common = prompt(both, 7, 3 * PAGE)
    hits = []
    for seed in (8, 9):
        tokens = np.concatenate([common, prompt(both, seed, 10)]).astype(np.int32)
        search = make_search(tokens, 8, levels=3)
        found = both.check(lambda _, search=search, tokens=tokens: [replace(search, prefix=Prefix.of(tokens, PAGE))])
        hits.append(found[0].cached_tokens)
    assert hits == [0, 3 * PAGE]
    mixed = [prompt(both, 12), np.append(common, prompt(both, 13, 5)), prompt(both, 14, 9)]
    searches = [make_search(tokens, 4 + b, levels=3) for b, tokens in enumerate(mixed)]
    for search in searches:
        search.prefix = Prefix.of(search.token_ids, PAGE)
    assert [result.cached_tokens for result in both.check(lambda _: searches)] == [0, 3 * PAGE, 0]


def test_shorter_waves_pass_a_long_one(both: Both) -> None:
    """What the leader decides between pieces the follower hears."""
    long, short = make_search(prompt(both, 10), 6, 4, levels=28), make_search(prompt(both, 11), 9, levels=3)
    expected = both.run(both.whole, [long]), both.run(both.whole, [short])
    passed: list[list[SearchResult]] = []
    asked = iter((True, False, True))
    between = Between(
        others_wait=lambda: next(asked),
        run_others=lambda: passed.extend(both.run(both.divided, [short]) for _ in range(2)),  # type: ignore[arg-type]
    )
    found = both.run(both.divided, [long], between)
    assert len(passed) == 4
    assert_same(expected[0], found)
    for results in passed:
        assert_same(expected[1], results)


def test_texts_are_followed_on_the_leader(both: Both) -> None:
    """It looks at what it has; the other rank need not know."""
    search = replace(make_search(prompt(both, 15), 3, 3, levels=28), sampling=Sampling(seed=1))
    looks: list[SearchResult] = []
    job = Job(replace(search), 0.0, None, grown=looks.append)
    between = Between(grown=lambda growth: growth.tell([job], 0.0))
    (outcome,) = both.divided.launch([job], between=between).outcomes()
    assert_same(both.run(both.whole, [search]), [outcome.result])  # type: ignore[list-item]
    assert [[len(text.token_ids) for text in look.sequences] for look in looks] == [[8] * 3, [16] * 3, [24] * 3]


def test_a_wave_that_nobody_wants_any_more(both: Both) -> None:
    """It is cut short on all ranks, and the next one runs."""
    job = Job(make_search(prompt(both, 12), 6, levels=28), 0.0, None)
    job.cancelled = True
    both.divided.run([job])
    search = make_search(prompt(both, 13), 6, levels=3)
    both.check(lambda _: [search])


def test_catalogs_come_and_go(both: Both) -> None:
    """While another thread fills them, waves run over the version before."""
    for items in (400, 90, 700):
        version = both.load(num_items=items, seed=items)
        both.divided.reserve(version)
        filling = threading.Thread(target=both.divided.upload, args=(version,))
        filling.start()
        both.check(lambda catalog: [make_search(prompt(both, 14), 20, catalog=catalog)])
        filling.join(20)
        both.divided.add_catalog(version)
        both.whole.add_catalog(other := both.load(num_items=items, seed=items))
        both.catalogs = {both.divided: version, both.whole: other}
        both.check(lambda catalog: [make_search(prompt(both, 14), 20, catalog=catalog)])


def test_the_collectives_are_traced_whole(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader runs what a compiler made of the functions that have any; the follower runs them as they are."""
    torch._dynamo.reset()

    def traced(function: Any) -> Any:
        return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")

    monkeypatch.setattr(both.divided.core, "programs", replace(EAGER, forward_rows=traced(forward_rows)))
    for function in (vocabulary_candidates, catalog_candidates):
        monkeypatch.setattr(f"widebeam.engine.advance.{function.__name__}", traced(function))
    both.check(lambda _: [make_search(prompt(both, 15), 20, levels=1)])
    both.check(lambda c: [replace(make_search(prompt(both, 16), (20, 30, 5), catalog=c), normalizer="vocab")])
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3 does not divide"),
        ({"tensor_parallel_size": 2, "device": "cuda:0"}, "--device cuda:0 is one device"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, "rank 1 would run on cuda:1, but torch sees"),
        ({"tensor_parallel_size": 2, "prefix_cache_host_gib": 1.0}, "--prefix-cache-host-gib 1 is for one GPU"),
        ({"tensor_parallel_size": 0}, "bad setting"),
    ],
)
async def test_an_engine_starts_no_process_for_what_cannot_work(
    divisible: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(Followers, "start", lambda _: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match=message):
        await Engine(str(divisible), **settings).start()


def test_torchrun_decides_which_rank_a_process_is() -> None:
    config = EngineConfig(model="x", tensor_parallel_size=2)
    assert torchrun_place(config, {}) is None
    assert torchrun_place(EngineConfig(model="x"), {"RANK": "1", "WORLD_SIZE": "4"}) is None
    assert torchrun_place(config, {"RANK": "1", "WORLD_SIZE": "2"}) == Place(1, 2, None)
    with pytest.raises(ConfigError, match=r"torchrun started 4 processes"):
        torchrun_place(config, {"RANK": "1", "WORLD_SIZE": "4"})


@pytest.mark.parametrize("both", [{"kv_cache_dtype": "fp8"}], ids=["float8 pages"], indirect=True)
def test_float8_pages(both: Both) -> None:
    """Of the same scales, read as they are written, and shared. Last: another pair of runtimes."""
    assert both.divided.core.context.pools.k.dtype == torch.float8_e4m3fn
    layers = range(both.whole.core.model.config.num_layers)
    scales = [[each.core.context.scales(layer) for layer in layers] for each in (both.divided, both.whole)]
    assert scales[0] == scales[1]
    test_prompts_that_begin_alike_share_pages(both)
