"""Copies of pages to the host's memory and back, by themselves."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kv.cached_prompts import S
from widebeam.kv.copies import PageCopies, runs


@given(st.lists(st.integers(1, 30), unique=True))
def test_neighbours_are_copied_together(places: list[int]) -> None:
    """Runs cover a list from end to end, each as long as it can be."""
    found = [places[first : first + count] for first, count in runs(places)]
    assert [place for run in found for place in run] == places
    assert all(run == list(range(run[0], run[0] + len(run))) for run in found)
    assert all(one[-1] + 1 != two[0] for one, two in pairwise(found))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("staged", [1, 2, 5])
def test_copies_either_way_keep_what_pages_hold(device: str, staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pages than are staged at a time, scattered or side by side, to other pages than they came from, one transfer
    right behind another."""
    N, P, words = 3, 40, 64
    torch.manual_seed(0)
    page_bytes = 2 * N * words * 8
    monkeypatch.setattr("widebeam.kv.copies.STAGED_BYTES", staged * page_bytes)
    copies = PageCopies(N, words * 8, P, torch.device(device))
    pools = [torch.randint(1 << 40, (N, P * S, words // S), device=device) for _ in range(2)]
    by_page = [pool.view(N, P, words) for pool in pools]
    before = [pages.clone() for pages in by_page]
    rng = np.random.default_rng(staged)
    for _ in range(5):
        count = int(rng.integers(1, P // 2))
        came, went = rng.permutation(P - 1)[: 2 * count].reshape(2, -1) + 1
        places = np.sort(rng.permutation(P)[:count]) + 1
        copies.save(pools, came.tolist(), places.tolist())
        copies.fence()
        for pages in by_page:
            pages[:, went] = -1
        event = None
        if device == "cuda":
            event = torch.cuda.Event()
            event.record()
        copies.restore(pools, went.tolist(), places.tolist(), event)
        copies.fence()
        for pages, old in zip(by_page, before, strict=True):
            old[:, went] = old[:, came]
            assert torch.equal(pages, old)
