"""What happens when somebody cancels, stops, fails or is late at an awkward moment."""

from __future__ import annotations

import asyncio
import gc
import math
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.http.service import until
from widebeam import Engine, SearchParams
from widebeam.errors import (
    CatalogError,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineError,
    InvalidRequest,
    NotReady,
)

SMALL: dict[str, Any] = {
    "device": "cpu",
    "max_wave_rows": 256,
    "max_beam_width": 128,
    "max_levels": 512,
    "beam_kv_tokens": 8192,
}
LONG = SearchParams(max_new_tokens=450, beam_width=8, catalog="none", ignore_eos=True)


async def started(engine: Engine, task: asyncio.Task[Any]) -> None:
    """Wait until the GPU thread has taken up the task's wave."""
    before = engine.stats().waves
    while engine.stats().waves == before:
        assert not task.done(), task.result()
        await asyncio.sleep(0.001)


async def test_cancelling_a_call_to_the_gpu_thread_harms_nobody(checkpoint: Path) -> None:
    async with Engine(str(checkpoint), **SMALL) as engine:
        running = asyncio.create_task(engine.submit([5] * 300, SearchParams(max_new_tokens=30, beam_width=50)))
        await started(engine, running)
        check = asyncio.create_task(engine.check_integrity())
        await asyncio.sleep(0)
        check.cancel()
        assert (await running).sequences
        assert (await engine.submit([5], SearchParams(max_new_tokens=2))).sequences


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
async def test_a_thread_that_dies_in_a_wave_answers_its_jobs(checkpoint: Path, error: BaseException) -> None:
    async with Engine(str(checkpoint), **SMALL) as engine:

        def raising(*_: Any) -> None:
            raise error

        engine._runtime.core.model.layers.register_forward_pre_hook(raising)
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(
                *(engine.submit([5], SearchParams(max_new_tokens=2)) for _ in range(3)), return_exceptions=True
            )
        assert all(isinstance(outcome, EngineDead) for outcome in outcomes)
        with pytest.raises(EngineDead):  # the thread has ended: a call is answered all the same
            await engine.check_integrity()


async def test_a_device_that_breaks_between_waves_ends_the_engine(checkpoint: Path) -> None:
    async with Engine(str(checkpoint), **SMALL) as engine:

        def broken(_: Any) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        with pytest.raises(torch.AcceleratorError):
            await asyncio.wrap_future(engine._worker.call(broken))
        async with asyncio.timeout(20):
            await engine.died.wait()
        assert engine.state == "dead"
        with pytest.raises(EngineDead):
            await engine.submit([5], SearchParams(max_new_tokens=2))


async def test_stopping_ends_a_long_search_at_its_next_piece(checkpoint: Path) -> None:
    engine = Engine(str(checkpoint), **SMALL)
    await engine.start()
    running = asyncio.create_task(engine.submit([5] * 20, LONG))
    await started(engine, running)
    await engine.stop()
    with pytest.raises(Draining):
        await running
    assert int(engine._runtime.core.state.level) < 450
    engine._runtime.check_integrity()


async def test_a_search_that_nobody_wants_is_cut_short(checkpoint: Path) -> None:
    async with Engine(str(checkpoint), **SMALL) as engine:
        running = asyncio.create_task(engine.submit([5] * 20, LONG))
        await started(engine, running)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.check_integrity()
        assert int(engine._runtime.core.state.level) < 450


async def test_a_search_cut_by_its_deadline_is_never_a_success(checkpoint: Path) -> None:
    """Even if the event loop is late to notice the deadline and the GPU thread is first."""
    async with Engine(str(checkpoint), **SMALL) as engine:
        for _ in range(5):
            running = asyncio.create_task(engine.submit([5] * 20, SearchParams(**(as_dict(LONG) | {"timeout_ms": 40}))))
            with pytest.raises(DeadlineExceeded):
                await started(engine, running)
                time.sleep(0.06)  # noqa: ASYNC251 (the loop is meant to be late)
                await running


def as_dict(params: SearchParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


async def test_a_finished_search_needs_no_more_levels(checkpoint: Path) -> None:
    """Greedy text that stops at its first token does not run 450 levels."""
    async with Engine(str(checkpoint), **SMALL) as engine:
        first = (await engine.submit([5, 6], SearchParams(max_new_tokens=1))).sequences[0].token_ids[0]
        result = await engine.submit([5, 6], SearchParams(max_new_tokens=450, stop_token_ids=(first,)))
        assert [(s.token_ids, s.finish_reason) for s in result.sequences] == [([first], "stop")]
        assert int(engine._runtime.core.state.level) <= 8


async def test_stopping_during_start(checkpoint: Path) -> None:
    engine = Engine(str(checkpoint), **SMALL)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineDead):
        await starting
    assert engine.state == "stopped"


async def test_submit_belongs_to_the_loop_that_started(checkpoint: Path) -> None:
    async with Engine(str(checkpoint), **SMALL) as engine:
        with pytest.raises(RuntimeError, match="event loop"):
            await asyncio.to_thread(asyncio.run, engine.submit([5], SearchParams()))
        with pytest.raises(RuntimeError, match="event loop"):
            await asyncio.to_thread(engine.generate, [5])


async def test_one_broken_request_does_not_fail_its_wave(checkpoint: Path) -> None:
    """Logits that stop being numbers at the second level, for one of two requests in a wave."""
    async with Engine(str(checkpoint), **SMALL) as engine:
        good, bad = [5, 6, 7], [30, 31]
        params = SearchParams(beam_width=1, max_new_tokens=3, ignore_eos=True)
        first = (await engine.submit(bad, params)).sequences[0].token_ids[0]
        clean = (await engine.submit(good, params)).sequences[0].token_ids
        assert first not in (*good, *clean)
        weight = engine._runtime.core.model.embed_tokens.data
        lm_head = weight.clone()
        engine._runtime.core.model.lm_head = torch.nn.Parameter(lm_head, requires_grad=False)
        weight[first] = math.nan  # decoding this token makes that row's hidden state NaN
        before = engine.stats().waves
        blocker = asyncio.create_task(engine.submit([5], params))
        await asyncio.sleep(0)
        one, two = await asyncio.gather(engine.submit(good, params), engine.submit(bad, params), return_exceptions=True)
        await blocker
        assert engine.stats().waves - before <= 2, "the two did not share a wave"
        assert isinstance(two, EngineError) and two.code == "non_finite_logits"
        assert not isinstance(one, BaseException) and one.sequences[0].token_ids == clean


async def test_stop_tokens_outside_the_vocabulary_of_a_checkpoint_are_unreachable(tmp_path: Path) -> None:
    import json

    from tests import tiny

    folder = tiny.save_checkpoint(tmp_path / "m", scale=0.3)
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": [2, 151_645]}))
    async with Engine(str(folder), **SMALL) as engine:
        assert (await engine.submit([5], SearchParams(beam_width=3, max_new_tokens=3))).sequences


async def test_catalogs_that_cannot_be_searched_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text('{"item_id": 1, "sid": [3, 4, 5, 6, 7]}')
    with pytest.raises(CatalogError, match="max-levels"):
        await Engine(str(checkpoint), catalog=str(tmp_path / "deep.jsonl"), **(SMALL | {"max_levels": 4})).start()
    with pytest.raises(CatalogError, match="no room"):
        await Engine(str(checkpoint), catalog=str(tmp_path / "deep.jsonl"), max_context_len=5, **SMALL).start()


@pytest.mark.parametrize(
    ("catalog", "words"),
    [
        ("nope.jsonl", "cannot read nope.jsonl"),
        ("broken.jsonl", "broken.jsonl:1: not a JSON object"),
        ("none=good.jsonl", "cannot be named 'none'"),
        ("file:///no/such/object.parquet", "there is no such object"),
    ],
)
async def test_a_wrong_catalog_ends_the_start_before_the_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, catalog: str, words: str
) -> None:
    """The weights could not be read either."""
    folder = shutil.copytree(checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "good.jsonl").write_text('{"item_id": 1, "sid": [3]}')
    with pytest.raises(CatalogError, match=words):
        await Engine(str(folder), catalog=catalog, **SMALL).start()
    with pytest.raises(CheckpointError):
        await Engine(str(folder), catalog="good.jsonl", **SMALL).start()


async def test_the_first_version_is_not_held_for_ever(checkpoint: Path, catalog_file: Path) -> None:
    """By what read it before the weights."""
    async with Engine(str(checkpoint), catalog=str(catalog_file), catalog_history=0, **SMALL) as engine:
        index = weakref.ref(engine.catalogs._current["items"].index)
        assert engine.live.stats.build_s["items"] > 0
        await engine.load_catalog(catalog_file)
        await until(lambda: gc.collect() >= 0 and index() is None)  # the GPU thread may hold its last call for a moment


async def test_versions_count_up_and_old_ones_leave_the_device(checkpoint: Path, catalog_file: Path) -> None:
    async with Engine(str(checkpoint), catalog=str(catalog_file), **SMALL) as engine:
        for version in (2, 3, 4):
            await engine.load_catalog(catalog_file)
            assert (await engine.submit([5], SearchParams(beam_width=2))).catalog_version == version
        await until(lambda: gc.collect() >= 0 and len(engine._runtime.core.catalogs) == 1)


async def test_a_recommendation_keeps_to_one_version_of_its_catalog(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its history, its search and its items, although another version comes while its prompt is made."""
    from tests import tiny

    files = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        files.append(tiny.save_catalog(tmp_path / str(seed) / "items.jsonl", seed=seed))
    wanted: dict[str, Any] = {"history": ["item-3", "item-17"], "n": 8}
    async with Engine(str(checkpoint), catalog=str(files[0]), **SMALL) as engine:
        before = await engine.recommend(**wanted)
        render = engine._prompts.render_history

        async def overtaken(*args: Any) -> Any:
            prompt = await render(*args)
            await engine.load_catalog(files[1])
            return prompt

        monkeypatch.setattr(engine._prompts, "render_history", overtaken)
        meanwhile = await engine.recommend(**wanted)
        monkeypatch.undo()
        after = await engine.recommend(**wanted)
    assert (meanwhile.result.catalog_version, after.result.catalog_version) == (1, 2)
    assert meanwhile.items == before.items
    assert [item.sid for item in after.items] != [item.sid for item in before.items]


async def test_a_prompt_that_the_pool_can_never_hold(checkpoint: Path) -> None:
    async with Engine(str(checkpoint), max_total_tokens=128, page_size=32, **SMALL) as engine:
        with pytest.raises(InvalidRequest, match="max-total-tokens"):
            await engine.submit([5] * 129, SearchParams(max_new_tokens=1))
        wave = [engine.submit([5 + i] * 100, SearchParams(max_new_tokens=2)) for i in range(4)]
        assert all(result.sequences for result in await asyncio.gather(*wave))


@pytest.mark.parametrize(
    "small",
    [{"max_total_tokens": 10, "page_size": 16}, {"max_waiting_tokens": 16, "page_size": 16}],
    ids=lambda s: next(iter(s)),
)
async def test_a_history_is_cut_to_what_the_pool_holds(
    checkpoint: Path, catalog_file: Path, small: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    history = [f"item-{number}" for number in range(1, 27)]
    async with Engine(str(checkpoint), catalog=str(catalog_file), **(SMALL | small)) as engine:
        made = await engine.recommend(history=history, n=2)
        newest = await engine.recommend(history=history[-made.num_history :], n=2)
        with pytest.raises(InvalidRequest):
            await engine.recommend(input_ids=[5] * 17, n=2)
    assert 0 < made.num_history < 26 and made.result.prompt_tokens <= 16
    assert made.items == newest.items and newest.result.warnings == []
    assert f"only the newest {made.num_history} of" in made.result.warnings[0]
    assert "prompts of over 16 tokens are refused" in caplog.text


async def test_a_start_says_what_there_is(
    checkpoint: Path, catalog_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "widebeam")
    settings = SMALL | {"max_total_tokens": 500, "page_size": 16}
    async with Engine(str(checkpoint), catalog=str(catalog_file), **settings) as engine:
        effective = engine.settings
    made = next(line for line in caplog.messages if line.startswith("settings that are not defaults"))
    assert all(words in made for words in ("device='cpu'", "max_wave_rows=256", "page_size=16", "max_total_tokens=500"))
    assert "hang_timeout_s" not in made
    assert any("context KV 32 pages, 512 tokens" in line for line in caplog.messages)
    assert any("catalog 'items' at version 1: 60 items" in line for line in caplog.messages)
    assert (effective["max_total_tokens"], effective["page_size"]) == (512, 16)


@pytest.mark.parametrize(
    "small", [{"beam_kv_tokens": 40}, {"max_waiting_rows": 40}, {"max_waiting_row_levels": 40}], ids=str
)
async def test_a_start_warns_of_pools_that_the_default_width_does_not_fit(
    checkpoint: Path, catalog_file: Path, small: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    flag = "--" + next(iter(small)).replace("_", "-")
    settings = SMALL | small
    async with Engine(str(checkpoint), catalog=str(catalog_file), **settings) as engine:
        (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
        assert "catalog 'items' that name no beam_width will be refused" in warning and flag in warning
        with pytest.raises(InvalidRequest) as refused:
            await engine.recommend(input_ids=[7])
        assert warning.endswith(refused.value.message)
    caplog.clear()
    async with Engine(str(checkpoint), catalog=str(catalog_file), **settings, default_beam_width=10) as engine:
        assert (await engine.recommend(input_ids=[7])).items
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_failed_start_leaves_the_blocking_engine_usable(checkpoint: Path) -> None:
    engine = Engine(str(checkpoint), catalog="nowhere.jsonl", **SMALL)
    for _ in range(2):
        with pytest.raises(CatalogError, match="nowhere"):
            engine.generate([5])
    engine.close()
    with pytest.raises(ConfigError, match="tpu"):
        Engine(str(checkpoint), **(SMALL | {"device": "tpu"})).generate([5])


def test_a_start_that_failed_can_be_tried_again(checkpoint: Path, catalog_file: Path, tmp_path: Path) -> None:
    late = tmp_path / "late.jsonl"
    engine = Engine(str(checkpoint), catalog=str(late), **SMALL)
    with pytest.raises(CatalogError, match="late"):
        engine.generate([5])
    late.write_bytes(catalog_file.read_bytes())
    assert engine.run(engine.recommend(input_ids=[5], n=1)).items
    engine.close()


async def test_an_engine_that_nobody_started_or_that_is_closed_says_so(checkpoint: Path) -> None:
    engine = Engine(str(checkpoint), **SMALL)
    with pytest.raises(NotReady, match="not started"):
        await engine.submit([5], SearchParams())
    async with engine:
        pass
    with pytest.raises(EngineDead, match="has stopped"):
        await engine.submit([5], SearchParams())
    with pytest.raises(EngineDead, match="stopped: one starts only once"):
        await engine.start()


@pytest.mark.parametrize("history", ["item-3", 3])
async def test_a_history_is_a_list(checkpoint: Path, catalog_file: Path, history: Any) -> None:
    async with Engine(str(checkpoint), catalog=str(catalog_file), **SMALL) as engine:
        with pytest.raises(InvalidRequest, match="expected a list of ids, got") as refused:
            await engine.recommend(history=history)
        assert refused.value.param == "history"


def test_a_batch_larger_than_the_queue(checkpoint: Path) -> None:
    engine = Engine(str(checkpoint), max_waiting_requests=3, **SMALL)
    results = engine.generate([[5, i] for i in range(10)], max_new_tokens=2)
    assert isinstance(results, list) and len(results) == 10
    with pytest.raises(InvalidRequest, match="empty"):
        engine.generate([])
    engine.close()
