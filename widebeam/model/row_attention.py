"""Attention of one row a request over its context's pages, as a custom op that takes no plan.

Lengths and page tables are data on the device, so the host has nothing to do but to launch it. The plain implementation
is the CPU's path and the oracle of the kernels in `row_attention_triton`.

Letters: B requests, N pages of the longest context, Q query heads, K key/value heads, D head size, S slots, L keys of
one request.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from widebeam.custom_ops import custom_op, register_cuda, register_fake
from widebeam.model.ops import empty_rows, maybe_quantize
from widebeam.model.reference import attend_by_request


@custom_op("row_attention")
def row_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Tensor,
    length: Tensor,
    page_size: int,
    scale: float,
    quantize: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """q [B, Q, D] over the first `length[b]` keys ([B] int64) of each request -> (out [B, Q D], scale).

    Key t lies in slot `pages[b, t // page_size] * page_size + t % page_size` of the pools [S, K, D]; pages are [B, N]
    int32, of which only those of keys are read. Keys count `k_scale` times and values `v_scale` times. A row without
    keys becomes 0. No row depends on another.
    """

    def parts() -> Iterable[tuple[int, Tensor, Tensor]]:
        for table_N, keys in zip(pages.long(), length.tolist(), strict=True):
            key_L = torch.arange(keys, device=q.device)
            slot_L = table_N[key_L // page_size] * page_size + key_L % page_size
            yield 1, k_pool[slot_L], v_pool[slot_L]

    out_BQD, _ = attend_by_request(q, parts(), scale * k_scale, causal=False)
    return maybe_quantize((out_BQD if v_scale == 1 else out_BQD * v_scale).flatten(1), quantize)


@register_fake(row_attention)
def _(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Tensor,
    length: Tensor,
    page_size: int,
    scale: float,
    quantize: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    return empty_rows(q, q.shape[1] * q.shape[2], quantize)


@register_cuda(row_attention)
def _(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Tensor,
    length: Tensor,
    page_size: int,
    scale: float,
    quantize: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    from widebeam.model import row_attention_triton

    return row_attention_triton.row_attention(
        q, k_pool, v_pool, pages, length, page_size, scale, quantize, k_scale, v_scale
    )
