"""Attention of the search, as two opaque ops and one piece of plain PyTorch.

`prefill_attention` is causal over the packed prompt; `context_attention` lets every beam of a request read that
request's context pages. Both look up a plan by its handle: planning (which rows belong to which request,
which pages hold its context) is host work done before the ops run, once per row layout, so that a compiled level
contains no host decision. The few keys that a beam decoded itself are attended by `merge_beam_keys`, which a compiler
can fuse.

Letters: T packed prompt tokens, R beam rows, J decoded tokens of a beam, Q query heads, K key/value heads, D head size,
P pages, S page size.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from widebeam.model.config import ModelConfig
from widebeam.registry import Registry


class PrefillPlan(Protocol):
    """Which packed rows belong to which prompt. Used on the GPU thread only, like every plan."""

    def plan(self, lengths: Sequence[int], num_rows: int) -> None:
        """Prompts of these lengths lie one behind the other; rows up to `num_rows` only fill a shape."""

    def run(self, q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Causal attention and its log-sum-exp: [T, Q, D] of q's dtype, [T, Q] float32 (natural logarithm)."""


class ContextPlan(Protocol):
    """Which beam rows read which pages."""

    def plan(self, widths: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Request b has `widths[b]` consecutive rows and `lengths[b]` context tokens in `pages[b]`."""

    def run(self, q_RQD: Tensor, k_PSKD: Tensor, v_PSKD: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of rows over their request's pages; rows of no request give anything finite."""


class AttentionBackend(Protocol):
    """Makes plans. Chosen by name, once, at start."""

    def prefill_plan(self, requests: int, rows: int | None) -> PrefillPlan:
        """A plan for up to so many prompts, in exactly `rows` rows if a graph is to replay it."""

    def context_plan(self, requests: int, rows: int, splits: int) -> ContextPlan:
        """A plan for up to so many requests in exactly `rows` rows.

        With `splits` > 1 a backend may cut each context in so many parts, so that few rows fill the device; every
        context then has at least so many pages.
        """


BackendFactory = Callable[[ModelConfig, int, int, torch.dtype, torch.device], AttentionBackend]
"""(config, page size, most pages of a wave, dtype, device) -> backend"""

BACKENDS: Registry[BackendFactory] = Registry("attention backend")
BACKENDS.add("torch", "widebeam.model.reference:TorchBackend")
BACKENDS.add("flashinfer", "widebeam.model.flashinfer:FlashInferBackend")

_plans: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_handles = itertools.count()


P = TypeVar("P", PrefillPlan, ContextPlan)


def register_plan(plan: P) -> tuple[P, int]:
    """The plan and a handle by which the ops find it, for as long as somebody holds the plan."""
    handle = next(_handles)
    _plans[handle] = plan
    return plan, handle


class Plans:
    """The plans of one engine, made when a shape first needs them and kept: graphs hold their buffers."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self._prefill: dict[tuple[int, int | None], tuple[PrefillPlan, int]] = {}
        self._context: dict[tuple[int, int, int], tuple[ContextPlan, int]] = {}

    def prefill(self, requests: int, rows: int | None) -> tuple[PrefillPlan, int]:
        """The plan of that shape, and its handle."""
        key = (requests, rows)
        if key not in self._prefill:
            self._prefill[key] = register_plan(self._backend.prefill_plan(*key))
        return self._prefill[key]

    def context(self, requests: int, rows: int, splits: int) -> tuple[ContextPlan, int]:
        """The plan of that shape, and its handle."""
        key = (requests, rows, splits)
        if key not in self._context:
            self._context[key] = register_plan(self._backend.context_plan(*key))
        return self._context[key]


@torch.library.custom_op("widebeam::prefill_attention", mutates_args=())
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, plan: int) -> tuple[Tensor, Tensor]:
    """q [T, Q, D], k and v [T, K, D] -> (out [T, Q, D], lse [T, Q] float32)."""
    return _plans[plan].run(q, k, v)


@torch.library.custom_op("widebeam::context_attention", mutates_args=())
def context_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: int) -> tuple[Tensor, Tensor]:
    """q [R, Q, D], pages [P, S, K, D] -> (out [R, Q, D], lse [R, Q] float32)."""
    return _plans[plan].run(q, k_pages, v_pages)


def _fake(q: Tensor, _k: Tensor, _v: Tensor, _plan: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


prefill_attention.register_fake(_fake)
context_attention.register_fake(_fake)


def merge_beam_keys(
    q_RQD: Tensor, out_RQD: Tensor, lse_RQ: Tensor, k_RJKD: Tensor, v_RJKD: Tensor, seen_RJ: Tensor, scale: float
) -> Tensor:
    """Add the beam's own decoded tokens to its attention over the context, [R, Q, D] of q's dtype.

    `out_RQD` and `lse_RQ` come from `context_attention`; `seen_RJ` says which decoded tokens exist. The two softmaxes
    are merged by their log-sum-exp (as in Flash-Decoding and cascade inference), so that the context is read once per
    request and never per beam. A row with no context at all is right as well: its context weight is exp(-inf) = 0.
    """
    R, Q, D = q_RQD.shape
    K = k_RJKD.shape[2]
    q = q_RQD.float().view(R, 1, K, Q // K, D) * scale
    logit_RJKG = (q * k_RJKD.float().unsqueeze(3)).sum(-1)
    logit_RJKG = logit_RJKG.masked_fill(~seen_RJ[:, :, None, None], -torch.inf)
    lse_RKG = lse_RQ.view(R, K, Q // K)
    top_RKG = torch.maximum(lse_RKG, logit_RJKG.amax(1))
    weight_RJKG = (logit_RJKG - top_RKG.unsqueeze(1)).exp()
    context_RKG = (lse_RKG - top_RKG).exp()
    total_RKG = context_RKG + weight_RJKG.sum(1)
    own_RKGD = (weight_RJKG.unsqueeze(-1) * v_RJKD.float().unsqueeze(3)).sum(1)
    merged = context_RKG.unsqueeze(-1) * out_RQD.float().view(R, K, Q // K, D) + own_RKGD
    return (merged / total_RKG.unsqueeze(-1)).view(R, Q, D).to(q_RQD.dtype)
