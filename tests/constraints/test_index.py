"""The catalog index against a dictionary of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given

from tests.constraints.strategies import SIDS, WIDE_SIDS
from widebeam.constraints.index import CatalogIndex

Sid = tuple[int, ...]


def padded(sids: list[Sid]) -> np.ndarray:
    depth = max(map(len, sids))
    return np.array([[*sid, *[-1] * (depth - len(sid))] for sid in sids], np.int32)


def check_against_prefixes(sids: list[Sid]) -> None:
    index, order = CatalogIndex.build(padded(sids))
    by_sid = sorted(range(len(sids)), key=lambda i: sids[i])  # Python sorts a tuple before its extensions, and stably
    assert order.tolist() == by_sid
    depth = max(map(len, sids))
    prefixes = [sorted({sid[:length] for sid in sids if len(sid) >= length}) for length in range(depth + 1)]
    numbers = {prefix: number for number, prefix in enumerate(prefix for level in prefixes for prefix in level)}
    assert (index.depth, index.num_nodes, index.num_items) == (depth, len(numbers), len(sids))
    assert [index.nodes_at(length) for length in range(depth + 1)] == [len(level) for level in prefixes]
    assert index.level_start.tolist() == np.cumsum([0] + [len(level) for level in prefixes]).tolist()
    assert index.mixed_depth == (len({len(sid) for sid in sids}) > 1)
    assert index.num_sids == len(set(sids))
    fanouts: dict[int, list[int]] = {length: [] for length in range(depth + 1)}
    for prefix, node in numbers.items():
        children = sorted(other for other in numbers if other[:-1] == prefix and other)
        span = range(index.first_child[node], index.first_child[node + 1])
        assert [numbers[child] for child in children] == list(span)
        assert index.code[node] == (prefix[-1] if prefix else 0)
        below = [row for row, item in enumerate(by_sid) if sids[item][: len(prefix)] == prefix]
        assert list(range(index.item_lo[node], index.item_hi[node])) == below
        exact = [row for row, item in enumerate(by_sid) if sids[item] == prefix]
        assert below[: index.num_terminal[node]] == exact
        fanouts[len(prefix)].append(len(children))
    for length, counts in fanouts.items():
        counts.sort(reverse=True)
        assert index.max_fanout(length) == counts[0]
        for width in range(len(counts) + 2):
            assert index.widest(length, width) == sum(counts[:width])


@given(SIDS)
@example([(0,)])
@example([(2, 1), (2,), (2, 1, 0), (2, 1), (2,)])
def test_every_node_is_what_the_prefixes_say(sids: list[Sid]) -> None:
    check_against_prefixes(sids)


@given(WIDE_SIDS)
def test_large_codes_and_many_levels(sids: list[Sid]) -> None:
    check_against_prefixes(sids)


@pytest.mark.parametrize("mixed", [False, True])
def test_large_catalog_equals_a_recount(mixed: bool) -> None:
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 97, (200_000, 4)).astype(np.int32)
    if mixed:
        lengths = rng.integers(1, 5, len(codes))
        codes[np.arange(4) >= lengths[:, None]] = -1
    index, order = CatalogIndex.build(codes)
    ordered = codes[order]
    sorted_rows, counts = np.unique(codes, axis=0, return_counts=True)
    assert np.array_equal(ordered, np.repeat(sorted_rows, counts, axis=0))
    same = (ordered[1:] == ordered[:-1]).all(axis=1)
    assert (np.diff(order)[same] > 0).all()
    for depth in range(1, 5):
        nodes = slice(*index.level_start[depth : depth + 2])
        prefixes = codes[codes[:, depth - 1] >= 0, :depth]
        distinct, below = np.unique(prefixes, axis=0, return_counts=True)
        assert np.array_equal(index.code[nodes], distinct[:, -1])
        assert np.array_equal(index.item_hi[nodes] - index.item_lo[nodes], below)
        assert np.array_equal(ordered[index.item_lo[nodes], :depth], distinct)
        _, fanout = np.unique(distinct[:, :-1], axis=0, return_counts=True)
        assert index.max_fanout(depth - 1) == fanout.max()
        assert index.widest(depth - 1, 100) == np.sort(fanout)[::-1][:100].sum()
    assert index.num_terminal.sum() == len(codes)
    assert index.num_sids == len(sorted_rows)
    assert index.nbytes == index.level_start.nbytes + 5 * 4 * index.num_nodes + 4
