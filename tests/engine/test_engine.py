"""The engine's promises: one outcome for each request, clear refusals, nothing left behind."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from widebeam import Engine, EngineConfig, SearchParams
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filter_spec import Filters
from widebeam.constraints.filters import allowed_items
from widebeam.errors import (
    Aborted,
    CatalogError,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineError,
    InvalidRequest,
    NotFound,
    OutOfMemory,
    Overloaded,
)
from widebeam.policies import PolicySpec

SMALL: dict[str, Any] = {"device": "cpu", "max_wave_rows": 256, "max_beam_width": 128, "max_levels": 64}


@pytest.fixture(scope="module")
async def engine(checkpoint: Path, catalog_file: Path) -> AsyncIterator[Engine]:
    async with Engine(str(checkpoint), catalog=str(catalog_file), beam_kv_tokens=2048, **SMALL) as engine:
        yield engine


@pytest.fixture(autouse=True)
async def nothing_leaks(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """After every test of the shared engine: no page, slot or waiting request is left, and it still answers."""
    yield
    if "engine" in request.fixturenames:
        engine: Engine = request.getfixturevalue("engine")
        await engine.check_integrity()
        assert engine.stats().requests_in_flight == 0
        assert (await engine.submit([5], SearchParams(n=1, beam_width=2))).sequences


BAD: dict[str, tuple[Any, dict[str, Any], str, str | None]] = {
    "empty prompt": ([], {}, "empty_prompt", "input_ids"),
    "token over the vocabulary": ([5, 64], {}, "token_out_of_vocabulary", "input_ids"),
    "negative token": ([5, -1], {}, "token_out_of_vocabulary", "input_ids"),
    "huge token": ([2**40], {}, "token_out_of_vocabulary", "input_ids"),
    "not tokens": ([0.5], {}, "invalid_request", "input_ids"),
    "nested": ([[1], [2]], {}, "invalid_request", "input_ids"),
    "ragged": ([1, [2]], {}, "invalid_request", "input_ids"),
    "penalty out of range": ([5], {"length_penalty": 11.0}, "invalid_request", "length_penalty"),
    "context too long": ([5] * 510, {}, "context_too_long", "input_ids"),
    "width 0": ([5], {"beam_width": 0}, "invalid_request", "beam_width"),
    "width over the server's limit": ([5], {"beam_width": 129}, "beam_too_wide", "beam_width"),
    "width over everybody's limit": ([5], {"beam_width": 5001}, "invalid_request", "beam_width"),
    "width over the vocabulary": ([5], {"beam_width": 65, "catalog": "none"}, "beam_too_wide", "beam_width"),
    "n over the width": ([5], {"beam_width": 4, "n": 5}, "invalid_request", "n"),
    "n 0": ([5], {"n": 0}, "invalid_request", "n"),
    "unknown policy": ([5], {"policy": PolicySpec(name="shceduled")}, "unknown_policy", "policy.name"),
    "schedule without widths": ([5], {"policy": PolicySpec(name="scheduled")}, "invalid_request", "policy.widths"),
    "schedule too long": (
        [5], {"policy": PolicySpec(name="scheduled", widths=(1, 2, 3, 4))}, "invalid_request", "policy.widths",
    ),
    "schedule too wide": (
        [5], {"policy": PolicySpec(name="scheduled", widths=(1, 200, 3))}, "beam_too_wide", "policy.widths",
    ),
    "schedule against width": (
        [5], {"policy": PolicySpec(name="scheduled", widths=(4, 8)), "beam_width": 9}, "invalid_request", "beam_width",
    ),
    "widths with fixed": ([5], {"policy": PolicySpec(name="fixed", widths=(4,))}, "invalid_request", "policy.widths"),
    "unknown catalog": ([5], {"catalog": "itmes"}, "unknown_catalog", "catalog"),
    "shallower than the catalog": ([5], {"max_new_tokens": 2}, "depth_mismatch", "max_new_tokens"),
    "over the level limit": ([5], {"max_new_tokens": 65, "catalog": "none"}, "invalid_request", "max_new_tokens"),
    "normaliser without catalog": ([5], {"normalizer": "level", "catalog": "none"}, "invalid_request", "normalizer"),
    "unknown normaliser": ([5], {"normalizer": "softmax"}, "invalid_request", "normalizer"),
    "stop token over the vocabulary": ([5], {"stop_token_ids": (64,)}, "token_out_of_vocabulary", "stop_token_ids"),
    "NaN": ([5], {"length_penalty": math.nan}, "invalid_request", "length_penalty"),
    "infinity": ([5], {"length_penalty": -math.inf}, "invalid_request", "length_penalty"),
    "more beam tokens than the pool": (
        [5], {"catalog": "none", "beam_width": 60, "max_new_tokens": 60}, "search_too_large", "max_new_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_names_the_field(engine: Engine, case: str) -> None:
    tokens, fields, code, param = BAD[case]
    with pytest.raises((InvalidRequest, NotFound)) as caught:
        await engine.submit(tokens, SearchParams(**fields))
    assert caught.value.code == code
    assert caught.value.param == param
    assert caught.value.status in (400, 404)


async def test_what_has_no_effect_is_said(engine: Engine) -> None:
    result = await engine.submit([5], SearchParams(beam_width=2, stop_token_ids=(3,)))
    assert "stop_token_ids" in result.warnings[0]


async def test_max_new_tokens_beyond_the_catalog_ends_with_the_item(engine: Engine) -> None:
    result = await engine.submit([5], SearchParams(beam_width=4, n=4, max_new_tokens=50))
    assert {len(s.token_ids) for s in result.sequences} == {tiny.LEVELS}
    assert {s.finish_reason for s in result.sequences} == {"item"}


async def test_recommend_resolves_items_in_declared_order(engine: Engine) -> None:
    catalog = engine.catalogs.get(None)
    assert catalog is not None
    made = await engine.recommend(
        history=["item-3", "item-999", "item-5"], n=60, fields=["title", "popularity"],
        params=SearchParams(beam_width=64),
    )  # fmt: skip
    assert len(made.items) == catalog.num_items and len({item.id for item in made.items}) == 60
    assert made.unknown_items == ["item-999"] and made.num_history == 2
    assert [item.score for item in made.items] == sorted((item.score for item in made.items), reverse=True)
    for one, two in zip(made.items, made.items[1:], strict=False):
        assert one.metadata["title"] == "Title " + str(one.id).split("-")[1]
        if one.sid == two.sid:
            assert one.metadata["popularity"] >= two.metadata["popularity"]
    with pytest.raises(InvalidRequest, match="item-999"):
        await engine.recommend(history=["item-999"], unknown_items="refuse")
    with pytest.raises(InvalidRequest, match="exactly one"):
        await engine.recommend(history=["item-3"], input_ids=[1])
    with pytest.raises(InvalidRequest, match="colour"):
        await engine.recommend(history=["item-3"], fields=["colour"])


async def test_every_way_to_give_a_prompt_is_one_prompt(engine: Engine) -> None:
    text = "watched <a_3><b_1><c_2> next"
    ids = await engine.encode(text)
    chat = [{"role": "user", "content": text}]
    by_text = await engine.recommend(prompt=text)
    assert by_text.items == (await engine.recommend(input_ids=ids)).items
    assert len((await engine.recommend(messages=chat)).items) == 10
    assert by_text.result.prompt_tokens == len(ids)


async def test_cancelling_frees_the_request(engine: Engine) -> None:
    tasks = [asyncio.create_task(engine.submit([5] * 300, SearchParams(beam_width=100))) for _ in range(8)]
    await asyncio.sleep(0)
    assert engine.stats().requests_in_flight == 8
    for task in tasks[1:]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert engine.stats().requests_in_flight == 0
    assert not isinstance(outcomes[0], BaseException)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[1:])


@pytest.mark.parametrize("allow", [(), None])
async def test_aborting_waits_for_no_filter(
    engine: Engine, allow: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the filter, once it is found, would leave anything or not."""
    looked, go_on = threading.Event(), threading.Event()

    def slow(catalog: Catalog, filters: Filters) -> Any:
        looked.set()
        assert go_on.wait(20)
        return allowed_items(catalog, filters)

    monkeypatch.setattr("widebeam.engine.searching.allowed_items", slow)
    params = SearchParams(beam_width=4, request_id="slow", filters=Filters(allow=allow, deny=()))
    task = asyncio.create_task(engine.submit([5], params))
    try:
        assert await asyncio.to_thread(looked.wait, 20)
        assert engine.abort("slow") == 1
        with pytest.raises(Aborted):
            await asyncio.wait_for(task, 20)
        assert not go_on.is_set() and engine.stats().requests_in_flight == 0
    finally:
        go_on.set()


async def test_a_deadline_ends_a_request(engine: Engine) -> None:
    blockers = [
        asyncio.create_task(engine.submit([5] * 400, SearchParams(max_new_tokens=60, beam_width=30, catalog="none")))
        for _ in range(4)
    ]
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await engine.submit([5], SearchParams(timeout_ms=1, max_new_tokens=60, beam_width=30, catalog="none"))
    await asyncio.gather(*blockers)


async def test_too_many_requests_are_refused_at_once(checkpoint: Path) -> None:
    async with Engine(str(checkpoint), max_waiting_requests=2, **SMALL) as engine:
        tasks = [asyncio.create_task(engine.submit([5] * 50, SearchParams(max_new_tokens=9))) for _ in range(6)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
        assert len(refused) == 4 and refused[0].status == 429 and refused[0].retry_after_s
        assert engine.stats().requests_refused == 4
        await engine.check_integrity()


async def test_draining_answers_what_was_accepted(checkpoint: Path) -> None:
    async with Engine(str(checkpoint), **SMALL) as engine:
        accepted = asyncio.create_task(engine.submit([5, 6], SearchParams(max_new_tokens=9)))
        await asyncio.sleep(0)
        engine.begin_drain()
        with pytest.raises(Draining):
            await engine.submit([5], SearchParams())
        assert (await accepted).sequences
    with pytest.raises(EngineDead):
        await engine.submit([5], SearchParams())


async def test_a_stopped_engine_answers_what_still_waits(checkpoint: Path) -> None:
    engine = Engine(str(checkpoint), max_wave_requests=1, **SMALL)
    await engine.start()
    tasks = [asyncio.create_task(engine.submit([5] * 200, SearchParams(max_new_tokens=60))) for _ in range(5)]
    await asyncio.sleep(0)
    await engine.stop()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(outcome, Draining) for outcome in outcomes)
    assert all(isinstance(outcome, Draining) or outcome.sequences for outcome in outcomes)  # type: ignore[union-attr]


FAULTS = {
    "a bug": (ValueError("boom"), EngineError),
    "out of memory": (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failing_wave_fails_alone(engine: Engine, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model raises in the middle of a wave: its requests get an error, leases come back, the next wave runs."""
    error, kind = FAULTS[fault]
    model = engine._runtime.core.model

    def raising(*_: Any) -> None:
        raise error

    handle = model.layers.register_forward_pre_hook(raising)
    try:
        outcomes = await asyncio.gather(
            *(engine.submit([5, 6, 7], SearchParams(beam_width=4)) for _ in range(3)), return_exceptions=True
        )
    finally:
        handle.remove()
    assert all(isinstance(outcome, kind) for outcome in outcomes)
    assert not any("boom" in str(outcome) for outcome in outcomes), "internals leak into the message"


async def test_a_dead_gpu_thread_answers_everybody(checkpoint: Path) -> None:
    async with Engine(str(checkpoint), **SMALL) as engine:
        model = engine._runtime.core.model

        def raising(*_: Any) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        model.layers.register_forward_pre_hook(raising)
        tasks = [engine.submit([5] * 20, SearchParams(beam_width=4)) for _ in range(20)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, EngineDead) for outcome in outcomes)
        assert engine.state == "dead"
        with pytest.raises(EngineDead):
            await engine.submit([5], SearchParams())


async def test_logits_that_are_not_numbers_fail_the_request_alone(checkpoint: Path) -> None:
    async with Engine(str(checkpoint), **SMALL) as engine:
        model = engine._runtime.core.model
        model.embed_tokens.data[11] = math.nan  # an untied copy is not needed: every logit of token 11 breaks
        with pytest.raises(EngineError) as caught:
            await engine.submit([5, 6], SearchParams(beam_width=4, max_new_tokens=2))
        assert caught.value.code == "non_finite_logits"
        await engine.check_integrity()


def test_blocking_generate(checkpoint: Path, catalog_file: Path) -> None:
    engine = Engine(str(checkpoint), catalog=str(catalog_file), **SMALL)
    one = engine.generate("watched <a_3><b_1><c_2> next", beam_width=8, n=3)
    assert not isinstance(one, list) and len(one.sequences) == 3
    many = engine.generate([[5, 6], "watched next"], beam_width=8, n=2)
    assert isinstance(many, list) and [len(result.sequences) for result in many] == [2, 2]
    with pytest.raises(InvalidRequest, match="beam_with"):
        engine.generate([5], beam_with=3)
    engine.close()


START: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such device": ({"device": "tpu"}, ConfigError, "tpu"),
    "no such folder": ({"model": "./nowhere"}, CheckpointError, "nowhere"),
    "no such catalog": ({"catalog": "nowhere.jsonl"}, CatalogError, "nowhere"),
    "rows under width": ({"max_wave_rows": 4, "max_beam_width": 8}, ConfigError, "max-wave-rows"),
    "longer than the model": ({"max_context_len": 10_000}, ConfigError, "max-context-len"),
}


@pytest.mark.parametrize("case", START)
async def test_an_engine_that_cannot_start_says_why(checkpoint: Path, case: str) -> None:
    fields, kind, words = START[case]
    engine = Engine(str(fields.pop("model", checkpoint)), **(SMALL | fields))
    with pytest.raises(kind, match=words):
        await engine.start()


@pytest.mark.parametrize("fields", [{"page_size": 0}, {"max_beam_width": 6000}, {"dtype": "int8"}, {"modle": 1}])
def test_bad_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Engine("x", **fields)


async def test_catalog_tokens_must_be_in_the_vocabulary(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"item_id": 1, "sid": ["<a_1>", "<z_1>"]}\n{"item_id": 2, "sid": ["<a_1>"]}')
    with pytest.raises(CatalogError, match=r"bad.jsonl:1.*<z_1>"):
        await Engine(str(checkpoint), catalog=str(tmp_path / "bad.jsonl"), **SMALL).start()
    (tmp_path / "ids.jsonl").write_text('{"item_id": 1, "sid": [3, 64]}')
    with pytest.raises(CatalogError, match=r"ids.jsonl:1.*64"):
        await Engine(str(checkpoint), catalog=str(tmp_path / "ids.jsonl"), **SMALL).start()


async def test_width_5000(tmp_path: Path) -> None:
    """As wide as a beam may be, against the exhaustive answer: every SID is scored by Hugging Face, best 5000 kept."""
    from tests import hf

    folder = tiny.save_checkpoint(tmp_path / "m", levels=2, codes=80, scale=0.3)
    rows = [f'{{"item_id": {i}, "sid": ["<a_{i // 80}>", "<b_{i % 80}>"]}}' for i in range(6400)]
    (tmp_path / "items.jsonl").write_text("\n".join(rows))
    config = EngineConfig(model=str(folder), catalog=str(tmp_path / "items.jsonl"), device="cpu")
    async with Engine(config) as engine:
        result = await engine.submit([5, 6, 7, 40], SearchParams(n=5000, beam_width=5000, normalizer="vocab"))
        await engine.check_integrity()
    first = hf.logits(folder, (5, 6, 7, 40)).log_softmax(-1)
    a, b = np.arange(80) + len(tiny.WORDS), np.arange(80) + len(tiny.WORDS) + 80
    exhaustive = {
        (int(x), int(y)): float(first[x] + second)
        for x in a
        for y, second in zip(b, hf.logits(folder, (5, 6, 7, 40, int(x))).log_softmax(-1)[b].tolist(), strict=True)
    }
    best = sorted(exhaustive.values(), reverse=True)[:5000]
    assert len({tuple(s.token_ids) for s in result.sequences}) == 5000
    for sequence, expected in zip(result.sequences, best, strict=True):
        assert sequence.cum_logprob == pytest.approx(expected, abs=1e-4)
        assert sequence.cum_logprob == pytest.approx(exhaustive[tuple(sequence.token_ids)], abs=1e-4)  # type: ignore[index]
