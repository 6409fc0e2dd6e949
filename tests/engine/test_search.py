"""The whole search, network included, against brute force in float64 over Hugging Face's logits, on each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import hf
from tests.oracle import Answer, Found, Prefix, assert_same, beam_search
from widebeam import Engine, SearchParams
from widebeam.constraints.catalog import Catalog
from widebeam.engine.request import SearchResult
from widebeam.policies import PolicySpec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("engine", DEVICES, indirect=True)
EPS = {"cpu": 1e-5, "cuda": 1e-4}
"""Largest difference of a score, and so of the order, from float64. Twice that is the closest cut that is looked at:
rounding may take either side of a closer one."""


@pytest.fixture
def eps(engine: Engine) -> float:
    """On a GPU only for products that are made in float32, not in TF32, which is torch's default."""
    device = engine._runtime.device.type
    assert device == "cpu" or torch.get_float32_matmul_precision() == "highest"
    assert engine._runtime.dtype == torch.float32
    return EPS[device]


def items_of(catalog: Catalog) -> set[Prefix]:
    return {tuple(catalog.token_ids(row)) for row in range(catalog.num_items)}


def oracle(checkpoint: Path, prompt: list[int], widths: tuple[int, ...], n: int, **fields: Any) -> Answer:
    """Expected sequences; `normalizer` as in SearchParams."""
    normalizer = fields.pop("normalizer", "vocab")
    items = fields.get("items")
    vocab_size = hf.load(checkpoint).config.vocab_size

    def logprobs(prefix: Prefix) -> list[float]:
        k = len(prefix)
        among = None
        if normalizer == "level":
            among = sorted({item[k] for item in items if len(item) > k})
        elif normalizer == "legal":
            among = sorted({item[k] for item in items if len(item) > k and item[:k] == prefix})
        return hf.normalised(hf.logits(checkpoint, (*prompt, *prefix)), among)

    return beam_search(logprobs, range(vocab_size), widths, n, **fields)


def found(result: SearchResult) -> list[Found]:
    return [Found(tuple(s.token_ids), s.cum_logprob, s.score, s.finish_reason) for s in result.sequences]


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 59, int(rng.integers(1, 90))).tolist() for _ in range(count)]


@pytest.mark.parametrize("normalizer", ["vocab", "level", "legal"])
@pytest.mark.parametrize("widths", [(4, 4, 4), (64, 64, 64), (2, 30, 7), (1, 1, 1)])
async def test_constrained(
    engine: Engine, checkpoint: Path, eps: float, normalizer: Any, widths: tuple[int, ...]
) -> None:
    items = items_of(engine.catalogs.get(None))  # type: ignore[arg-type]
    compared = 0
    for prompt in prompts(sum(widths), 6):
        expected = oracle(checkpoint, prompt, widths, widths[-1], items=items, normalizer=normalizer)
        policy = PolicySpec(name="scheduled", widths=widths)
        params = SearchParams(n=widths[-1], policy=policy, normalizer=normalizer)
        result = await engine.submit(prompt, params)
        assert len(result.sequences) == len(expected.found) <= engine.catalogs.get(None).num_sids  # type: ignore[union-attr]
        assert {tuple(s.token_ids) for s in result.sequences} <= items
        for sequence in result.sequences[:20] if normalizer == "vocab" else ():
            forced = hf.rescore(checkpoint, prompt, sequence.token_ids)
            assert sequence.logprobs == pytest.approx(forced, abs=eps)
        if expected.margin > 2 * eps:
            assert_same(found(result), expected.found, eps)
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize(("width", "levels"), [(1, 12), (5, 6), (40, 3)])
@pytest.mark.parametrize("stopping", [False, True])
async def test_unconstrained(
    engine: Engine, checkpoint: Path, eps: float, width: int, levels: int, stopping: bool
) -> None:
    compared = 0
    for prompt in prompts(width, 5):
        likely = int(hf.logits(checkpoint, tuple(prompt)).topk(3).indices[-1])
        stops = frozenset({likely, 2}) if stopping else frozenset()
        expected = oracle(checkpoint, prompt, (width,) * levels, width, stops=stops, greedy=width == 1)
        params = SearchParams(
            n=width, beam_width=width, max_new_tokens=levels, catalog="none",
            stop_token_ids=(likely,), ignore_eos=not stopping,
        )  # fmt: skip
        result = await engine.submit(prompt, params)
        if expected.margin > 2 * eps:
            assert_same(found(result), expected.found, eps)
            compared += 1
        for sequence in result.sequences:
            forced = hf.rescore(checkpoint, prompt, sequence.token_ids)
            assert sequence.logprobs == pytest.approx(forced, abs=eps)
            assert sum(sequence.logprobs) == pytest.approx(sequence.cum_logprob, abs=eps)
            assert sequence.cum_logprob / len(sequence.token_ids) == pytest.approx(sequence.score, abs=eps)
    assert compared >= 2


async def test_as_deep_as_64_levels(engine: Engine, checkpoint: Path, eps: float) -> None:
    prompt = prompts(3, 1)[0]
    result = await engine.submit(
        prompt, SearchParams(n=3, beam_width=3, max_new_tokens=64, catalog="none", ignore_eos=True)
    )
    expected = oracle(checkpoint, prompt, (3,) * 64, 3)
    assert expected.margin > 2 * eps
    assert_same(found(result), expected.found, 64 * eps)


async def test_length_penalty(engine: Engine, checkpoint: Path, eps: float) -> None:
    prompt = prompts(11, 1)[0]
    stops = frozenset(hf.logits(checkpoint, tuple(prompt)).topk(2).indices.tolist()) | {2}
    for penalty in (0.0, 0.7, 2.0):
        expected = oracle(
            checkpoint, prompt, (6,) * 4, 6, stops=stops, final_score=lambda cum, k, p=penalty: cum / k**p
        )
        params = SearchParams(
            n=6, beam_width=6, max_new_tokens=4, catalog="none", length_penalty=penalty, stop_token_ids=tuple(stops)
        )
        assert expected.margin > 2 * eps
        assert_same(found(await engine.submit(prompt, params)), expected.found, eps)


async def test_fewer_items_than_beams(engine: Engine) -> None:
    catalog = engine.catalogs.get(None)
    assert catalog is not None
    result = await engine.submit([5, 6], SearchParams(n=200, beam_width=200))
    returned = [tuple(s.token_ids) for s in result.sequences]
    assert len(returned) == len(set(returned)) == catalog.num_sids < 200
    assert [s.score for s in result.sequences] == sorted((s.score for s in result.sequences), reverse=True)
    assert all(np.isfinite(s.score) for s in result.sequences)


async def test_searches_of_every_kind_at_once_give_what_they_give_alone(
    engine: Engine, eps: float, tmp_path: Path
) -> None:
    """Lengths, widths, depths, normalisers and catalogs mixed; scores to 1e-4, sequences equal."""
    import asyncio

    (tmp_path / "second.jsonl").write_text(
        "\n".join(f'{{"item_id": {i}, "sid": [{10 + i % 7}, {20 + i % 11}]}}' for i in range(40))
    )
    await engine.load_catalog(tmp_path / "second.jsonl")
    plans = [
        SearchParams(n=8, beam_width=8, catalog="items"),
        SearchParams(n=1, catalog="none", max_new_tokens=20),
        SearchParams(n=30, beam_width=64, catalog="second"),
        SearchParams(n=4, policy=PolicySpec(name="scheduled", widths=(3, 17, 4)), catalog="items"),
        SearchParams(n=5, beam_width=5, catalog="items", normalizer="legal"),
        SearchParams(n=40, beam_width=40, catalog="none", max_new_tokens=3, ignore_eos=True),
        SearchParams(n=3, beam_width=3, catalog="none", max_new_tokens=9),
        SearchParams(n=64, beam_width=64, catalog="items", normalizer="vocab"),
    ]
    work = list(zip(prompts(5, 24), plans * 3, strict=True))
    alone = [await engine.submit(prompt, params) for prompt, params in work]
    before = engine.stats().waves
    together = await asyncio.gather(*(engine.submit(prompt, params) for prompt, params in work))
    assert engine.stats().waves - before < len(work), "nothing shared a wave"
    for one, many in zip(alone, together, strict=True):
        assert [s.token_ids for s in one.sequences] == [s.token_ids for s in many.sequences]
        assert [s.score for s in one.sequences] == pytest.approx([s.score for s in many.sequences], abs=eps)


async def test_the_same_search_again_is_bit_identical(engine: Engine) -> None:
    params = SearchParams(n=30, beam_width=30, catalog="items")
    first = await engine.submit([7, 8, 9, 30], params)
    again = await engine.submit([7, 8, 9, 30], params)
    assert [(s.token_ids, s.score, s.logprobs) for s in first.sequences] == [
        (s.token_ids, s.score, s.logprobs) for s in again.sequences
    ]
