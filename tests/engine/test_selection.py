"""Selection is exact, ties included: sequences, order and scores equal those of the plain oracle to the last bit."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.table_search import Table, run
from tests.oracle import Found, Prefix, beam_search
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filters import ItemMask
from widebeam.engine import vocabulary
from widebeam.engine.selection import compact
from widebeam.engine.wave import Search, narrowed
from widebeam.engine.widths import bound_widths, join_factor
from widebeam.policies import LevelPlan

VOCAB = 12


@pytest.fixture(autouse=True)
def narrow_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even this vocabulary has several, the last of them shorter."""
    monkeypatch.setattr(vocabulary, "COLUMN", 5)


def make_search(widths: tuple[int, ...], n: int, **fields: Any) -> Search:
    catalog = fields.get("catalog")
    stops = fields.get("stop_token_ids", ())
    plan = fields.get("plan")
    return Search(
        request_id="x",
        token_ids=np.zeros(1, dtype=np.int32),
        widths=bound_widths(widths, catalog, fields.get("vocab", VOCAB), plan.cap if plan else None),
        num_returned=n,
        catalog=catalog,
        normalizer=fields.get("normalizer", "vocab"),
        join=join_factor(catalog, greedy=fields.get("greedy", False), has_stops=bool(stops)),
        stop_token_ids=stops,
        length_penalty=fields.get("length_penalty", 1.0),
        plan=plan,
    )


def float32_logprobs(table: Table) -> Any:
    """The very float32 log-probabilities that the engine sees without a catalog."""

    def logprobs(prefix: Prefix) -> list[np.float32]:
        logits = table.row(prefix)
        return list((logits - logits.logsumexp(-1)).numpy())

    return logprobs


def final_score(penalty: float) -> Any:
    return lambda cum, length: (torch.tensor(cum) / torch.tensor(float(length)) ** torch.tensor(penalty)).numpy()[()]


def expect(table: Table, widths: tuple[int, ...], n: int, **fields: Any) -> list[Found]:
    return beam_search(
        float32_logprobs(table),
        range(table.vocab_size),
        widths,
        n,
        final_score=final_score(fields.pop("length_penalty", 1.0)),
        zero=np.float32(0.0),  # type: ignore[arg-type]
        **fields,
    ).found


def assert_identical(returned: list[Found], expected: list[Found]) -> None:
    assert [one.tokens for one in returned] == [one.tokens for one in expected]
    assert [one.reason for one in returned] == [one.reason for one in expected]
    assert [np.float32(one.cum) for one in returned] == [np.float32(one.cum) for one in expected]
    assert [np.float32(one.score) for one in returned] == [np.float32(one.score) for one in expected]


widths_of = st.lists(st.integers(1, 20), min_size=1, max_size=4).map(lambda widths: tuple(widths))


@settings(max_examples=150)
@given(widths=widths_of, vocab=st.sampled_from([1, 7, 12, 25, 31]), seed=st.integers(0, 10**6), data=st.data())
def test_unconstrained(widths: tuple[int, ...], vocab: int, seed: int, data: st.DataObject) -> None:
    """Also over vocabularies that are one column, or columns of one token."""
    n = data.draw(st.integers(1, widths[-1]))
    table = Table(vocab, seed)
    assert_identical(run([table], [make_search(widths, n, vocab=vocab)])[0], expect(table, widths, n))


@settings(max_examples=250)
@given(
    widths=st.lists(st.integers(1, 8), min_size=2, max_size=5).map(tuple),
    seed=st.integers(0, 10**6),
    stops=st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    data=st.data(),
)
def test_stop_tokens(widths: tuple[int, ...], seed: int, stops: set[int], penalty: float, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, widths[-1]))
    table = Table(VOCAB, seed)
    greedy = max(widths) == 1
    fields: dict[str, Any] = {"greedy": greedy, "length_penalty": penalty}
    search = make_search(widths, n, stop_token_ids=tuple(sorted(stops)), **fields)
    expected = expect(table, widths, n, stops=frozenset(stops), **fields)
    assert_identical(run([table], [search])[0], expected)


def make_catalog(items: set[Prefix]) -> Catalog:
    """A catalog whose SIDs are these token ids, by way of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.jsonl"
        rows = [json.dumps({"item_id": i, "sid": list(item)}) for i, item in enumerate(sorted(items))]
        path.write_text("\n".join(rows))
        return Catalog.load(path, vocab_size=VOCAB)


catalogs = st.sets(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4).map(tuple), min_size=1, max_size=40)


def log_sum_exp(codes: Tensor) -> Tensor:
    """In float32, but for the sum."""
    return (codes.max().double() + (codes - codes.max()).exp().double().sum().log()).float()


def catalog_logprobs(table: Table, items: set[Prefix], normalizer: str) -> Any:
    """As float32_logprobs, for each normaliser; computed as the engine documents it, so that the bits agree."""
    depth = max(len(item) for item in items)
    codebooks = [sorted({item[level] for item in items if len(item) > level}) for level in range(depth)]

    def logprobs(prefix: Prefix) -> list[np.float32]:
        row, k = table.row(prefix), len(prefix)
        codes = row[codebooks[k]]
        legal = {item[k] for item in items if len(item) > k and item[:k] == prefix}
        illegal = torch.tensor([code not in legal for code in codebooks[k]])
        lse = {
            "vocab": row.logsumexp(-1),
            "level": log_sum_exp(codes),
            "legal": log_sum_exp(codes.masked_fill(illegal, -torch.inf)),
        }[normalizer]
        return list((row - lse).numpy())

    return logprobs


@settings(max_examples=300)
@given(
    items=catalogs,
    normalizer=st.sampled_from(["vocab", "level", "legal"]),
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    data=st.data(),
)
def test_waves_over_catalogs_of_mixed_depth(
    items: set[Prefix], normalizer: str, seeds: list[int], data: st.DataObject
) -> None:
    """Crossing prefixes, singletons, SIDs that are prefixes of others, schedules, fewer items than beams."""
    depth = max(len(item) for item in items)
    catalog = make_catalog(items)
    tables, searches, expected = [], [], []
    for seed in seeds:
        widths = tuple(data.draw(st.lists(st.integers(1, 30), min_size=depth, max_size=depth)))
        n = data.draw(st.integers(1, widths[-1]))
        table = Table(VOCAB, seed)
        tables.append(table)
        searches.append(make_search(widths, n, catalog=catalog, normalizer=normalizer))
        answer = beam_search(
            catalog_logprobs(table, items, normalizer), range(VOCAB), widths, n, items=items,
            final_score=final_score(1.0), zero=np.float32(0.0),  # type: ignore[arg-type]
        )  # fmt: skip
        expected.append(answer.found)
    for mine, theirs in zip(run(tables, searches, catalog), expected, strict=True):
        assert_identical(mine, theirs)


@settings(max_examples=200)
@given(
    items=catalogs,
    depth=st.none() | st.integers(1, 4),
    normalizer=st.sampled_from(["vocab", "level", "legal"]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_filters_act_inside_the_search(
    items: set[Prefix], depth: int | None, normalizer: Any, seed: int, data: st.DataObject
) -> None:
    """In waves in which each search has a filter of its own, shares one, or has none; over SIDs of one length too. The
    answer is the plain search over the allowed items, at the scores that they have without a filter."""
    if depth is not None:
        items = {(*item, *([0] * 4))[:depth] for item in items}
    catalog = make_catalog(items)
    spelt = [tuple(catalog.token_ids(row)) for row in range(catalog.num_items)]
    chosen = data.draw(st.lists(st.sets(st.integers(0, len(spelt) - 1), min_size=1), min_size=1, max_size=3))
    masks = [ItemMask.of_rows(np.array(sorted(rows)), len(spelt)) for rows in chosen]
    plans = [*range(len(masks)), None, 0]
    tables = [Table(VOCAB, seed + b) for b in range(len(plans))]
    widths = data.draw(st.tuples(*[st.integers(1, 9)] * catalog.depth))
    searches, expected = [], []
    for table, plan in zip(tables, plans, strict=True):
        search = make_search(widths, widths[-1], catalog=catalog, normalizer=normalizer)
        searches.append(search if plan is None else narrowed(search, masks[plan]))
        allowed = items if plan is None else {spelt[row] for row in chosen[plan]}
        expected.append(
            beam_search(
                catalog_logprobs(table, items, normalizer), range(VOCAB), widths, widths[-1], items=allowed,
                final_score=final_score(1.0), zero=np.float32(0.0),  # type: ignore[arg-type]
            ).found
        )  # fmt: skip
    for returned, wanted in zip(run(tables, searches, catalog), expected, strict=True):
        assert_identical(returned, wanted)


def staying(plan: LevelPlan) -> Any:
    """How many beams go on, written as the policies describe it."""
    if not plan.prunes:
        return len

    def stay(scores: list[float]) -> int:
        if not scores:
            return 0
        weights = [math.exp(float(score) - float(scores[0])) for score in scores]
        within = [float(scores[0]) - float(score) <= plan.margin for score in scores]
        inside = [math.fsum(weights[:place]) < plan.mass * math.fsum(weights) for place in range(len(scores))]
        good = [plan.mass == 1 or inside[place] for place in range(len(scores))]
        return max(plan.floor, sum(a and b for a, b in zip(within, good, strict=True)))

    return stay


@settings(max_examples=200)
@given(
    plans=st.lists(
        st.none()
        | st.tuples(st.sampled_from([0.0, 0.7, 2.3, 5.1]), st.integers(1, 4)).map(
            lambda drawn: LevelPlan((), margin=drawn[0], floor=drawn[1])
        )
        | st.tuples(st.sampled_from([0.05, 0.31, 0.77, 0.96]), st.integers(1, 4)).map(
            lambda drawn: LevelPlan((), mass=drawn[0], floor=drawn[1])
        )
        | st.integers(1, 5).map(lambda cap: LevelPlan((), cap=cap))
        | st.integers(1, 5).map(lambda cap: LevelPlan((), cap=cap, mass=0.77)),
        min_size=1,
        max_size=4,
    ),
    kind=st.sampled_from(["plain", "stops", "catalog"]),
    items=catalogs,
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_beams_that_policies_leave_out(
    plans: list[LevelPlan | None], kind: str, items: set[Prefix], seed: int, data: st.DataObject
) -> None:
    """Each request by its own policy, or none, in one wave."""
    catalog = make_catalog(items) if kind == "catalog" else None
    levels = catalog.depth if catalog is not None else data.draw(st.integers(2, 4))
    stops = (1, 2) if kind == "stops" else ()
    widths = data.draw(st.tuples(*[st.integers(2, 12)] * levels))
    tables = [Table(VOCAB, seed + b) for b in range(len(plans))]
    searches, expected = [], []
    for table, plan in zip(tables, plans, strict=True):
        given: dict[str, Any] = {"catalog": catalog, "stop_token_ids": stops}
        searches.append(make_search(widths, widths[-1], plan=plan, **given))
        answer = beam_search(
            float32_logprobs(table), range(VOCAB), widths, widths[-1], items=items if catalog else None,
            stops=frozenset(stops), final_score=final_score(1.0), zero=np.float32(0.0),  # type: ignore[arg-type]
            stay=len if plan is None else staying(plan), cap=None if plan is None else plan.cap,
        )  # fmt: skip
        expected.append(answer.found)
    for returned, wanted in zip(run(tables, searches, catalog), expected, strict=True):
        assert_identical(returned, wanted)


@settings(max_examples=60)
@given(
    plans=st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), st.booleans()),
        min_size=2,
        max_size=6,
    ),
    seed=st.integers(0, 10**6),
)
def test_a_wave_gives_what_each_search_gives_alone(plans: list[tuple[tuple[int, ...], bool]], seed: int) -> None:
    """Different widths, schedules, lengths and stop sets in one wave do not touch each other."""
    tables = [Table(VOCAB, seed + b) for b in range(len(plans))]

    def searches() -> list[Search]:
        return [
            make_search(widths, widths[-1], stop_token_ids=(1, 4) if stops else (), greedy=max(widths) == 1)
            for widths, stops in plans
        ]

    together = run(tables, searches())
    for b, search in enumerate(searches()):
        assert_identical(together[b], run([tables[b]], [search])[0])


def test_compact_names_only_what_is_kept() -> None:
    index, filled = compact(torch.tensor([True, False, True]), torch.tensor([2, 0, 0]), 4)
    assert index[filled].tolist() == [2, 0]
    assert filled.tolist() == [True, False, True, False]
