"""Both ops against plain loops, and their kernels against the plain ops."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from widebeam.engine.segment_top import MOST, column_best, segment_top

INF = float("inf")
UNLIMITED = 1 << 32


def expect_top(
    score: list[float], start: list[int], limit: list[int], size: int, by_position: bool
) -> tuple[list[int], list[bool]]:
    order, real, offset = [0] * size, [False] * size, 0
    for (begin, end), most in zip(pairwise(start), limit, strict=True):
        alive = [m for m in range(begin, end) if score[m] > -INF]
        taken = sorted(alive, key=lambda m: (-score[m], m))[:most]
        for place, m in enumerate(sorted(taken) if by_position else taken, offset):
            if place < size:
                order[place], real[place] = m, True
        offset += min(most, MOST)
    return order, real


scores = st.one_of(st.sampled_from([-0.0, 0.0, -1.5, 1e-45, 7.0, INF, -INF]), st.floats(width=32, allow_nan=False))


@settings(max_examples=400)
@given(
    score=st.lists(scores, max_size=60),
    limit=st.lists(st.one_of(st.integers(0, 8), st.just(UNLIMITED)), min_size=1, max_size=7),
    size=st.integers(0, 60),
    by_position=st.booleans(),
    data=st.data(),
)
def test_segment_top(score: list[float], limit: list[int], size: int, by_position: bool, data: st.DataObject) -> None:
    """Ties, the dead, empty segments, candidates of nobody, more or fewer places than are taken."""
    borders = st.lists(st.integers(0, len(score)), min_size=len(limit) + 1, max_size=len(limit) + 1)
    start = sorted(data.draw(borders))
    order, real = segment_top(torch.tensor(score), torch.tensor(start), torch.tensor(limit), size, by_position)
    assert order.dtype == torch.int64 and real.dtype == torch.bool
    assert (order.tolist(), real.tolist()) == expect_top(score, start, limit, size, by_position)


@pytest.mark.parametrize(("rows", "vocab", "height"), [(3, 130, 64), (1, 64, 64), (2, 5, 64), (4, 1024, 128)])
def test_column_best(rows: int, vocab: int, height: int) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 10
    best, lse = column_best(logits, height)
    assert best.tolist() == [[max(row[n : n + height]) for n in range(0, vocab, height)] for row in logits.tolist()]
    torch.testing.assert_close(lse, logits.double().logsumexp(1).float())


def unusual_rows(vocab: int, device: str) -> Tensor:
    """Logits with NaN, with infinities of either sign, with both, and all -inf; the last row is finite."""
    logits = torch.zeros(7, vocab, device=device)
    logits[0, 2], logits[1, 3], logits[2, 4] = torch.nan, torch.inf, -torch.inf
    logits[3, 1], logits[3, vocab - 1] = torch.inf, torch.nan
    logits[4, 1], logits[4, vocab - 1] = torch.inf, -torch.inf
    logits[5] = -torch.inf
    return logits


def test_log_sum_exp_is_as_unusual_as_the_row() -> None:
    lse = column_best(unusual_rows(70, "cpu"), 64)[1]
    finite = torch.tensor([70.0, 69.0]).log().tolist()
    expected = torch.tensor([torch.nan, torch.inf, finite[1], torch.nan, torch.inf, -torch.inf, finite[0]])
    torch.testing.assert_close(lse, expected, equal_nan=True)


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
def test_ops_are_sound(device: str) -> None:
    """Schema, fakes and dynamic shapes, as torch checks them."""
    score = torch.tensor([-1.0, -3.0, -2.0, -INF, -2.0], device=device)
    start, limit = torch.tensor([0, 3, 5], device=device), torch.tensor([2, 3], device=device)
    for by_position in (False, True):
        torch.library.opcheck(segment_top, (score, start, limit, 6, by_position))
    torch.library.opcheck(column_best, (torch.arange(200.0, device=device).view(2, 100), 64))


def example(lengths: list[int], limit: list[int], kind: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(score, start, limit) with 1000 candidates of nobody at the end."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.tensor([0, *lengths]).cumsum(0)
    M = int(start[-1]) + 1000
    score = torch.randn(M, generator=generator) * 5 - 12
    if kind == "ties":
        score = score.round()
    elif kind == "one score":
        score = torch.full((M,), -3.25)
    elif kind == "near":
        score = torch.randint(-1_000_000_040, -1_000_000_000, (M,), generator=generator).int().view(torch.float32)
    elif kind == "mostly dead":
        score = score.masked_fill(torch.rand(M, generator=generator) < 0.999, -torch.inf)
    return score, start, torch.tensor(limit)


SHAPES: list[tuple[list[int], list[int], int]] = [  # lengths, limits, size
    ([1], [1], 1),
    ([300_000], [256], 256),
    ([300_000] * 4, [256] * 4, 1024),
    ([2_000_000], [20_000], 20_000),
    ([20_000] * 256, [64] * 256, 64 * 256),
    ([0, 5, 0, 70_000, 2048, 1, 0], [3, 9, 0, 500, 2048, 7, 1], 3000),
    ([1000, 9000], [UNLIMITED, UNLIMITED], 5000),
    ([5000, 9000], [4000, 4000], 4100),
    ([5_000_000], [4096], 4096),
]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["spread", "ties", "one score", "near", "mostly dead"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape[0])}x{max(shape[0])}-{shape[2]}")
def test_segment_top_kernels(shape: tuple[list[int], list[int], int], kind: str) -> None:
    lengths, limit, size = shape
    host = example(lengths, limit, kind)
    device = [tensor.cuda() for tensor in host]
    for by_position in (False, True):
        expected = segment_top(*host, size, by_position)
        for _ in range(3):
            for mine, theirs in zip(segment_top(*device, size, by_position), expected, strict=True):
                assert torch.equal(mine.cpu(), theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "height"), [(1, 64), (5, 128), (64, 512)])
@pytest.mark.parametrize("vocab", [40, 8192, 8193, 151_936, 300_001])
def test_column_best_kernels(rows: int, vocab: int, height: int) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 8
    expected = column_best(logits, height)
    best, lse = column_best(logits.cuda(), height)
    assert torch.equal(best.cpu(), expected[0])
    torch.testing.assert_close(lse.cpu(), expected[1], rtol=1e-6, atol=1e-5)
    assert all(torch.equal(column_best(logits.cuda(), height)[1], lse) for _ in range(3))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [70, 20_000])
def test_column_best_kernels_on_unusual_rows(vocab: int) -> None:
    best, lse = column_best(unusual_rows(vocab, "cuda"), 64)
    expected = column_best(unusual_rows(vocab, "cpu"), 64)
    torch.testing.assert_close(lse.cpu(), expected[1], equal_nan=True)
    sound = ~expected[0].isnan()
    assert torch.equal(best.cpu()[sound], expected[0][sound])


def replayed(run: Any, inputs: list[Tensor], later: list[Tensor]) -> Any:
    """What a graph of `run`, recorded over some inputs, gives once they hold other values."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for _ in range(2):  # the second one finds what the first left behind
        for tensor, value in zip(inputs, later, strict=True):
            tensor.copy_(value)
        graph.replay()
    return [output.cpu() for output in outputs]


@pytest.mark.gpu
@pytest.mark.parametrize("by_position", [False, True])
def test_segment_top_in_a_graph(by_position: bool) -> None:
    now = [tensor.cuda() for tensor in example([50_000, 70_000], [300, 200], "ties")]
    later = list(example([90_000, 0], [100, 400], "spread", seed=1))
    later[0] = torch.cat([later[0], torch.zeros(len(now[0]) - len(later[0]))])
    mine = replayed(lambda: segment_top(*now, 500, by_position), now, later)
    for one, other in zip(mine, segment_top(*later, 500, by_position), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_column_best_in_a_graph() -> None:
    now, later = torch.zeros(3, 20_000, device="cuda"), torch.randn(3, 20_000)
    best, lse = replayed(lambda: column_best(now, 128), [now], [later])
    expected = column_best(later, 128)
    assert torch.equal(best, expected[0])
    torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=1e-5)
