"""What holds for every policy: one contract, over all that are registered."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests import hf
from tests.engine.table_search import Table, run
from tests.engine.test_selection import make_catalog, make_search
from tests.oracle import Prefix
from widebeam import Engine, SearchParams
from widebeam.engine.request import SearchResult
from widebeam.engine.wave import Wave
from widebeam.errors import EngineError, InvalidRequest
from widebeam.policies import POLICIES, LevelPlan, PolicySpec, level_plan

EPS = 1e-5
EXAMPLES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "scheduled": {"widths": (4, 17, 12)},
    "score_margin": {"margin": 1.0, "floor": 2},
    "nucleus": {"mass": 0.7, "floor": 2},
    "diverse": {"cap": 3},
    "stochastic": {"seed": 5},
}
each_policy = pytest.mark.parametrize("name", POLICIES.names())


def spec(name: str) -> PolicySpec:
    return PolicySpec(name=name, **EXAMPLES[name])


def params(name: str, **fields: Any) -> SearchParams:
    width = None if "widths" in EXAMPLES[name] else 12
    return SearchParams(**({"n": 12, "beam_width": width, "policy": spec(name), "catalog": "items"} | fields))


def found(result: SearchResult) -> list[tuple[tuple[int, ...], float]]:
    return [(tuple(s.token_ids), s.score) for s in result.sequences]


@each_policy
@pytest.mark.parametrize("catalog", ["items", "none"])
async def test_contract_of_results(engine: Engine, checkpoint: Path, name: str, catalog: str) -> None:
    """Legal, sorted, without duplicates, no wider than planned; scores are the model's own; the same again."""
    prompt = [7, 8, 30, 41]
    asked = params(name, catalog=catalog, max_new_tokens=3, normalizer="vocab", return_beam_details=True)
    result = await engine.submit(prompt, asked)
    tokens, scores = zip(*found(result), strict=True)
    assert len(set(tokens)) == len(tokens) <= 12 and list(scores) == sorted(scores, reverse=True)
    if catalog == "items":
        items = engine.catalogs.get("items")
        assert items is not None
        assert set(tokens) <= {tuple(items.token_ids(row)) for row in range(items.num_items)}
    plan = level_plan(spec(name), 3, asked.beam_width)
    assert result.levels is not None
    live = [len(level.token_ids) for level in result.levels]
    assert all(count <= bound <= width for count, bound, width in zip(live, result.widths, plan.widths, strict=True))
    for sequence in result.sequences:
        forced = hf.rescore(checkpoint, prompt, sequence.token_ids)
        assert sequence.logprobs == pytest.approx(forced, abs=EPS)
        assert sequence.cum_logprob == pytest.approx(sum(forced), abs=3 * EPS)
        assert sequence.score == pytest.approx(sum(forced) / len(forced), abs=EPS)
    assert found(await engine.submit(prompt, asked)) == found(result)


async def test_all_of_them_in_one_wave_give_what_each_gives_alone(engine: Engine) -> None:
    """So does a search without a policy beside them."""
    rng = np.random.default_rng(0)
    asked = [params(name) for name in POLICIES.names()] + [SearchParams(n=12, beam_width=12, catalog="items")] * 2
    prompts = [rng.integers(0, 59, 5 + 9 * place).tolist() for place in range(len(asked))]
    alone = [await engine.submit(prompt, one) for prompt, one in zip(prompts, asked, strict=True)]
    before = engine.stats().waves
    together = await asyncio.gather(*map(engine.submit, prompts, asked))
    assert engine.stats().waves - before < len(asked) / 2
    for one, many in zip(alone, together, strict=True):
        assert [tokens for tokens, _ in found(one)] == [tokens for tokens, _ in found(many)]
        assert [s for _, s in found(one)] == pytest.approx([s for _, s in found(many)], abs=EPS)


@each_policy
@pytest.mark.parametrize("constrained", [True, False])
def test_equal_scores_everywhere(name: str, constrained: bool) -> None:
    """Every continuation ties. A neighbour without a policy is not touched, to the last bit; sizes stay the same."""
    items = {(a, b, c) for a in range(4) for b in range(4) for c in range(4)}
    catalog = make_catalog(items) if constrained else None
    width = level_plan(spec(name), 3, None if "widths" in EXAMPLES[name] else 12).widths
    plain = make_search(width, 12, catalog=catalog, vocab=6)
    mine = replace(plain, plan=level_plan(spec(name), 3, None if "widths" in EXAMPLES[name] else 12)._replace(seed=3))
    assert Wave([mine, plain], 512).shapes == Wave([plain, plain], 512).shapes
    flat = Table(6, 0, step=1e9)  # every logit is 0
    first, second = run([flat, flat], [mine, plain], catalog)
    assert first == run([flat], [mine], catalog)[0] == run([flat] * 2, [plain, mine], catalog)[1]
    assert second == run([flat], [plain], catalog)[0]
    assert 0 < len(first) <= 12 and len({one.tokens for one in first}) == len(first)
    expected: dict[str, list[Prefix]] = {
        "score_margin": [one.tokens for one in second],
        "fixed": [one.tokens for one in second],
        "diverse": [(a, 0, c) for a in range(4) for c in range(3)],
    }
    if name in expected:
        assert [one.tokens for one in first] == expected[name]


async def test_a_cap_holds_in_every_level_and_in_the_results(engine: Engine) -> None:
    """And fewer than n are returned where no more are within it."""
    for cap in (1, 2, 5):
        asked = SearchParams(
            n=40, beam_width=40, policy=PolicySpec(name="diverse", cap=cap), catalog="items", return_beam_details=True
        )
        result = await engine.submit([9, 33, 12], asked)
        first = [tokens[0] for tokens, _ in found(result)]
        assert max(map(first.count, first)) <= cap
        assert len(first) <= cap * len(set(first))
        items = engine.catalogs.get("items")
        assert items is not None and result.widths[-1] <= cap * items.index.nodes_at(1)


async def test_a_sample_has_a_seed_of_its_own_or_the_prompts(engine: Engine) -> None:
    async def tokens(prompt: list[int], seed: int | None) -> set[tuple[int, ...]]:
        policy = PolicySpec(name="stochastic", seed=seed)
        result = await engine.submit(prompt, SearchParams(n=6, beam_width=6, policy=policy, catalog="items"))
        return {one for one, _ in found(result)}

    assert await tokens([5, 6], None) == await tokens([5, 6], None)
    assert len({frozenset(await tokens([5, 6], seed)) for seed in (None, 0, 1, -1, 2**63 - 1)}) >= 4
    fixed = await engine.submit([5, 6], SearchParams(n=6, beam_width=6, catalog="items"))
    assert await tokens([5, 6], 1) != {one for one, _ in found(fixed)}


async def test_a_sample_goes_on_where_shorter_waves_have_passed(checkpoint: Path) -> None:
    """A long search is set aside between its pieces: what its noise needs, too."""
    async with Engine(str(checkpoint), device="cpu", max_wave_requests=1) as engine:
        policy = PolicySpec(name="stochastic", seed=4)
        long = SearchParams(n=3, beam_width=3, max_new_tokens=24, policy=policy, ignore_eos=True)
        short = SearchParams(n=3, beam_width=3, max_new_tokens=2, policy=policy, ignore_eos=True)
        alone = await engine.submit([5, 6, 7], long)
        waves = [engine.submit([5, 6, 7], long), *(engine.submit([9, 8], short) for _ in range(6))]
        first, *_ = await asyncio.gather(*waves)
        assert found(first) == found(alone)


# Policies of others


@pytest.mark.parametrize(
    "plan",
    [
        None,
        [4, 4, 4],
        LevelPlan((4, 4)),
        LevelPlan((4, 0, 4)),
        LevelPlan((4, 4.0, 4)),  # type: ignore[arg-type]
        LevelPlan((4, 6000, 4)),
        LevelPlan((4, 4, 4), margin=float("nan")),
        LevelPlan((4, 4, 4), margin=-1),
        LevelPlan((4, 4, 4), mass=0),
        LevelPlan((4, 4, 4), floor=0),
        LevelPlan((4, 4, 4), cap=0),
        LevelPlan((4, 4, 4), margin="1"),  # type: ignore[arg-type]
        LevelPlan((4, 4, 4), mass=np.ones(1)),  # type: ignore[arg-type]
        LevelPlan((4, 4, 4), noise="yes"),  # type: ignore[arg-type]
        LevelPlan((4, 4, 4), noise=True, seed=2**63),
        LevelPlan((4, 4, 4), noise=True, mass=0.5),
    ],
)
async def test_a_wrong_plan_fails_who_names_its_policy(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, plan: Any
) -> None:
    monkeypatch.setattr(POLICIES, "_targets", {**POLICIES._targets, "theirs": lambda *_: plan})
    asked = SearchParams(n=2, policy=PolicySpec(name="theirs"), beam_width=4, catalog="items")
    with pytest.raises(EngineError, match="'theirs' gives no valid plan") as failed:
        await engine.submit([5], asked)
    assert failed.value.code == "broken_policy"
    assert len((await engine.submit([5], msgspec.structs.replace(asked, policy=None))).sequences) == 2


async def test_a_policy_of_others_may_refuse_and_combine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(spec: PolicySpec, levels: int, beam_width: int | None) -> LevelPlan:
        if spec.margin is None:
            raise InvalidRequest("policy 'theirs' needs a margin", param="policy.margin")
        return LevelPlan((beam_width or 8,) * levels, cap=2, margin=spec.margin, floor=3)

    monkeypatch.setattr(POLICIES, "_targets", {**POLICIES._targets, "theirs": theirs})
    with pytest.raises(InvalidRequest, match="needs a margin"):
        await engine.submit([5], SearchParams(policy=PolicySpec(name="theirs"), catalog="items"))
    policy = PolicySpec(name="theirs", margin=2.0)
    result = await engine.submit([5], SearchParams(n=8, beam_width=8, policy=policy, catalog="items"))
    first = [tokens[0] for tokens, _ in found(result)]
    assert first and max(map(first.count, first)) <= 2


def test_every_policy_has_an_example_and_survives_the_wire() -> None:
    assert set(EXAMPLES) == set(POLICIES.names())
    for name in EXAMPLES:
        assert msgspec.convert(json.loads(msgspec.json.encode(spec(name))), PolicySpec) == spec(name)
