"""Lists of FlashAttention-3's tiles: against all tiles counted one by one, and FlashInfer's own, greedy way."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model.test_attention import CONFIG
from widebeam.model.flashinfer import FlashInferBackend, why_not
from widebeam.model.planning import DeviceArrays
from widebeam.model.work_lists import INDPTR, ListPlanner, Shape, work_lists, write_lists

CPU = torch.device("cpu")
REQUESTS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 300)), min_size=1, max_size=7)
Wanted = list[tuple[int, ...]]


def begins(sizes: list[int]) -> np.ndarray:
    return np.array([sum(sizes[:i]) for i in range(len(sizes) + 1)], dtype=np.int32)


def arguments(requests: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of requests with so many rows and more keys than rows."""
    rows, lengths = [rows for rows, _ in requests], [rows + more for rows, more in requests]
    return begins(rows), begins(lengths), np.array(lengths, dtype=np.int32)


def wanted(rows: np.ndarray, keys: np.ndarray, lengths: np.ndarray, heads: int, tile: int) -> Wanted:
    """All tiles, counted one by one."""
    return [
        (number, rows[b], keys[b], rows[b + 1] - rows[b], lengths[b], head, b)
        for head in range(heads)
        for b in range(len(lengths))
        for number in range(-(-int(rows[b + 1] - rows[b]) // tile))
    ]


def columns(lists: list[np.ndarray]) -> Wanted:
    return [*zip(*(each.tolist() for place, each in enumerate(lists) if place != INDPTR), strict=True)]


@given(REQUESTS, st.integers(1, 9), st.sampled_from([16, 48]), st.booleans(), st.integers(2, 40))
def test_every_tile_is_somebodys(
    requests: list[tuple[int, int]], heads: int, tile: int, causal: bool, processors: int
) -> None:
    lists = work_lists(*arguments(requests), Shape(heads, tile, causal, processors))
    assert sorted(columns(lists)) == sorted(wanted(*arguments(requests), heads, tile))
    ends = lists[INDPTR].tolist()
    assert len(ends) == processors + 1 and ends == sorted(ends) and ends[0] == 0 and ends[-1] == len(lists[0])
    assert all(each.dtype == np.int32 for each in lists)


def loads(lists: list[np.ndarray], tile: int, causal: bool) -> list[int]:
    """What each multiprocessor's tiles cost: rows twice, and the keys that the last row of a tile sees."""
    costs = []
    for number, _, _, rows, keys, _, _ in columns(lists):
        costs.append(2 * tile + (max(0, min(keys, keys - rows + (number + 1) * tile)) if causal else keys))
    ends = lists[INDPTR].tolist()
    return [sum(costs[begin:end]) for begin, end in itertools.pairwise(ends)]


def greedy(costs: list[int], heads: int, processors: int) -> int:
    """The largest load if, head by head, each tile goes to whoever has least."""
    heap = [0] * processors
    for cost in costs * heads:
        heapq.heapreplace(heap, heap[0] + cost)
    return max(heap)


def test_no_multiprocessor_has_much_more_than_the_greedy_way_gives_it() -> None:
    rng, tile, processors, ratios = np.random.default_rng(0), 128, 132, []
    for trial in range(150):
        heads, count, causal = int(rng.choice([4, 5, 8, 16, 40])), int(rng.integers(1, 17)), trial % 2 == 0
        rows = rng.integers(1, rng.choice([300, 1200, 9000] if causal else [40, 300, 1200]), count)
        keys = rows if causal else rng.integers(1, 32_000, count)
        given = begins(rows.tolist()), begins(keys.tolist()), keys.astype(np.int32)
        largest = max(loads(work_lists(*given, Shape(heads, tile, causal, processors)), tile, causal))
        tiles = sorted(zip(keys.tolist(), rows.tolist(), strict=True), reverse=True)
        costs = [
            2 * tile + (min(some, (number + 1) * tile) if causal else some)
            for some, size in tiles
            for number in reversed(range(-(-size // tile)))
        ]
        ratios.append(largest / greedy(costs, heads, processors))
    assert max(ratios) < 1.1 and sum(ratios) / len(ratios) < 0.97


class Wrapper:
    """As much of FlashInfer's as planning sees: puts its lists where the compiled planner does, in an order of its
    own."""

    def __init__(self, arrange: Callable[[list[np.ndarray]], list[np.ndarray]], shared: bool = False) -> None:
        self._pin_memory_int_workspace_buffer, self._int_workspace_buffer = torch.zeros(2, 65536, dtype=torch.uint8)
        self._plan_info: Any = None
        self._arrange, self._shared = arrange, shared
        self.called = 0

    def plan(self, lists: list[np.ndarray]) -> None:
        self.called += 1
        self._plan_info = [*(8192 * place for place in range(len(lists))), self._shared]
        host = self._pin_memory_int_workspace_buffer.numpy().view(np.int32)
        for place, each in enumerate(self._arrange(lists)):
            host[2048 * place : 2048 * place + len(each)] = each


def backwards(lists: list[np.ndarray]) -> list[np.ndarray]:
    return [each if place == INDPTR else each[::-1] for place, each in enumerate(lists)]


def plan(wrapper: Wrapper, planner: ListPlanner, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The arrays that the device gets, and the lists."""
    rng = np.random.default_rng(seed)
    ends = sorted(rng.integers(0, 900, 3))
    given = arguments([(int(rows), 3) for rows in np.diff([0, *ends, 900])])
    lists = work_lists(*given, Shape(3, 128, True, 7))
    planner.plan(lambda: wrapper.plan(lists), *given)
    return [*given], lists


def test_later_plans_put_their_lists_where_the_first_one_had_them() -> None:
    wrapper, arrays = Wrapper(backwards), DeviceArrays([5, 5, 4], CPU)
    planner = ListPlanner(wrapper, arrays, 3, 128, causal=True, processors=7)
    plan(wrapper, planner, 0)
    for seed in range(1, 6):
        brought, lists = plan(wrapper, planner, seed)
        device = wrapper._int_workspace_buffer.numpy().view(np.int32)
        assert all(device[2048 * i : 2048 * i + len(each)].tolist() == each.tolist() for i, each in enumerate(lists))
        assert [view.tolist() for view in arrays.views] == [each.tolist() for each in brought]
    assert wrapper.called == 1


class Compiled(Wrapper):
    """Plans as `PrefillSM90Plan` of FlashInfer 0.6 does (include/flashinfer/attention/scheduler.cuh), for graphs."""

    def __init__(self, heads: int, tile: int, causal: bool, processors: int) -> None:
        super().__init__(backwards)
        self.shape = heads, tile, causal, processors

    def plan_for(self, rows: np.ndarray, keys: np.ndarray, lengths: np.ndarray) -> None:
        heads, tile, causal, processors = self.shape
        heap = [(0, processor) for processor in range(processors)]
        work: list[Wanted] = [[] for _ in heap]
        for head in range(heads):
            for b in sorted(range(len(lengths)), key=lambda b: -lengths[b]):
                size, length = int(rows[b + 1] - rows[b]), int(lengths[b])
                for number in reversed(range(-(-size // tile))):
                    seen = max(min(length - size + (number + 1) * tile, length), 0) if causal else length
                    cost, processor = heap[0]
                    heapq.heapreplace(heap, (cost + 2 * tile + seen, processor))
                    work[processor].append((number, rows[b], keys[b], size, length, head, b))
        most = (-(-int(rows[-1]) // tile) + len(lengths) - 1) * heads
        columns = [*zip(*itertools.chain.from_iterable(work), strict=True)]
        columns.insert(INDPTR, tuple(itertools.accumulate(map(len, work), initial=0)))
        host, end, places = self._pin_memory_int_workspace_buffer.numpy(), 0, []
        for number, column in enumerate(columns):
            places.append(-(-end // 16) * 16)
            end = places[-1] + 4 * (most if number != INDPTR else processors + 1)
            host[places[-1] : places[-1] + 4 * len(column)] = np.array(column, dtype=np.int32).view(np.uint8)
        self._plan_info = [*places, 0]
        self._int_workspace_buffer[:end] = self._pin_memory_int_workspace_buffer[:end]

    @property
    def room(self) -> list[np.ndarray]:
        """What the device has from where each list begins to where the next one does."""
        device = self._int_workspace_buffer.numpy().view(np.int32)
        return np.split(device, [place // 4 for place in self._plan_info[1:-1]])

    @property
    def tiles(self) -> Wanted:
        """Those that all multiprocessors find."""
        room, processors = self.room, self.shape[-1]
        begins, columns = room[INDPTR][: processors + 1], [each for i, each in enumerate(room) if i != INDPTR]
        runs = [range(*ends) for ends in itertools.pairwise(begins.tolist())]
        return sorted(tuple(int(each[place]) for each in columns) for run in runs for place in run)


LAYOUTS = st.integers(1, 16).flatmap(
    lambda count: st.lists(
        st.lists(st.tuples(st.integers(0, 300), st.integers(1, 3000)), min_size=count, max_size=count),
        min_size=2, max_size=4,
    )
)  # fmt: skip


@given(LAYOUTS, st.integers(1, 6), st.sampled_from([64, 128]), st.booleans(), st.sampled_from([7, 132]))
def test_lists_are_those_of_the_compiled_planner(
    layouts: list[list[tuple[int, int]]], heads: int, head_dim: int, causal: bool, processors: int
) -> None:
    """Requests of any sizes, none at all too, in rows that are always as many: what is left over fills the shape."""
    tile = 192 if head_dim == 64 else 128
    total = max(1, *(sum(rows for rows, _ in layout) for layout in layouts))
    wrapper = Compiled(heads, tile, causal, processors)
    arrays = DeviceArrays([len(layouts[0]) + 2] * 2 + [len(layouts[0]) + 1], CPU)
    planner = ListPlanner(wrapper, arrays, heads, head_dim, causal=causal, processors=processors)
    for layout in layouts:
        sizes = [*(rows for rows, _ in layout), total - sum(rows for rows, _ in layout)]
        lengths = sizes if causal else [*(keys for _, keys in layout), 1]
        given = begins(sizes), begins(lengths), np.array(lengths, dtype=np.int32)
        planner.plan(lambda given=given: wrapper.plan_for(*given), *given)
        assert wrapper.tiles == sorted(wanted(*given, heads, tile))


def less(lists: list[np.ndarray]) -> list[np.ndarray]:
    """Another number of keys."""
    return [each - (place == 4) for place, each in enumerate(lists)]


@pytest.mark.gpu
def test_the_device_makes_the_same_lists() -> None:
    """As `work_lists`, and writes nothing else."""
    rng = np.random.default_rng(0)
    for trial in range(200):
        heads, tile, causal = int(rng.choice([1, 5, 16, 40])), int(rng.choice([128, 192])), trial % 2 == 0
        processors, count = int(rng.choice([7, 108, 132])), int(rng.integers(1, 300 if trial % 10 == 0 else 18))
        sizes = rng.integers(0, rng.choice([40, 300, 3000]), count) * (rng.random(count) < 0.8)
        more = rng.integers(0, 300, count) * (trial % 3 > 0)
        requests = [*zip(sizes.tolist(), more.tolist(), strict=True)]
        given, shape = arguments(requests), Shape(heads, tile, causal, processors)
        most = int(given[0][-1]) // tile + count
        lists = work_lists(*given, shape)
        starts = [place * (most * heads + processors + 1) for place in range(8)]
        room = torch.full((starts[-1] + most * heads,), -7, dtype=torch.int32, device="cuda")
        rows, keys, lengths = (torch.from_numpy(each).cuda() for each in given)
        write_lists(room, torch.tensor(starts, dtype=torch.int32).cuda(), rows, keys, lengths, most, shape)
        wanted = np.full(len(room), -7)
        for start, each in zip(starts, lists, strict=True):
            wanted[start : start + len(each)] = each
        assert np.array_equal(room.cpu().numpy(), wanted), (shape, requests)


def test_a_wrapper_that_plans_in_another_way_is_told() -> None:
    for wrapper in (Wrapper(less), Wrapper(backwards, shared=True)):
        planner = ListPlanner(wrapper, DeviceArrays([5, 5, 4], CPU), 3, 128, causal=True, processors=7)
        with pytest.raises(RuntimeError, match="plans in another way"):
            plan(wrapper, planner, 0)


@pytest.mark.gpu
@pytest.mark.timeout(600)  # kernels are built where none are cached
@pytest.mark.parametrize("heads", [(16, 8), (5, 1)])
def test_plans_made_again_give_the_same_bits(heads: tuple[int, int]) -> None:
    """As the first plan of a shape does, which is FlashInfer's own."""
    device, dtype, (Q, K) = torch.device("cuda"), torch.bfloat16, heads
    config = msgspec.structs.replace(CONFIG, num_heads=Q, num_kv_heads=K, head_dim=128)
    if reason := why_not(config, dtype, device):
        pytest.skip(reason)
    backend = FlashInferBackend(config, 16, 600, dtype, device)
    torch.manual_seed(0)
    rows = 3000
    q, k, v = (torch.randn(rows, some, 128, device=device, dtype=dtype) for some in (Q, K, K))
    k_pool, v_pool = (torch.randn(16 * 600, K, 128, device=device, dtype=dtype) for _ in range(2))
    prompts = [[3000], [700, 2, 1900], [129, 128, 127, 1]]
    widths, contexts = [[2999, 1], [256, 300, 1]], [[16 * 300, 40], [16 * 200, 1000, 16 * 300 - 5]]
    pages = [[[*range(b * 300, b * 300 + -(-length // 16))] for b, length in enumerate(one)] for one in contexts[:1]]
    pages.append([[*range(-(-length // 16))] for length in contexts[1]])

    def results(own: bool) -> list[torch.Tensor]:
        prefill, context = backend.prefill_plan(4, rows), backend.context_plan(3, rows, 1, beside=False)
        found = []
        for lengths in prompts:
            prefill = prefill if own else backend.prefill_plan(4, rows)
            prefill.plan(lengths, rows)
            found.extend(prefill.run(q, k, v))
        for width, length, table in zip(widths, contexts, pages, strict=True):
            context = context if own else backend.context_plan(3, rows, 1, beside=False)
            context.plan(width, length, table)
            found.extend(context.run(q, k_pool, v_pool, 1.0))
        return found

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(results(True), results(False), strict=True))
