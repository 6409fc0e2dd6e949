"""The attention ops in plain PyTorch: the CPU's backend, and the oracle for every other one.

Softmax and both products run in float32 whatever the operands are. Requests are taken one after another with lengths
that the host knows, so nothing is read back from a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from widebeam.model.config import ModelConfig

SCORES_AT_ONCE = 1 << 26
"""Attention scores held at a time (256 MiB of float32): bounds memory at long contexts and wide beams."""


class TorchPrefill:
    """PrefillPlan over a list of lengths."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._lengths: list[int] = []

    def plan(self, lengths: Sequence[int], num_rows: int) -> None:
        self._lengths = [*lengths, num_rows - sum(lengths)]  # what only fills a shape is one more prompt, and finite

    def run(self, q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        def parts() -> Iterable[tuple[int, Tensor, Tensor]]:
            start = 0
            for length in self._lengths:
                yield length, k_TKD[start : start + length], v_TKD[start : start + length]
                start += length

        return attend_by_request(q_TQD, parts(), self._scale, causal=True)


class TorchContext:
    """ContextPlan over lists of widths, lengths and page tables."""

    def __init__(self, scale: float, page_size: int, device: torch.device) -> None:
        self._scale, self._page_size, self._device = scale, page_size, device
        self._requests: list[tuple[int, int, Tensor]] = []

    def plan(self, widths: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        self._requests = [
            (width, length, torch.tensor(table, dtype=torch.int64).to(self._device, non_blocking=True))
            for width, length, table in zip(widths, lengths, pages, strict=True)
        ]

    def run(self, q: Tensor, k_SKD: Tensor, v_SKD: Tensor, k_scale: float) -> tuple[Tensor, Tensor]:
        k_pages, v_pages = (pool.unflatten(0, (-1, self._page_size)) for pool in (k_SKD, v_SKD))

        def parts() -> Iterable[tuple[int, Tensor, Tensor]]:
            for width, length, pages in self._requests:
                yield width, k_pages[pages].flatten(0, 1)[:length], v_pages[pages].flatten(0, 1)[:length]

        return attend_by_request(q, parts(), self._scale * k_scale, causal=False)


class TorchBackend:
    """Plans of no fixed shape, which never cut a context; nothing is kept between them."""

    name = "torch"
    lse_scale = 1.0
    fallbacks = 0
    replayable = False

    def __init__(
        self,
        config: ModelConfig,
        page_size: int,
        max_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self._scale, self._page_size, self._device = config.head_dim**-0.5, page_size, device

    def prefill_plan(self, requests: int, rows: int | None) -> TorchPrefill:
        return TorchPrefill(self._scale)

    def context_plan(self, requests: int, rows: int, splits: int, beside: bool) -> TorchContext:
        return TorchContext(self._scale, self._page_size, self._device)


def attend_by_request(
    q_RQD: Tensor, parts: Iterable[tuple[int, Tensor, Tensor]], scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend consecutive rows of q to their own request's keys; rows behind the last request stay zero and -inf."""
    out = torch.zeros_like(q_RQD, memory_format=torch.contiguous_format)
    lse = torch.full(q_RQD.shape[:2], -torch.inf, dtype=torch.float32, device=q_RQD.device)
    start = 0
    for rows, k_LKD, v_LKD in parts:
        k_KDL, v_KLD = k_LKD.float().permute(1, 2, 0), v_LKD.float().transpose(0, 1)
        step = max(1, SCORES_AT_ONCE // (q_RQD.shape[1] * max(1, k_LKD.shape[0])))
        for first in range(0, rows, step):
            last = min(first + step, rows)
            part = slice(start + first, start + last)
            out[part], lse[part] = _attend(q_RQD[part], k_KDL, v_KLD, scale, first if causal else None)
        start += rows
    return out, lse


def _attend(q_RQD: Tensor, k_KDL: Tensor, v_KLD: Tensor, scale: float, first: int | None) -> tuple[Tensor, Tensor]:
    """Softmax attention of rows over L keys. With `first`, row r sees keys 0 .. first + r."""
    R, Q, D = q_RQD.shape
    K, _, L = k_KDL.shape
    q_KRD = q_RQD.float().view(R, K, Q // K, D).transpose(0, 1).reshape(K, R * (Q // K), D)
    logit_KRGL = (q_KRD @ k_KDL * scale).view(K, R, Q // K, L)
    if first is not None:
        rows = torch.arange(R, device=q_RQD.device)[:, None] + first
        logit_KRGL = logit_KRGL.masked_fill((torch.arange(L, device=q_RQD.device) > rows)[:, None], -torch.inf)
    lse_KRG = logit_KRGL.logsumexp(-1)
    weight = (logit_KRGL - lse_KRG.unsqueeze(-1)).exp().view(K, R * (Q // K), L)
    out_KRGD = (weight @ v_KLD).view(K, R, Q // K, D)
    return out_KRGD.transpose(0, 1).reshape(R, Q, D).to(q_RQD.dtype), lse_KRG.transpose(0, 1).reshape(R, Q)
