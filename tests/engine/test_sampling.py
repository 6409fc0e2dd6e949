"""Drawn texts against Hugging Face's logits and logits processors; likely tokens and beams by level."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests import hf
from widebeam import Engine, SearchParams
from widebeam.constraints.filter_spec import Filters
from widebeam.engine.request import NO_CATALOG, Sampling, SearchResult
from widebeam.engine.sampling import filtered, gumbel
from widebeam.errors import InvalidRequest
from widebeam.policies import PolicySpec

EPS = 1e-4


async def draw(engine: Engine, prompt: list[int], n: int = 1, tokens: int = 6, **fields: Any) -> SearchResult:
    sampling = Sampling(**{name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields})
    given = {"ignore_eos": True, "catalog": NO_CATALOG} | fields
    return await engine.submit(prompt, SearchParams(n=n, max_new_tokens=tokens, sampling=sampling, **given))


def texts(result: SearchResult) -> list[list[int]]:
    return [sequence.token_ids for sequence in result.sequences]


PROMPT = [5, 9, 33, 12, 40, 9]


# the tensor functions


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (50, 0.7, 0.0), (7, 0.5, 0.0), (50, 1.0, 0.2), (9, 0.8, 0.1), (1, 1.0, 0.0)],
)
def test_filters_keep_what_hugging_face_keeps(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, 50) * 3
    judge = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)])
    if top_p < 1:
        judge.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        judge.append(MinPLogitsWarper(min_p))
    columns = [torch.full((20, 1), value) for value in (top_k, top_p, min_p)]
    kept = filtered(logits / temperature, columns[0], columns[1].double(), columns[2].double())
    expected = judge(torch.zeros(20, 1, dtype=torch.long), logits)
    assert torch.equal(kept.isfinite(), expected.isfinite())
    assert torch.equal(kept[kept.isfinite()], expected[expected.isfinite()])


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-40, 1e-300])
async def test_next_to_no_temperature_draws_the_most_probable_tokens(engine: Engine, temperature: float) -> None:
    greedy = await draw(engine, PROMPT, temperature=0.0)
    assert texts(await draw(engine, PROMPT, temperature=temperature, seed=1)) == texts(greedy)


def test_noise_is_gumbel_and_depends_on_everything() -> None:
    def noise(seed: int, text: int, level: int) -> torch.Tensor:
        return gumbel(torch.tensor([[seed]]), torch.tensor([[text]]), level, 20_000)[0]

    one = noise(7, 0, 0)
    assert stats.kstest(one.numpy(), stats.gumbel_r.cdf).pvalue > 0.01
    assert torch.equal(one, noise(7, 0, 0))
    for other in (noise(8, 0, 0), noise(7, 1, 0), noise(7, 0, 1), noise(-7, 0, 0), noise(6, 1, 0)):
        assert abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 0.03
        assert stats.kstest(other.numpy(), stats.gumbel_r.cdf).pvalue > 0.01


# whole texts


async def test_draws_follow_the_models_distribution(checkpoint: Path, engine: Engine) -> None:
    """The first two tokens of 2,000 texts, tempered and cut, by a chi-square test."""
    temperature, top_k = 1.5, 12
    drawn: Counter[tuple[int, ...]] = Counter()
    for seed in range(16):
        result = await draw(engine, PROMPT, n=125, tokens=2, temperature=temperature, top_k=top_k, seed=seed)
        drawn.update(tuple(text) for text in texts(result))
    warp = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)])

    def next_token(prefix: tuple[int, ...]) -> list[float]:
        row = hf.logits(checkpoint, (*PROMPT, *prefix))[None].float()
        return warp(torch.zeros(1, 1, dtype=torch.long), row).softmax(-1)[0].tolist()  # type: ignore[no-any-return]

    first = next_token(())
    expected = {
        (a, b): first[a] * p for a in range(len(first)) if first[a] for b, p in enumerate(next_token((a,))) if p
    }
    assert set(drawn) <= set(expected)
    total = drawn.total()
    common = [pair for pair, p in expected.items() if p * total >= 5]
    rest = 1 - sum(expected[pair] for pair in common)
    observed = [drawn[pair] for pair in common] + [total - sum(drawn[pair] for pair in common)]
    wanted = [expected[pair] * total for pair in common] + [rest * total]
    if wanted[-1] < 1:
        observed, wanted = observed[:-1], [value * total / sum(wanted[:-1]) for value in wanted[:-1]]
        total = sum(observed)
        wanted = [value * total / sum(wanted) for value in wanted]
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


async def test_logprobs_are_the_models_own(checkpoint: Path, engine: Engine) -> None:
    result = await draw(engine, PROMPT, n=5, temperature=2.0, top_p=0.9, frequency_penalty=1.0, seed=3)
    assert len(result.sequences) == 5
    for sequence in result.sequences:
        assert sequence.logprobs == pytest.approx(hf.rescore(checkpoint, PROMPT, sequence.token_ids), abs=EPS)
        assert sequence.cum_logprob == pytest.approx(sum(sequence.logprobs), abs=EPS)
        assert sequence.score == pytest.approx(sequence.cum_logprob / 6, abs=EPS)


async def test_a_seed_draws_the_same_texts_alone_and_in_company(engine: Engine) -> None:
    alone = texts(await draw(engine, PROMPT, n=4, seed=11))
    others = [draw(engine, [7, seed, 3], n=3, tokens=4 + seed % 3, seed=seed) for seed in range(6)]
    together, *_ = await asyncio.gather(draw(engine, PROMPT, n=4, seed=11), *others)
    assert texts(together) == alone
    assert texts(await draw(engine, PROMPT, n=6, seed=11))[:4] == alone
    assert texts(await draw(engine, PROMPT, n=4, seed=12)) != alone
    unseeded = [texts(await draw(engine, PROMPT, n=4)) for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    assert len({tuple(text) for text in alone}) > 1


def bent(checkpoint: Path, prompt: list[int], tokens: list[int], **fields: Any) -> list[float]:
    """Logits for the next token, by Hugging Face's repetition penalty and OpenAI's formula for the others."""
    row = hf.logits(checkpoint, (*prompt, *tokens))[None].float()
    if "repetition_penalty" in fields:
        row = RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"])(torch.tensor([[*prompt, *tokens]]), row)
    count = torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=row.shape[1])
    row = row - fields.get("frequency_penalty", 0) * count - fields.get("presence_penalty", 0) * (count > 0)
    for token, bias in fields.get("logit_bias", {}).items():
        row[0, token] += bias
    return row[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"frequency_penalty": 2.0}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5}, {"frequency_penalty": -2.0}, {"logit_bias": {17: 100.0}},
        {"logit_bias": {17: 1.0, 3: -2.0}},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {4: 2.0}},
    ],
)  # fmt: skip
async def test_penalties_and_bias_bend_greedy_text(checkpoint: Path, engine: Engine, fields: dict[str, Any]) -> None:
    for prompt in (PROMPT, [1, 2, 3]):
        (text,) = texts(await draw(engine, prompt, tokens=8, temperature=0.0, **fields))
        for place, token in enumerate(text):
            row = bent(checkpoint, prompt, text[:place], **fields)
            assert row[token] >= max(row) - EPS


async def test_stops_end_a_text_and_not_before_its_least_length(engine: Engine) -> None:
    free = texts(await draw(engine, PROMPT, n=40, tokens=12, seed=1))
    stop = Counter(token for text in free for token in text[:-1]).most_common(1)[0][0]
    given = {"n": 40, "tokens": 12, "seed": 1, "ignore_eos": False, "stop_token_ids": (stop,)}
    result = await draw(engine, PROMPT, **given)
    stops = {stop, *engine._limits.eos_token_ids}
    cut = []
    for text in free:
        ends = [place for place, token in enumerate(text) if token in stops]
        cut.append(text[: ends[0] + 1] if ends else text)
    assert texts(result) == cut
    reasons = ["stop" if text[-1] in stops else "length" for text in cut]
    assert [sequence.finish_reason for sequence in result.sequences] == reasons and {"stop", "length"} == set(reasons)
    least = min(map(len, cut))
    shortest = await draw(engine, PROMPT, **(given | {"tokens": least}))
    reasons = ["stop" if text[least - 1] in stops else "length" for text in free]
    assert [sequence.finish_reason for sequence in shortest.sequences] == reasons and "stop" in reasons
    later = await draw(engine, PROMPT, min_new_tokens=5, **given)
    assert all(not stops.intersection(text[:5]) for text in texts(later))
    assert any(5 < len(text) < 12 for text in texts(later))


async def test_different_lengths_share_a_wave(checkpoint: Path, engine: Engine) -> None:
    asked = [(1, 3), (5, 8), (2, 1), (7, 5)]
    results = await asyncio.gather(
        *(draw(engine, PROMPT[: k + 2], n=n, tokens=tokens, seed=k) for k, (n, tokens) in enumerate(asked))
    )
    for k, ((n, tokens), result) in enumerate(zip(asked, results, strict=True)):
        assert [len(text) for text in texts(result)] == [tokens] * n
        for sequence in result.sequences:
            rescored = hf.rescore(checkpoint, PROMPT[: k + 2], sequence.token_ids)
            assert sequence.logprobs == pytest.approx(rescored, abs=EPS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"catalog": None}, "sampling"),
        ({"beam_width": 4}, "sampling"),
        ({"policy": PolicySpec(name="scheduled", widths=(2,) * 6)}, "sampling"),
        ({"min_new_tokens": 7}, "min_new_tokens"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"logit_bias": {3: math.nan}}, "sampling.logit_bias.3"),
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"policy": PolicySpec(name="nucleus", mass=math.nan)}, "policy.mass"),
        ({"policy": PolicySpec(name="score_margin", margin=math.inf)}, "policy.margin"),
        ({"n": 300}, "n"),
        ({"n": 256, "tokens": 128, "top_logprobs": 128}, "top_logprobs"),
        ({"return_beam_details": True}, "return_beam_details"),
    ],
)
async def test_refusals(engine: Engine, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await draw(engine, PROMPT, **fields)
    assert caught.value.param == param


# suppressed tokens


async def test_special_tokens_are_never_generated(checkpoint: Path, engine: Engine) -> None:
    """Exact: the beams are those of a search in which they do not exist, at the scores that they have anyway."""
    special = set(engine._limits.special_token_ids)
    assert special
    params = {"beam_width": 64, "n": 64, "max_new_tokens": 2, "catalog": NO_CATALOG, "ignore_eos": True}
    plain = await engine.submit(PROMPT, SearchParams(**params))
    assert any(special.intersection(text) for text in texts(plain))
    result = await engine.submit(PROMPT, SearchParams(suppress_special_tokens=True, **params))
    first = hf.normalised(hf.logits(checkpoint, tuple(PROMPT)))
    allowed = [token for token in range(len(first)) if token not in special]
    second = {a: hf.normalised(hf.logits(checkpoint, (*PROMPT, a))) for a in allowed}
    expected = sorted((first[a] + second[a][b] for a in allowed for b in allowed), reverse=True)
    assert not any(special.intersection(text) for text in texts(result))
    assert [s.cum_logprob for s in result.sequences] == pytest.approx(expected[:64], abs=EPS)
    drawn = await draw(engine, PROMPT, n=50, tokens=8, suppress_special_tokens=True, temperature=5.0, seed=0)
    assert not any(special.intersection(text) for text in texts(drawn))
    with_catalog = await engine.submit(PROMPT, SearchParams(n=2, beam_width=4, suppress_special_tokens=True))
    assert any("suppress_special_tokens" in warning for warning in with_catalog.warnings)


# likely tokens, beams by level


@pytest.mark.parametrize(
    ("kind", "normalizer"), [("beams", "vocab"), ("catalog", "vocab"), ("catalog", "level"), ("drawn", "vocab")]
)
async def test_likely_tokens(checkpoint: Path, engine: Engine, kind: str, normalizer: Any) -> None:
    K = 5
    if kind == "drawn":
        result = await draw(engine, PROMPT, n=3, tokens=4, top_logprobs=K, seed=2)
    else:
        catalog = NO_CATALOG if kind == "beams" else None
        levels = 4 if kind == "beams" else None
        result = await engine.submit(
            PROMPT,
            SearchParams(
                n=7, beam_width=9, max_new_tokens=levels, catalog=catalog, normalizer=normalizer, top_logprobs=K
            ),
        )
    codebooks = engine.catalogs.get(None).level_token_ids if normalizer == "level" else None  # type: ignore[union-attr]
    for sequence in result.sequences:
        assert sequence.top_logprobs is not None and len(sequence.top_logprobs) == len(sequence.token_ids)
        for place, likely in enumerate(sequence.top_logprobs):
            row = hf.logits(checkpoint, (*PROMPT, *sequence.token_ids[:place]))
            among = None if codebooks is None else [int(token) for token in codebooks[place]]
            logprobs = hf.normalised(row, among)
            best = sorted((logprobs[token] for token in among or range(len(logprobs))), reverse=True)[:K]
            assert [value for _, value in likely] == pytest.approx(best, abs=EPS)
            assert [logprobs[token] for token, _ in likely] == pytest.approx(best, abs=EPS)
            own = dict(likely).get(sequence.token_ids[place])
            assert own is None or own == pytest.approx(sequence.logprobs[place], abs=EPS)


async def test_likely_tokens_are_for_those_who_ask(engine: Engine) -> None:
    def ask(k: int, details: bool) -> Any:
        params = SearchParams(
            n=3, beam_width=6, max_new_tokens=3, catalog=NO_CATALOG, top_logprobs=k, return_beam_details=details
        )
        return engine.submit(PROMPT, params)

    plain, some, many, details = await asyncio.gather(ask(0, False), ask(2, False), ask(4, False), ask(0, True))
    assert all(sequence.top_logprobs is None for sequence in plain.sequences)
    for result, k in ((some, 2), (many, 4)):
        assert {len(likely) for sequence in result.sequences for likely in sequence.top_logprobs} == {k}
    assert (plain.levels, some.levels, many.levels) == (None, None, None)
    assert len(details.levels) == 3
    assert texts(plain) == texts(some) == texts(many) == texts(details)
    with pytest.raises(InvalidRequest, match="top_logprobs"):
        await engine.submit(PROMPT, SearchParams(normalizer="legal", top_logprobs=1))


@pytest.mark.parametrize("catalog", [NO_CATALOG, None], ids=["plain", "catalog"])
async def test_beams_by_level_lead_to_the_results(checkpoint: Path, engine: Engine, catalog: str | None) -> None:
    """Each level's beams are the next tokens of the level before, at teacher-forced scores, best first; and the last
    level's are what is returned."""
    widths = (5, 9, 7)
    ask = SearchParams(
        n=6, policy=PolicySpec(name="scheduled", widths=widths), max_new_tokens=3, catalog=catalog,
        return_beam_details=True, normalizer="vocab", ignore_eos=True,
    )  # fmt: skip
    company = [engine.submit([4, 4, seed], msgspec.structs.replace(ask, n=seed + 1)) for seed in range(3)]
    first, result, *_ = await asyncio.gather(company[0], engine.submit(PROMPT, ask), *company[1:])
    assert first.levels is not None and result.levels is not None
    assert len(result.levels) == 3
    prefixes: list[tuple[int, ...]] = [()]
    for level, beams in enumerate(result.levels):
        prefixes = [(*prefixes[parent], token) for parent, token in zip(beams.parents, beams.token_ids, strict=True)]
        rescored = [sum(hf.rescore(checkpoint, PROMPT, prefix)) for prefix in prefixes]
        assert beams.scores == pytest.approx(rescored, abs=EPS)
        assert beams.scores == sorted(beams.scores, reverse=True)
        assert len(prefixes) == len(set(prefixes)) <= (widths[level] if level < 2 else 6)
    assert prefixes == [tuple(text) for text in texts(result)]


async def test_levels_without_a_beam_are_there_and_empty(engine: Engine) -> None:
    """Of searches that end long before their last level, and of those that filters leave nothing."""
    vocab_size = engine.model_config.vocab_size
    ended = await engine.submit(
        PROMPT,
        SearchParams(
            n=2, beam_width=4, max_new_tokens=20, catalog=NO_CATALOG, return_beam_details=True,
            stop_token_ids=tuple(range(vocab_size)),
        ),
    )  # fmt: skip
    nothing = await engine.submit(
        PROMPT, SearchParams(beam_width=4, return_beam_details=True, filters=Filters(allow=()))
    )
    for result, levels in ((ended, 20), (nothing, len(nothing.widths))):
        assert result.levels is not None and len(result.levels) == levels > 0
        assert not any(beams.token_ids for beams in result.levels)


def test_numpy_agrees_on_the_hash() -> None:
    """SplitMix64 as published, on Python's own integers."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    seed, text, level = -5, 3, 2
    key = mix((mix((mix(seed & mask) + text) & mask) + level) & mask)
    bits = [mix((key + (token + 1) * 0x9E3779B97F4A7C15) & mask) >> 11 for token in range(100)]
    expected = [-math.log(-math.log((bit + 0.5) * 2.0**-53)) for bit in bits]
    noise = gumbel(torch.tensor([[seed]]), torch.tensor([[text]]), level, 100)[0]
    np.testing.assert_allclose(noise.numpy(), expected, rtol=1e-5, atol=1e-6)
