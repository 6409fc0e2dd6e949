"""Attention of the search that is planned, as two opaque ops.

`prefill_attention` is causal over the packed prompt; `context_attention` lets every beam of a request read that
request's context pages. Both look up a plan by its handle: planning (which rows belong to which request,
which pages hold its context) is host work done before the ops run, once per row layout, so that a compiled level
contains no host decision. The few keys that a beam decoded itself are added by `ops.merge_beams`. One row a request
needs no plan (`row_attention.py`).

Letters: T packed prompt tokens, R beam rows, Q query heads, K key/value heads, D head size, P parts of a context,
S slots of a pool (pages lie in it one behind the other).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from widebeam.custom_ops import custom_op, register_fake
from widebeam.model.config import ModelConfig
from widebeam.registry import Registry


class PrefillPlan(Protocol):
    """Which packed rows belong to which prompt. Used on the GPU thread only, like every plan.

    Planning holds until another plan of the backend is planned: they may share a workspace.
    """

    def plan(self, lengths: Sequence[int], num_rows: int) -> None:
        """Prompts of these lengths lie one behind the other; rows up to `num_rows` only fill a shape."""

    def run(self, q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Causal attention and its log-sum-exp: [T, Q, D] of q's dtype, [T, Q] float32 (see `lse_scale`)."""


class ContextPlan(Protocol):
    """Which beam rows read which pages."""

    def plan(self, widths: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Request b has `widths[b]` consecutive rows and `lengths[b]` context tokens in `pages[b]`."""

    def run(self, q: Tensor, k_SKD: Tensor, v_SKD: Tensor, k_scale: float) -> tuple[Tensor, Tensor]:
        """Attention of rows over their request's pages, with q lying there once for each part of the contexts.

        Keys are those of the pool times `k_scale`; values are taken as they are. [P R, Q, D] and the log-sum-exp
        [P R, Q], which is -inf where a part is not used; rows of no request give anything finite.
        """


class AttentionBackend(Protocol):
    """Makes plans. Chosen by name, once, at start."""

    name: str
    lse_scale: float
    """What turns the backend's log-sum-exp into natural logarithms."""
    fallbacks: int
    """Faster kernels of its own that it tried in vain."""
    replayable: bool
    """Whether a captured graph follows later planning: its plans keep their buffers."""

    def prefill_plan(self, requests: int, rows: int | None) -> PrefillPlan:
        """A plan for up to so many prompts, in exactly `rows` rows if a graph is to replay it."""

    def context_plan(self, requests: int, rows: int, splits: int, beside: bool) -> ContextPlan:
        """A plan for up to so many requests in exactly `rows` rows.

        With `splits` > 1 each context may be cut in so many parts, so that few rows fill the device; every context then
        has at least so many pages. `beside`: what is planned holds beside that of a PrefillPlan.
        """


class BackendFactory(Protocol):
    """Makes a backend. `max_pages`: most of one context; several may share them. `kv_dtype`: that of the pages, if it
    is another."""

    def __call__(
        self,
        config: ModelConfig,
        page_size: int,
        max_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> AttentionBackend: ...


BACKENDS: Registry[BackendFactory] = Registry("attention backend")
BACKENDS.add("torch", "widebeam.model.reference:TorchBackend")
BACKENDS.add("flashinfer", "widebeam.model.flashinfer:FlashInferBackend")

_plans: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_handles = itertools.count(2)  # a compiler would treat 0 and 1 as constants


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
        self.lse_scale = backend.lse_scale
        self._prefill: dict[tuple[int, int | None], tuple[PrefillPlan, int]] = {}
        self._context: dict[tuple[int, int, int, bool], tuple[ContextPlan, int]] = {}

    @property
    def made(self) -> list[PrefillPlan | ContextPlan]:
        """All that were made so far."""
        return [plan for plans in (self._prefill, self._context) for plan, _ in plans.values()]

    def prefill(self, requests: int, rows: int | None) -> tuple[PrefillPlan, int]:
        """The plan of that shape, and its handle."""
        key = (requests, rows)
        if key not in self._prefill:
            self._prefill[key] = register_plan(self._backend.prefill_plan(*key))
        return self._prefill[key]

    def context(self, requests: int, rows: int, splits: int, *, beside: bool = False) -> tuple[ContextPlan, int]:
        """The plan of that shape, and its handle. `beside`: one that is used together with a PrefillPlan."""
        key = (requests, rows, splits, beside)
        if key not in self._context:
            self._context[key] = register_plan(self._backend.context_plan(*key))
        return self._context[key]


@custom_op("prefill_attention")
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, plan: int) -> tuple[Tensor, Tensor]:
    """q [T, Q, D], k and v [T, K, D] -> (out [T, Q, D], lse [T, Q] float32)."""
    return _plans[plan].run(q, k, v)


@custom_op("context_attention")
def context_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: int, k_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """q [P R, Q, D], pools [S, K, D] -> (out [P R, Q, D], lse [P R, Q] float32).

    Keys of the pool count `k_scale` times. Whoever reads `out` multiplies by the values' scale, if they have one.
    """
    return _plans[plan].run(q, k_pool, v_pool, k_scale)


def _fake(q: Tensor, _k: Tensor, _v: Tensor, _plan: int, _k_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


register_fake(prefill_attention)(_fake)
register_fake(context_attention)(_fake)
