"""The small arithmetic between the matrix products, as custom ops: one kernel each on CUDA, plain PyTorch elsewhere.

The plain implementations are the CPU's path and the oracle of the kernels in `ops_triton`. Every op is opaque to the
compiler, so that a layer reads and writes each row once and a product's operand leaves the op before it quantised.

A quantised row is float8_e4m3fn values [..] with one float32 scale, [T, 1] for T rows: values * scale is the row. Ops
that take `quantize` give values of their input's dtype and an empty scale, [0], without it.

Letters: T rows (prompt tokens or beams), H hidden, I intermediate, Q query heads, K key/value heads, D head size,
S slots, R beam rows, J decoded tokens of a beam, P parts of a context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from widebeam.custom_ops import custom_op, register_cuda, register_fake

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST = 1e-12
"""A row whose largest value is below this is scaled by this: the scale's reciprocal must be finite."""


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32, as Hugging Face's Qwen computes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x_TXD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle."""
    low, high = x_TXD.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x_TXD.dtype)


def maybe_quantize(x_TH: Tensor, quantize: bool) -> tuple[Tensor, Tensor]:
    """Quantised rows, or the rows as they are and no scale. Divides by a reciprocal, as the kernels do."""
    if not quantize:
        return x_TH, _no_scale(x_TH, quantize)
    wide = x_TH.float()
    scale_T1 = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / FP8_MAX
    return _to_fp8(wide * scale_T1.reciprocal()), scale_T1


def _to_fp8(x: Tensor) -> Tensor:
    """Rounded; what is too large becomes the largest value."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _stored(x: Tensor, pool: Tensor, scale: float) -> Tensor:
    """Keys or values as the pool has them."""
    return _to_fp8(x.float() * (1 / scale)) if pool.dtype == FP8 else x


def _no_scale(x_TH: Tensor, quantize: bool) -> Tensor:
    return x_TH.new_empty((x_TH.shape[0], 1) if quantize else (0,), dtype=torch.float32)


def empty_rows(x: Tensor, size: int, quantize: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised values [T, size] and their scale."""
    return x.new_empty((x.shape[0], size), dtype=FP8 if quantize else x.dtype), _no_scale(x, quantize)


@custom_op("add_rms_norm")
def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, quantize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x and delta [T, H], weight [H] -> (x + delta [T, H], its norm [T, H], scale)."""
    total = x + delta
    return total, *maybe_quantize(_rms_norm(total, weight, eps), quantize)


@register_fake(add_rms_norm)
def _(x: Tensor, delta: Tensor, weight: Tensor, eps: float, quantize: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *empty_rows(x, x.shape[1], quantize)


@custom_op("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float, quantize: bool) -> tuple[Tensor, Tensor]:
    """x [T, H], weight [H] -> (its norm [T, H], scale)."""
    return maybe_quantize(_rms_norm(x, weight, eps), quantize)


@register_fake(rms_norm)
def _(x: Tensor, weight: Tensor, eps: float, quantize: bool) -> tuple[Tensor, Tensor]:
    return empty_rows(x, x.shape[1], quantize)


@custom_op("add_product", mutates_args=("total",))
def add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """total [T, N] += x [T, H] @ weight [N, H].T, rounded once: the sum costs the product next to nothing."""
    total.addmm_(x, weight.t())


@register_fake(add_product)
def _(total: Tensor, x: Tensor, weight: Tensor) -> None:
    return None


@custom_op("silu_mul")
def silu_mul(gate_up: Tensor, quantize: bool) -> tuple[Tensor, Tensor]:
    """gate_up [T, 2 I], the gate first -> (silu(gate) * up [T, I], scale)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return maybe_quantize(F.silu(gate) * up, quantize)


@register_fake(silu_mul)
def _(gate_up: Tensor, quantize: bool) -> tuple[Tensor, Tensor]:
    return empty_rows(gate_up, gate_up.shape[1] // 2, quantize)


@custom_op("quantize_rows")
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H] -> (values [T, H] float8_e4m3fn, scale [T, 1])."""
    return maybe_quantize(x, quantize=True)


@register_fake(quantize_rows)
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return empty_rows(x, x.shape[1], quantize=True)


@custom_op("rotate_and_store", mutates_args=("k_pool", "v_pool"))
def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_pool: Tensor,
    v_pool: Tensor,
    slot: Tensor,
    num_heads: int,
    num_kv_heads: int,
    query_rows: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate the heads of `qkv`, [T, (Q + 2 K) D]; keys and values go to slot [T] of the pools, [S, K, D].

    cos and sin are [T, 1, D/2] float32, the norms' weights [D]. -> (q [query_rows, Q, D], copies one behind the other
    where that is a multiple of T; k [T, K, D]). Of rows that share a slot any one may win. Pools of float8_e4m3fn get
    keys and values divided by their scale, and the nearest value that they can hold.
    """
    T, D = qkv.shape[0], k_pool.shape[2]
    q, k, v = qkv.split([num_heads * D, num_kv_heads * D, num_kv_heads * D], dim=-1)
    q_TQD, k_TKD, v_TKD = q.reshape(T, num_heads, D), k.reshape(T, num_kv_heads, D), v.reshape(T, num_kv_heads, D)
    if q_norm is not None:
        q_TQD = _rms_norm(q_TQD, q_norm, eps)
    if k_norm is not None:
        k_TKD = _rms_norm(k_TKD, k_norm, eps)
    k_TKD = rotate(k_TKD, cos, sin)
    k_pool[slot] = _stored(k_TKD, k_pool, k_scale)
    v_pool[slot] = _stored(v_TKD, v_pool, v_scale)
    return rotate(q_TQD, cos, sin).repeat(query_rows // max(T, 1), 1, 1), k_TKD


@register_fake(rotate_and_store)
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_pool: Tensor,
    v_pool: Tensor,
    slot: Tensor,
    num_heads: int,
    num_kv_heads: int,
    query_rows: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    T, D = qkv.shape[0], k_pool.shape[2]
    return qkv.new_empty((query_rows, num_heads, D)), qkv.new_empty((T, num_kv_heads, D))


@custom_op("merge_beams")
def merge_beams(
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    seen: Tensor,
    scale: float,
    lse_scale: float,
    quantize: bool,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Add the beams' own decoded tokens to their attention over the parts of a context -> (out [R, Q D], scale).

    q is [P R, Q, D], of which the first R rows count; `out` [P R, Q, D] and `lse` [P R, Q] float32 are the attention
    over each part and its log-sum-exp, true once multiplied by `out_scale` and natural once by `lse_scale`. The beams'
    keys and values are in `slots` [R, J] of the pools [S, K, D]; only the first `seen` ([1] int64) columns exist. The
    softmaxes are merged by their log-sum-exp (as in Flash-Decoding and cascade inference): each part counts as one key
    whose logit is its log-sum-exp, and not at all where that is -inf.
    """
    (R, J), (_, Q, D), K = slots.shape, q.shape, k_pool.shape[1]
    unseen_J = torch.arange(J, device=slots.device) >= seen
    slots_JR = slots.masked_fill(unseen_J, 0).t()
    q_RKGD = q[:R].float().view(R, K, Q // K, D) * scale
    logit_JRQ = (q_RKGD * k_pool[slots_JR].float().unsqueeze(3)).sum(-1).view(J, R, Q)
    logit_JRQ = logit_JRQ.masked_fill(unseen_J[:, None, None], -torch.inf)
    v_JRQD = v_pool[slots_JR].float().repeat_interleave(Q // K, dim=2)
    logit = torch.cat(((lse * lse_scale).view(-1, R, Q), logit_JRQ))
    value = torch.cat((out.float().view(-1, R, Q, D) * out_scale, v_JRQD))
    value = value.masked_fill(logit.isneginf().unsqueeze(-1), 0)  # what counts nothing may hold anything
    weight = logit.softmax(0).masked_fill(logit.isneginf(), 0)  # 0 for all where nothing counts, as the kernel has it
    merged_RQD = (weight.unsqueeze(-1) * value).sum(0)
    return maybe_quantize(merged_RQD.to(q.dtype).view(R, Q * D), quantize)


@register_fake(merge_beams)
def _(
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    seen: Tensor,
    scale: float,
    lse_scale: float,
    quantize: bool,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    return empty_rows(q[: slots.shape[0]], q.shape[1] * q.shape[2], quantize)


def _triton(name: str) -> Callable[..., Any]:
    """The launcher of that name, imported at the first call: a machine without a GPU needs no Triton."""

    def launch(*args: Any) -> Any:
        from widebeam.model import ops_triton

        return getattr(ops_triton, name)(*args)

    return launch


register_cuda(add_rms_norm)(_triton("add_rms_norm"))
register_cuda(rms_norm)(_triton("rms_norm"))
register_cuda(silu_mul)(_triton("silu_mul"))
register_cuda(quantize_rows)(_triton("quantize_rows"))
register_cuda(rotate_and_store)(_triton("rotate_and_store"))
register_cuda(merge_beams)(_triton("merge_beams"))
