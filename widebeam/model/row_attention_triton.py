"""`row_attention` as a Triton kernel and its launcher. Nothing waits for the device; graphs may record it.

One row a request is little work on much memory: as in Flash-Decoding each context is cut in PARTS, whose programs fill
the device even for one request, and `merge_beams` puts the parts together, as it does those of a level. Where a context
is cut follows from its length alone, so that a row's bits are the same in any company.

Letters: as in `widebeam.model.row_attention`; P parts of a context.
"""

# mypy: disallow-untyped-defs=False
# (what a kernel takes has no Python type; launchers are typed as the ops are)

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from widebeam.model.ops_triton import NEVER, merge_beams, slot_stride

PARTS = tl.constexpr(32)
"""With 8 key heads one request gives every multiprocessor of a large GPU something to read."""
TILE_BYTES = 16 << 10
"""Of keys, or of values, that a program reads at once: with more in flight several programs fit a multiprocessor."""
LEAST = 16
"""Rows and columns of the smallest product that a tensor core makes."""


@triton.jit(do_not_specialize=["rows", "N"])
def _row_attention(
    q, k_pool, v_pool, pages, length, softmax_scale, partial, lse, rows, N, k_stride, v_stride,
    S: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of a request's keys under one key head, for all query heads that share it: rows of a tile.

    A part is a whole number of blocks, so that none of them but the last is cut. Of a part without keys only the
    log-sum-exp is written, -inf.
    """
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    keys = tl.load(length + row).to(tl.int32)
    share = tl.cdiv(keys, PARTS * BLOCK) * BLOCK
    first = part * share
    end = tl.minimum(first + share, keys)
    member, column, offset = tl.arange(0, GROUP), tl.arange(0, D)[None, :], tl.arange(0, BLOCK)
    head, mine = kv_head * (Q // K) + member, member < Q // K
    at = head[:, None] * D + column
    query = tl.load(q + row * (Q * D) + at, mine[:, None], 0.0)
    kv_at = kv_head * D + column
    top = tl.full([GROUP, 1], NEVER, tl.float32)
    total = tl.zeros([GROUP, 1], tl.float32)
    merged = tl.zeros([GROUP, D], tl.float32)
    for begin in range(first, end, BLOCK):
        key_at = begin + offset
        there = key_at < end
        slot = tl.load(pages + row * N + key_at // S, there, 0).to(tl.int64) * S + key_at % S
        key = tl.load(k_pool + slot[:, None] * k_stride + kv_at, there[:, None], 0.0).to(query.dtype)
        logit = tl.dot(query, tl.trans(key), input_precision="ieee") * softmax_scale
        logit = tl.where(there[None, :], logit, -float("inf"))
        new_top = tl.maximum(top, tl.max(logit, 1, keep_dims=True))
        keep, weight = tl.exp(top - new_top), tl.exp(logit - new_top)
        value = tl.load(v_pool + slot[:, None] * v_stride + kv_at, there[:, None], 0.0).to(query.dtype)
        added = tl.dot(weight.to(query.dtype), value, input_precision="ieee")
        top, total, merged = new_top, total * keep + tl.sum(weight, 1, keep_dims=True), merged * keep + added
    place = part * rows + row
    tl.store(lse + place * Q + head[:, None], top + tl.log(total), mine[:, None])
    tl.store(partial + place * (Q * D) + at, merged / total, mine[:, None] & (first < end))


def row_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, pages: Tensor, length: Tensor, page_size: int,
    scale: float, quantize: bool, k_scale: float = 1.0, v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (B, Q, D), K, P = q.shape, k_pool.shape[1], PARTS.value
    q, pages, length = q.contiguous(), pages.contiguous(), length.contiguous()
    partial, lse = (q.new_empty(size, dtype=torch.float32) for size in ((P * B, Q, D), (P * B, Q)))
    _row_attention[B, K, P](
        q, k_pool, v_pool, pages, length, scale * k_scale, partial, lse, B, pages.shape[1], slot_stride(k_pool),
        slot_stride(v_pool), page_size, Q, K, D, max(LEAST, triton.next_power_of_2(Q // K)),
        max(LEAST, min(64, TILE_BYTES // (D * q.element_size()))), num_warps=4, num_stages=3,
    )  # fmt: skip
    nothing = length.new_empty((B, 0))  # of which there are none, however many `length` says are seen
    return merge_beams(q, partial, lse, k_pool, v_pool, nothing, length, 1.0, 1.0, quantize, v_scale)
