"""How long one product, one attention or one copy takes on this machine, alone and at its best: what floor.py sums.

timing.py says how. Everything is measured once per size and remembered. Without a GPU it runs too, but then the numbers
say nothing.

Letters: T packed prompt tokens, R rows, Q query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from timing import CUDA, DEVICE, Call, distinct, graph_of, launch_ms, remembered
from torch import Tensor

COPY_BYTES = (1 << 30) if CUDA else (1 << 20)
WORKSPACE_BYTES = 256 << 20
PAGE = 64
SPLITS = (1, 4)


def layers_of(
    layers: int, products: Iterable[tuple[int, int]], requests: int, context: int, Q: int, K: int, D: int, fp8: bool
) -> Call:
    """The products and the attention of so many layers over whole prompts, to be launched at once."""
    rows = requests * context
    calls = [_ragged(requests, context, Q, K, D)]
    for n, k in products:
        product = _fp8_products(rows, n, k, 1) if fp8 and CUDA else [partial(torch.mm, random(rows, k), random(k, n))]
        calls += product
    for call in calls:
        call()
    replay = graph_of(calls) if CUDA else lambda: [call() for call in calls]
    return lambda: [replay() for _ in range(layers)]


def random(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=DEVICE)


def random_fp8(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """An fp8 matrix, and a scale for each row as a column."""
    return random(rows, columns).to(torch.float8_e4m3fn), torch.rand(rows, 1, device=DEVICE)


@cache
def _copying() -> Callable[[Tensor, Tensor], object]:
    """The fastest way to copy a large tensor to another, (target, source). Kernels that compute something beside it
    may be faster than PyTorch's own copy: that becomes a memcpy in a graph, which had two thirds of their speed on an
    H200."""

    def negated(dtype: torch.dtype, target: Tensor, source: Tensor) -> object:
        return torch.neg(source.view(dtype), out=target.view(dtype))

    ways = [Tensor.copy_, *(partial(negated, dtype) for dtype in (torch.int64, torch.int32, torch.int16))]
    source, target = _words(COPY_BYTES), torch.empty(COPY_BYTES // 8, dtype=torch.int64, device=DEVICE)
    return min(ways, key=lambda way: launch_ms([partial(way, target, source)]))


def _words(nbytes: int) -> Tensor:
    """Random numbers of 8 bytes, at least one."""
    return torch.randint(1 << 62, (max(1, nbytes // 8),), device=DEVICE)


@remembered
def copy_ms(nbytes: int) -> float:
    """Milliseconds of a kernel that reads half of so many bytes and writes the other half.

    Between the same two tensors again and again: what fits the cache stays there, as what a product has just written
    does. So of a small size this is the cache's speed, of a large one the memory's.
    """
    source = _words(min(nbytes // 2, COPY_BYTES))
    moved = 2 * source.nbytes
    return launch_ms([partial(_copying(), torch.empty_like(source), source)]) * max(1.0, nbytes / moved)


def copy_tb_s() -> float:
    """What a large copy reads and writes, in terabytes a second."""
    return 2 * COPY_BYTES / copy_ms(2 * COPY_BYTES) / 1e9


@remembered
def product_ms(rows: int, n: int, k: int) -> float:
    """[rows, k] x [k, n] in bf16."""
    x = random(rows, k)
    weights = [random(n, k) for _ in range(distinct(n * k * 2))]
    return _by_either_library([partial(torch.mm, x, weight.t()) for weight in weights])


@remembered
def fp8_product_ms(rows: int, n: int, k: int) -> float:
    """The same from fp8 operands, scaled by row and by column, with fast accumulation. Infinite where it cannot run."""
    if not CUDA or rows < 16 or torch.cuda.get_device_capability() < (8, 9):
        return float("inf")
    return launch_ms(_fp8_products(rows, n, k, distinct(n * k)))


def _fp8_products(rows: int, n: int, k: int, count: int) -> list[Call]:
    """By so many weights."""
    x, scale = random_fp8(rows, k)
    weights = [random_fp8(n, k) for _ in range(count)]
    scaled = partial(torch._scaled_mm, x, scale_a=scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    return [partial(scaled, weight.t(), scale_b=scales.t()) for weight, scales in weights]


@remembered
def head_ms(rows: int, columns: int, hidden: int) -> float:
    """Bf16 operands to float32 logits. All levels use one head, so it is not made cold."""
    x, head = random(rows, hidden), random(columns, hidden)
    if not CUDA:  # which has no such product
        return launch_ms([lambda: F.linear(x.float(), head.float())])
    return _by_either_library([partial(torch.mm, x, head.t(), out_dtype=torch.float32)])


def _by_either_library(calls: Sequence[Call]) -> float:
    """The better of cuBLAS and cuBLASLt."""
    if not CUDA:
        return launch_ms(calls)
    before = torch.backends.cuda.preferred_blas_library()
    times = []
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        times.append(launch_ms(calls))
    torch.backends.cuda.preferred_blas_library(before)
    return min(times)


@remembered
def prefill_attention_ms(requests: int, context: int, Q: int, K: int, D: int) -> float:
    """Causal attention of whole prompts in one layer: FlashInfer's ragged kernel, or PyTorch's where it is missing."""
    return launch_ms([_ragged(requests, context, Q, K, D)])


def _ragged(requests: int, context: int, Q: int, K: int, D: int) -> Call:
    q, k, v = (random(requests * context, heads, D) for heads in (Q, K, K))
    if not _has_flashinfer():
        return _dense(q, k, v, requests, causal=True)
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    bounds = torch.arange(requests + 1, dtype=torch.int32) * context
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD", backend=_kernel())
    wrapper.plan(bounds, bounds, Q, K, D, causal=True, q_data_type=q.dtype, kv_data_type=q.dtype)
    return partial(wrapper.run, q, k, v)


@remembered
def context_attention_ms(requests: int, width: int, context: int, Q: int, K: int, D: int) -> float:
    """`width` rows of each request over its context, in pages, in one layer: the context whole or in four parts."""
    pages = -(-context // PAGE)
    q = random(requests * width, Q, D)
    count = distinct(requests * pages * PAGE * K * D * 4)
    pools = [tuple(random(requests * pages, PAGE, K, D) for _ in range(2)) for _ in range(count)]
    if not _has_flashinfer():
        return launch_ms([_dense(q, k.flatten(0, 1), v.flatten(0, 1), requests, causal=False) for k, v in pools])
    plans = [_paged(requests, width, context, parts, Q, K, D) for parts in SPLITS if parts <= pages]
    return min(launch_ms([partial(run, q, pool) for pool in pools]) for run in plans)


def _paged(
    requests: int, width: int, context: int, parts: int, Q: int, K: int, D: int
) -> Callable[[Tensor, Any], object]:
    """FlashInfer's paged kernel over each context in so many parts: pseudo-requests with the same queries, merged."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper, merge_states

    pages = -(-context // PAGE)
    order = torch.randperm(requests * pages).int()
    cuts = [pages * part // parts for part in range(parts + 1)]
    tables = [
        order[b * pages + first : b * pages + end] for first, end in itertools.pairwise(cuts) for b in range(requests)
    ]
    last = [PAGE] * (parts - 1) + [context - (pages - 1) * PAGE]
    batch = requests * parts
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=_kernel())
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32) * width,
        torch.tensor([0, *itertools.accumulate(map(len, tables))], dtype=torch.int32),
        torch.cat(tables).to(DEVICE),
        torch.tensor([size for size in last for _ in range(requests)], dtype=torch.int32),
        Q, K, D, PAGE, causal=False, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip

    def run(q: Tensor, pool: Any) -> object:
        out, lse = wrapper.run(q if parts == 1 else q.repeat(parts, 1, 1), pool, return_lse=True)
        if parts == 1:
            return out
        states = [x.unflatten(0, (parts, -1)).transpose(0, 1).contiguous() for x in (out, lse)]
        return merge_states(*states)

    return run


def _dense(q: Tensor, k: Tensor, v: Tensor, requests: int, *, causal: bool) -> Call:
    """PyTorch's attention of requests of equal lengths."""
    q, k, v = (x.unflatten(0, (requests, -1)).transpose(1, 2) for x in (q, k, v))
    return partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=True)


def _has_flashinfer() -> bool:
    return CUDA and importlib.util.find_spec("flashinfer") is not None


def _kernel() -> str:
    return "fa3" if torch.cuda.get_device_capability()[0] == 9 else "fa2"


@cache
def _workspace() -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
