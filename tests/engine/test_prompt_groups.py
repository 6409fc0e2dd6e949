"""Prompts of a large wave run through the network in groups, which changes nothing but the time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.warm_waves import make_runtime, make_search
from widebeam.constraints.catalog import Catalog
from widebeam.engine import search as search_module
from widebeam.engine.compile import compiled_programs
from widebeam.engine.job import Job
from widebeam.engine.search import Group, prompt_arrays, prompt_groups
from widebeam.engine.state import PackedPrompts
from widebeam.engine.wave import Wave
from widebeam.kv.context import ContextLease
from widebeam.model.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
LIMIT = 40
LENGTHS = ([30, 5, 90, 3, 20, 17, 1, 39], [40, 41], [20, 20, 1], [100], [41, 1, 40, 39, 2])


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=20))
def test_groups_are_as_large_as_the_limit_allows(prompts: list[tuple[int, bool]]) -> None:
    """And of one kind: prompts that begin in ContextKV go by themselves, behind the others."""
    searches = [make_search(np.zeros(length + 64 * continued), 1) for length, continued in prompts]
    for search, (_, continued) in zip(searches, prompts, strict=True):
        search.num_cached = 64 * continued
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "GROUP_TOKENS", LIMIT)
        groups = list(prompt_groups(searches))
    assert [place for group in groups for place in group.places] == sorted(
        range(len(searches)), key=lambda place: searches[place].num_cached > 0
    )
    assert all([searches[place] for place in group.places] == group.searches for group in groups)
    kinds = [{search.num_cached for search in group.searches} for group in groups]
    assert all(len(kind) == 1 for kind in kinds)
    sizes = [sum(search.num_new for search in group.searches) for group in groups]
    assert all(size <= LIMIT or len(group.places) == 1 for size, group in zip(sizes, groups, strict=True))
    for (size, kind, _), (_, following, group) in pairwise(zip(sizes, kinds, groups, strict=True)):
        assert kind != following or size + group.searches[0].num_new > LIMIT, "a group ended before it was full"


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=16),
    st.integers(0, 7), st.integers(1, 9), st.randoms(),
)  # fmt: skip
def test_rows_find_their_positions_and_slots(
    prompts: list[tuple[int, int]], padding: int, page_size: int, random: Random
) -> None:
    """Prompts of so many new tokens behind so many cached pages, against the leases' own pages, token by token."""
    core: Any = SimpleNamespace(max_pages=30, state=SimpleNamespace(hidden_RH=torch.zeros(9, 1)))
    pool, expected, searches = list(range(1, 1000)), [], []
    random.shuffle(pool)
    for new, cached in prompts:
        search = make_search(np.arange(cached * page_size + new), 1)
        search.num_cached = cached * page_size
        pages = [pool.pop() for _ in range(-(-search.num_tokens // page_size))]
        search.lease = ContextLease(pages, search.num_tokens)
        places = range(search.num_cached, search.num_tokens)
        expected.append([(t, pages[t // page_size] * page_size + t % page_size) for t in places])
        searches.append(search)
    rows = [row for request in expected for row in request]
    group, wave = Group(list(range(len(searches))), searches), Wave(searches, 64)
    arrays, tokens = prompt_arrays(core, wave, group, len(rows) + padding)
    prompts_on_device = PackedPrompts(**{name: torch.from_numpy(array) for name, array in (arrays | tokens).items()})
    assert tokens["tokens_T"].tolist() == [place for place, _ in rows] + [0] * padding
    position_T, slot_T = prompts_on_device.rows(page_size)
    assert list(zip(position_T.tolist(), slot_T.tolist(), strict=True)) == rows + [(0, 0)] * padding
    last_B, position_B, slot_B = (last.tolist() for last in prompts_on_device.last(page_size))
    assert [rows[last] for last in last_B[: len(searches)]] == [request[-1] for request in expected]
    absent = [(0, 0)] * (wave.requests - len(searches))
    assert list(zip(position_B, slot_B, strict=True)) == [request[-1] for request in expected] + absent


@pytest.mark.parametrize("graphed", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("constrained", [False, True], ids=["plain", "catalog"])
def test_groups_change_no_result(
    checkpoint: Path, catalog_file: Path, graphed: bool, constrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not in the form in which a GPU compiles the functions, where a group leaves its result in a buffer."""
    runtime = make_runtime(checkpoint, max_wave_rows=256, max_beam_width=64, max_total_tokens=4096)
    catalog = None
    if constrained:
        catalog = Catalog.load(catalog_file, token_id=Tokenizer(checkpoint).token_id)
        runtime.add_catalog(catalog)
    if graphed:
        runtime.core.programs = compiled_programs(runtime.core, lambda function: function)
    sizes: list[int] = []
    prompt_arrays = search_module.prompt_arrays

    def noting(core: Any, wave: Any, group: Group, rows: int) -> Any:
        sizes.append(len(group.searches))
        return prompt_arrays(core, wave, group, rows)

    monkeypatch.setattr(search_module, "prompt_arrays", noting)
    for lengths in LENGTHS:
        rng = np.random.default_rng(len(lengths))
        searches = [
            make_search(rng.integers(0, 50, length), 3 + 5 * b, 3, catalog=catalog) for b, length in enumerate(lengths)
        ]

        def results(searches: Any = searches) -> Any:
            outcomes = runtime.run([Job(search, 0.0, None) for search in searches])
            return [outcome.result.sequences for outcome in outcomes]  # type: ignore[union-attr]

        monkeypatch.setattr(search_module, "GROUP_TOKENS", 20_480)
        together = results()
        assert sizes == [len(lengths)]
        sizes.clear()
        monkeypatch.setattr(search_module, "GROUP_TOKENS", LIMIT)
        apart = results()
        assert sum(sizes) == len(lengths) and (len(sizes) > 1 or len(lengths) == 1)
        sizes.clear()
        for one, two in zip(together, apart, strict=True):
            assert len(one) == 3 and [s.token_ids for s in one] == [s.token_ids for s in two]
            assert [s.score for s in one] == pytest.approx([s.score for s in two], abs=1e-5)
    runtime.check_integrity()
