"""Texts that are seen while they grow, and ended when that is enough."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.warm_waves import make_runtime, make_search
from widebeam import Engine, SearchParams
from widebeam.engine.job import Job
from widebeam.engine.request import Sampling, SearchResult, Sequence
from widebeam.engine.runtime import Runtime
from widebeam.engine.search import Between
from widebeam.engine.wave import Search
from widebeam.errors import Aborted

PROMPT = [5, 9, 33, 12, 40, 9]
LENGTH = 40
TEXTS: dict[str, SearchParams] = {
    "greedy": SearchParams(n=1, max_new_tokens=LENGTH, ignore_eos=True),
    "greedy with stops": SearchParams(n=1, max_new_tokens=LENGTH, stop_token_ids=tuple(range(12))),
    "drawn": SearchParams(n=3, max_new_tokens=LENGTH, sampling=Sampling(seed=1), ignore_eos=True),
    "drawn with stops": SearchParams(n=5, max_new_tokens=LENGTH, sampling=Sampling(seed=2), stop_token_ids=(3, 4)),
    "drawn and short": SearchParams(n=2, max_new_tokens=LENGTH - 15, sampling=Sampling(seed=3), ignore_eos=True),
}


@pytest.fixture(scope="module")
async def engine(checkpoint: Path) -> AsyncIterator[Engine]:
    async with Engine(
        str(checkpoint), device="cpu", max_wave_rows=128, max_beam_width=16, max_levels=64, beam_kv_tokens=4096
    ) as engine:
        yield engine


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def runtime(request: pytest.FixtureRequest, checkpoint: Path) -> Runtime:
    sizes = {"max_levels": 64, "max_wave_rows": 128, "max_beam_width": 64, "beam_kv_tokens": 6000}
    return make_runtime(checkpoint, device=request.param, warmup="none", **sizes)


@pytest.fixture(autouse=True)
async def nothing_leaks(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine: Engine = request.getfixturevalue("engine")
        await engine.check_integrity()
        assert engine.stats().requests_in_flight == 0


class Seen(list[SearchResult]):
    """Keeps what it sees, and has enough after so many looks."""

    def __init__(self, enough: int | None = None) -> None:
        self._enough = enough

    async def __call__(self, so_far: SearchResult) -> bool:
        self.append(so_far)
        return len(self) == self._enough


def searches() -> list[Search]:
    """Of two kinds that share no wave; of different lengths, widths and ends."""
    prompts = np.random.default_rng(0).integers(0, 60, (5, 30))
    greedy = [
        make_search(prompts[0], 1, levels=40),
        replace(make_search(prompts[1], 1, levels=33, stops=tuple(range(8))), join=1),
    ]
    drawn = [
        replace(make_search(prompt, n, n, levels=levels, stops=stops), sampling=Sampling(seed=n))
        for prompt, n, levels, stops in zip(prompts[2:], (3, 5, 2), (40, 38, 17), ((), (3, 4), (5,)), strict=True)
    ]
    return [*greedy, make_search(prompts[3], 6, 4, levels=35), *drawn]


@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_texts_are_seen_as_they_will_be(runtime: Runtime, kind: str) -> None:
    """Behind each piece but the last, whether shorter waves pass or not; beams beside them are not touched."""
    of_kind = [search for search in searches() if (search.sampling is not None) == (kind == "drawn")]
    jobs = [Job(search, 0.0, None) for search in of_kind]
    seen: dict[int, list[SearchResult]] = {place: [] for place, job in enumerate(jobs) if job.search.is_text}
    for place, looks in seen.items():
        jobs[place].grown = looks.append

    def run_others() -> None:
        runtime.run([Job(make_search(np.arange(20), 30, 30, levels=6), 0.0, None)])

    between = Between(lambda: True, lambda: True, run_others, grown=lambda growth: growth.tell(jobs, 0.0))
    for _ in range(3):  # on a GPU run, captured, and replayed, which changes no bit any more
        plain = [Job(replace(search, lease=None), 0.0, None) for search in of_kind]
        alone = [outcome.result for outcome in runtime.run(plain)]
    watched = [outcome.result for outcome in runtime.launch(jobs, between=between).outcomes()]
    for place, (with_looks, without) in enumerate(zip(watched, alone, strict=True)):
        assert isinstance(with_looks, SearchResult) and isinstance(without, SearchResult)
        assert with_looks.sequences == without.sequences
        if place in seen:
            assert len(seen[place]) == 4  # behind 8, 16, 24 and 32 levels
            for count, so_far in enumerate(seen[place], 1):
                assert len(so_far.sequences) == len(without.sequences)
                for text, whole in zip(so_far.sequences, without.sequences, strict=True):
                    check_growth(text, whole, 8 * count)
    assert sum(job.search.is_text for job in jobs) == len(seen) == {"greedy": 2, "drawn": 3}[kind]
    runtime.check_integrity()


def check_growth(text: Sequence, whole: Sequence, level: int) -> None:
    """That a text of so many levels is the beginning of what it becomes, or all of it."""
    length = min(level, len(whole.token_ids))
    assert text.token_ids == whole.token_ids[:length]
    assert text.logprobs == whole.logprobs[:length]
    assert text.cum_logprob == pytest.approx(sum(whole.logprobs[:length]), abs=1e-5)
    if length < len(whole.token_ids):
        assert text.finish_reason is None
        assert text.score == pytest.approx(text.cum_logprob / length)
    else:
        assert text == whole


async def test_following_changes_no_result(engine: Engine) -> None:
    alone = {kind: await engine.submit(PROMPT, params) for kind, params in TEXTS.items()}
    seen = {kind: Seen() for kind in TEXTS}
    *followed, quiet = await asyncio.gather(
        *(engine.submit(PROMPT, params, follow=seen[kind]) for kind, params in TEXTS.items()),
        engine.submit(PROMPT, TEXTS["drawn"]),
    )
    assert quiet.sequences == alone["drawn"].sequences
    for kind, result in zip(TEXTS, followed, strict=True):
        assert result.sequences == alone[kind].sequences
        for so_far in seen[kind]:
            assert (so_far.request_id, so_far.prompt_tokens) == (result.request_id, len(PROMPT))
            for text, whole in zip(so_far.sequences, result.sequences, strict=True):
                check_growth(text, whole, max(len(text.token_ids) for text in so_far.sequences))
    assert any(seen.values())


@pytest.mark.parametrize("kind", TEXTS)
async def test_a_search_ends_when_it_is_enough(engine: Engine, kind: str) -> None:
    whole = await engine.submit(PROMPT, TEXTS[kind])
    seen = Seen(enough=1)
    result = await engine.submit(PROMPT, TEXTS[kind], follow=seen)
    if max(len(text.token_ids) for text in whole.sequences) > 8:
        assert len(seen) == 1 and result is seen[0]
        assert 0 < result.timing_ms.prefill < result.timing_ms.total
        assert result.completion_tokens < whole.completion_tokens
    else:
        assert result.sequences == whole.sequences and not seen


async def test_who_looks_slowly_misses_some(engine: Engine) -> None:
    looks: list[int] = []

    async def slowly(so_far: SearchResult) -> bool:
        looks.append(len(so_far.sequences[0].token_ids))
        await done.wait()  # until another search, which waits behind this one, has ended
        return False

    done = asyncio.Event()
    params = TEXTS["drawn"]
    slow = asyncio.create_task(engine.submit(PROMPT, params, follow=slowly))
    await asyncio.sleep(0)
    quick = await engine.submit(PROMPT, params)
    done.set()
    assert (await slow).sequences == quick.sequences
    assert looks[0] == 8 and len(looks) <= 2


async def test_a_followed_search_ends_as_others_do(engine: Engine) -> None:
    async def aborts(so_far: SearchResult) -> bool:
        assert engine.abort(so_far.request_id) == 1
        return True

    with pytest.raises(Aborted):
        await engine.submit(PROMPT, TEXTS["drawn"], follow=aborts)

    async def breaks(so_far: SearchResult) -> bool:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        await engine.submit(PROMPT, TEXTS["drawn"], follow=breaks)


@pytest.mark.parametrize("params", [SearchParams(n=2, beam_width=2), SearchParams(n=1, beam_width=4)])
async def test_beams_cannot_be_followed(engine: Engine, params: SearchParams) -> None:
    with pytest.raises(ValueError, match="only texts"):
        await engine.submit(PROMPT, params, follow=Seen())
