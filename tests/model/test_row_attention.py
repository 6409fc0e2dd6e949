"""Attention of one row a request, against softmax in float64; and its kernels on CUDA.

Letters: as in `widebeam.model.row_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.test_ops import DTYPES, HEADS, QUANTIZE, ROUNDINGS, close, close_rows, rows, to
from widebeam.model.ops import FP8, quantize_rows
from widebeam.model.row_attention import row_attention

gpu = pytest.mark.gpu
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
SIZES = pytest.mark.parametrize("page_size", [1, 7, 16, 64, 256])
FLOAT8 = pytest.mark.parametrize("float8", [False, True], ids=["plain", "float8"])


def row_args(
    lengths: Sequence[int],
    Q: int,
    K: int,
    D: int,
    dtype: torch.dtype,
    *,
    page_size: int = 16,
    quantize: bool = False,
    float8: bool = False,
) -> tuple[Any, ...]:
    """Pages in any order, and NaN wherever no key lies: behind a context's end, too. Entries of a table that no key
    needs are far outside. The pools have a gap between their slots."""
    counts = [-(-length // page_size) for length in lengths]
    order, pages = torch.randperm(sum(counts) + 1).int(), torch.full((len(lengths), max(counts) + 1), 1 << 30).int()
    pools = [torch.full(((sum(counts) + 1) * page_size, K + 1, D), torch.nan, dtype=dtype)[:, :K] for _ in range(2)]
    for row, (table, length) in enumerate(zip(order.split([*counts, 1]), lengths, strict=False)):
        pages[row, : len(table)] = table
        for pool in pools:
            pool[slots_of(table, length, page_size)] = rows(length, K, D, dtype=dtype)
    scales = (2.0**-6, 0.03) if float8 else (1.0, 1.0)
    if float8:
        pools = [(pool.float() / scale).clamp(-448, 448).to(FP8) for pool, scale in zip(pools, scales, strict=True)]
    q = rows(len(lengths), Q, D, dtype=dtype, spread=2)
    return q, *pools, pages, torch.tensor(lengths), page_size, D**-0.5, quantize, *scales


def slots_of(table: Tensor, length: int, page_size: int) -> list[int]:
    """Of all keys, one page behind the other."""
    return [int(page) * page_size + at for page in table for at in range(page_size)][:length]


def brute_force(args: tuple[Any, ...]) -> Tensor:
    """Head by head, in float64."""
    q, k_pool, v_pool, pages, length, page_size, scale, _, k_scale, v_scale = args
    (B, Q, D), K = q.shape, k_pool.shape[1]
    out = torch.zeros(B, Q, D, dtype=torch.float64)
    for b in range(B):
        slots = slots_of(pages[b, : -(-int(length[b]) // page_size)], int(length[b]), page_size)
        for head in range(Q if slots else 0):
            k, v = (pool[slots, head // (Q // K)].double() for pool in (k_pool, v_pool))
            out[b, head] = (k * k_scale @ q[b, head].double() * scale).softmax(0) @ (v * v_scale)
    return out.view(B, Q * D)


def ends(page_size: int) -> list[int]:
    """Lengths of contexts about the ends of pages, and of none."""
    return [1, 0, page_size, page_size + 1, 3 * page_size - 1, 2 * page_size, 37]


def check(args: tuple[Any, ...], device: str) -> None:
    """Against brute force; a request without keys gets 0. A GPU's exponentials are good for 1e-5 of a float32 sum."""
    out, no_scale = row_attention(*to(device, args))
    assert out.dtype == args[0].dtype and no_scale.shape == (0,) and (out[args[4] == 0] == 0).all()
    close(out, brute_force(args), max(4 * ROUNDINGS[out.dtype], 3e-5))


@DTYPES
@SIZES
@FLOAT8
def test_a_row_sees_its_own_context(dtype: torch.dtype, page_size: int, float8: bool) -> None:
    torch.manual_seed(0)
    for Q, K in ((4, 2), (3, 3), (7, 1)):
        check(row_args(ends(page_size), Q, K, 16, dtype, page_size=page_size, float8=float8), "cpu")


@gpu
@SIZES
def test_page_sizes_on_cuda(page_size: int) -> None:
    """For one type: each size is a kernel of its own, which takes seconds to compile."""
    torch.manual_seed(0)
    check(row_args(ends(page_size), 7, 1, 16, torch.bfloat16, page_size=page_size), "cuda")


@DEVICES
@DTYPES
def test_quantized_rows_are_the_rows(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    args = to(device, row_args([*ends(16), 900], 16, 8, 64, dtype))
    out, _ = row_attention(*args)
    quantized = row_attention(*args[:7], True, *args[8:])
    close_rows(quantized, tuple(t.cpu() for t in quantize_rows(out)), ROUNDINGS[dtype])  # type: ignore[arg-type]


@DEVICES
@DTYPES
@QUANTIZE
@FLOAT8
def test_opcheck(device: str, dtype: torch.dtype, quantize: bool, float8: bool) -> None:
    """Schema, fake, mutation and the absence of aliasing, by torch's own checker."""
    args = row_args([5, 0, 40], 4, 2, 16, dtype, quantize=quantize, float8=float8)
    able = ("test_faketensor", "test_aot_dispatch_dynamic")  # test_schema cannot compare float8, nor NaN
    torch.library.opcheck(row_attention, to(device, args), test_utils=able)
    finite = (args[0], *(pool.float().nan_to_num().to(dtype) for pool in args[1:3]), *args[3:])
    torch.library.opcheck(row_attention, to(device, finite))


@gpu
@DTYPES
@HEADS
@FLOAT8
def test_row_attention_on_cuda(dtype: torch.dtype, Q: int, K: int, D: int, float8: bool) -> None:
    """Contexts of one block, of fewer blocks than parts, and of several blocks a part."""
    torch.manual_seed(2)
    for lengths in ([5000, 1, 0, 64, 777], [300] * 17):
        check(row_args(lengths, Q, K, D, dtype, page_size=64, float8=float8), "cuda")


@gpu
def test_heads_of_256_on_cuda() -> None:
    torch.manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):
        check(row_args([900, 31], 32, 2, 256, dtype), "cuda")


@gpu
def test_slots_beyond_32_bits_on_cuda() -> None:
    """Of a pool with more than 2^31 elements: the last page."""
    torch.manual_seed(4)
    q, _, _, _, length, *rest = to("cuda", row_args([64], 16, 8, 128, torch.bfloat16, page_size=64))
    S = (1 << 31) // (8 * 128) + 64
    pools = [torch.zeros(S, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for pool in pools:
        pool[-64:].normal_()
    far = torch.tensor([[S // 64 - 1]], dtype=torch.int32, device="cuda")
    near = (pool[-64:].clone() for pool in pools)
    expected = row_attention(q, *near, torch.zeros_like(far), length, *rest)[0]
    assert torch.equal(row_attention(q, *pools, far, length, *rest)[0], expected) and (expected != 0).all()


@gpu
def test_company_changes_no_bit_on_cuda() -> None:
    torch.manual_seed(5)
    args = to("cuda", row_args([5000, 3, 777, 0, 64], 16, 8, 128, torch.bfloat16, page_size=64))
    together = row_attention(*args)[0]
    assert torch.equal(row_attention(*args)[0], together)
    q, k_pool, v_pool, pages, length, *rest = args
    for b in range(5):
        alone = row_attention(q[b : b + 1], k_pool, v_pool, pages[b : b + 1], length[b : b + 1], *rest)[0]
        assert torch.equal(alone, together[b : b + 1])


@gpu
def test_a_graph_follows_lengths_and_pages_on_cuda() -> None:
    """They are data: one capture serves whatever lies in them when it is replayed."""
    torch.manual_seed(6)
    call = to("cuda", row_args([600, 600], 16, 8, 128, torch.bfloat16))
    pages, length = call[3:5]
    row_attention(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = row_attention(*call)
    seen = []
    for change in (lambda: length.sub_(200), lambda: pages.copy_(pages.flip(0)), lambda: length[0].zero_(), lambda: 0):
        graph.replay()
        seen.append(out.clone())
        assert torch.equal(out, row_attention(*call)[0])
        change()
    assert not any(torch.equal(one, other) for one, other in pairwise(seen))
