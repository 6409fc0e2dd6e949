"""The ops of `widebeam.model.ops` as Triton kernels and their launchers, one program for each row.

Everything here is bound by memory, so a row is read once and held in registers; and rows run from the last to the
first, since a product has just written the last ones, which are still in the cache, and the next begins with the first.
No kernel is specialised on a number
of rows; the model's sizes are compile-time constants. Offsets are 64-bit, since rows times size can pass 2^31.
Arithmetic is float32, rounded to the rows' dtype where the plain implementations round. D is a power of two.

Letters: as in `widebeam.model.ops`; X heads of one kind.
"""

# mypy: disallow-untyped-defs=False
# (what a kernel takes has no Python type; launchers are typed as the ops are)

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from widebeam.model import ops

FP8_MAX = tl.constexpr(ops.FP8_MAX)
SMALLEST = tl.constexpr(ops.SMALLEST)
NEVER = tl.constexpr(-1e30)
"""Below every logit and, unlike -inf, without NaN in differences."""


@triton.jit
def _last_first():
    """The row of this program."""
    return (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)


@triton.jit
def _store_row(value, out, at, mask, scale, row, QUANTIZE: tl.constexpr):
    """Write a whole row that is zero outside the mask; quantise it if asked."""
    if QUANTIZE:
        wide = value.to(tl.float32)
        row_scale = tl.div_rn(tl.maximum(tl.max(tl.abs(wide)), SMALLEST), FP8_MAX)
        wide *= tl.div_rn(1.0, row_scale)
        value = tl.minimum(tl.maximum(wide, -FP8_MAX), FP8_MAX).to(tl.float8e4nv)
        tl.store(scale + row, row_scale)
    tl.store(out + at, value, mask)


@triton.jit
def _stored(value, pool, reciprocal):
    """Keys or values as the pool has them: a float8 one divided by their scale."""
    if pool.dtype.element_ty == tl.float8e4nv:
        value = tl.minimum(tl.maximum(value.to(tl.float32) * reciprocal, -FP8_MAX), FP8_MAX).to(tl.float8e4nv)
    return value


@triton.jit
def _quantize_rows(x, out, scale, H: tl.constexpr, BLOCK: tl.constexpr):
    row = _last_first()
    column = tl.arange(0, BLOCK)
    at, mask = row * H + column, column < H
    _store_row(tl.load(x + at, mask, 0.0), out, at, mask, scale, row, True)


@triton.jit
def _norm_rows(
    x, delta, weight, total, out, scale, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """The norm of x; or of x + delta, which is kept in `total`, if there is a delta."""
    row = _last_first()
    column = tl.arange(0, BLOCK)
    at, mask = row * H + column, column < H
    dtype = x.dtype.element_ty
    wide = tl.load(x + at, mask, 0.0).to(tl.float32)
    if delta is not None:
        added = (wide + tl.load(delta + at, mask, 0.0).to(tl.float32)).to(dtype)
        tl.store(total + at, added, mask)
        wide = added.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / H + eps)
    wide = wide.to(dtype).to(tl.float32) * tl.load(weight + column, mask, 0.0).to(tl.float32)
    _store_row(wide.to(dtype), out, at, mask, scale, row, QUANTIZE)


@triton.jit
def _silu_mul(gate_up, out, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr):
    """One program for each BLOCK of a row: for the whole row if its scale is wanted."""
    row = _last_first()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    dtype = gate_up.dtype.element_ty
    at = gate_up + row * (2 * SIZE) + column
    gate, up = tl.load(at, mask, 0.0).to(tl.float32), tl.load(at + SIZE, mask, 0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    _store_row((silu * up).to(dtype), out, row * SIZE + column, mask, scale, row, QUANTIZE)


@triton.jit
def _rotated(heads, weight, cos, sin, eps, at, mask, half, D: tl.constexpr):
    """The low and the high half of each of a row's heads, [X, D/2], normed if there is a weight, and rotated."""
    low, high = tl.load(heads + at, mask, 0.0).to(tl.float32), tl.load(heads + D // 2 + at, mask, 0.0).to(tl.float32)
    dtype = heads.dtype.element_ty
    if weight is not None:
        mean = (tl.sum(low * low, 1, keep_dims=True) + tl.sum(high * high, 1, keep_dims=True)) / D
        factor = tl.rsqrt(mean + eps)
        low = (low * factor).to(dtype).to(tl.float32) * tl.load(weight + half).to(tl.float32)
        high = (high * factor).to(dtype).to(tl.float32) * tl.load(weight + D // 2 + half).to(tl.float32)
        low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)


@triton.jit(do_not_specialize=["rows", "copies"])
def _rotate_and_store(
    qkv, cos, sin, q_norm, k_norm, eps, k_pool, v_pool, slot,
    q_out, k_out, rows, copies, qkv_stride, k_stride, v_stride, k_reciprocal, v_reciprocal,
    Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    row = _last_first()
    half = tl.arange(0, D // 2)[None, :]
    cos_row, sin_row = tl.load(cos + row * (D // 2) + half), tl.load(sin + row * (D // 2) + half)
    source = qkv + row * qkv_stride
    place = tl.load(slot + row)

    head = tl.arange(0, K_BLOCK)[:, None]
    at, mask = head * D + half, head < K
    low, high = _rotated(source + Q * D, k_norm, cos_row, sin_row, eps, at, mask, half, D)
    k_target = k_out + row * (K * D)
    tl.store(k_target + at, low, mask)
    tl.store(k_target + D // 2 + at, high, mask)
    stored = k_pool + place * k_stride
    tl.store(stored + at, _stored(low, k_pool, k_reciprocal), mask)
    tl.store(stored + D // 2 + at, _stored(high, k_pool, k_reciprocal), mask)
    at = head * D + tl.arange(0, D)[None, :]
    value = tl.load(source + (Q + K) * D + at, mask)
    tl.store(v_pool + place * v_stride + at, _stored(value, v_pool, v_reciprocal), mask)

    if Q > 0:
        head = tl.arange(0, Q_BLOCK)[:, None]
        at, mask = head * D + half, head < Q
        low, high = _rotated(source, q_norm, cos_row, sin_row, eps, at, mask, half, D)
        for copy in range(copies):
            q_target = q_out + (row + copy * rows) * (Q * D)
            tl.store(q_target + at, low, mask)
            tl.store(q_target + D // 2 + at, high, mask)


@triton.jit(do_not_specialize=["rows", "J"])
def _merge_beams(
    q, partial, lse, k_pool, v_pool, slots, seen, softmax_scale,
    lse_scale, out_scale, out, scale, rows, J, k_stride, v_stride,
    P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Softmax over P parts and the decoded keys, one after another with a running maximum; heads are rows of a tile."""
    row = _last_first()
    head, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, D)[None, :]
    mask = head < Q
    at = head * D + column
    kv_at = head // (Q // K) * D + column
    query = tl.load(q + row * (Q * D) + at, mask, 0.0).to(tl.float32) * softmax_scale
    top = tl.full([BLOCK, 1], NEVER, tl.float32)
    total = tl.zeros([BLOCK, 1], tl.float32)
    merged = tl.zeros([BLOCK, D], tl.float32)
    for part in tl.static_range(P):
        place = row + part * rows
        logit = tl.load(lse + place * Q + head, mask, -float("inf")) * lse_scale
        value = tl.load(partial + place * (Q * D) + at, mask, 0.0).to(tl.float32) * out_scale
        value = tl.where(logit > -float("inf"), value, 0.0)  # what counts nothing may hold anything
        top, total, merged = _with_key(top, total, merged, logit, value)
    for j in range(tl.minimum(tl.load(seen), J).to(tl.int32)):
        place = tl.load(slots + row * J + j)
        logit = tl.sum(query * tl.load(k_pool + place * k_stride + kv_at, mask, 0.0).to(tl.float32), 1, keep_dims=True)
        value = tl.load(v_pool + place * v_stride + kv_at, mask, 0.0).to(tl.float32)
        top, total, merged = _with_key(top, total, merged, logit, value)
    merged = (merged / tl.maximum(total, 1e-30)).to(q.dtype.element_ty)
    _store_row(merged, out, row * (Q * D) + at, mask, scale, row, QUANTIZE)


@triton.jit
def _with_key(top, total, merged, logit, value):
    """The running maximum, sum and output of a softmax with one key more."""
    new_top = tl.maximum(top, logit)
    keep, weight = tl.exp(top - new_top), tl.exp(logit - new_top)
    return new_top, total * keep + weight, merged * keep + weight * value


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    x, (T, H) = x.contiguous(), x.shape
    out, scale = ops.empty_rows(x, H, quantize=True)
    BLOCK = triton.next_power_of_2(H)
    _quantize_rows[(T,)](x, out, scale, H, BLOCK, num_warps=_warps(BLOCK))
    return out, scale


def _normed(
    x: Tensor, delta: Tensor | None, total: Tensor | None, weight: Tensor, eps: float, quantize: bool
) -> tuple[Tensor, Tensor]:
    T, H = x.shape
    out, scale = ops.empty_rows(x, H, quantize)
    BLOCK = triton.next_power_of_2(H)
    _norm_rows[(T,)](x, delta, weight, total, out, scale, eps, H, BLOCK, quantize, num_warps=_warps(BLOCK))
    return out, scale


def rms_norm(x: Tensor, weight: Tensor, eps: float, quantize: bool) -> tuple[Tensor, Tensor]:
    return _normed(x.contiguous(), None, None, weight, eps, quantize)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, quantize: bool) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, *_normed(x.contiguous(), delta.contiguous(), total, weight, eps, quantize)


def silu_mul(gate_up: Tensor, quantize: bool) -> tuple[Tensor, Tensor]:
    gate_up, T, size = gate_up.contiguous(), gate_up.shape[0], gate_up.shape[1] // 2
    out, scale = ops.empty_rows(gate_up, size, quantize)
    BLOCK = triton.next_power_of_2(size)
    if not quantize:
        BLOCK = min(BLOCK, 2048)
    _silu_mul[(T, triton.cdiv(size, BLOCK))](gate_up, out, scale, size, BLOCK, quantize, num_warps=_warps(BLOCK))
    return out, scale


def rotate_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    k_pool: Tensor, v_pool: Tensor, slot: Tensor, num_heads: int, num_kv_heads: int, query_rows: int,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if qkv.stride(1) != 1:
        raise ValueError(f"a row of qkv is not contiguous: strides {qkv.stride()}")
    T, Q, K, D = qkv.shape[0], num_heads, num_kv_heads, k_pool.shape[2]
    q_out, k_out = qkv.new_empty((query_rows, Q, D)), qkv.new_empty((T, K, D))
    _rotate_and_store[(T,)](
        qkv, cos.contiguous(), sin.contiguous(), q_norm, k_norm, eps, k_pool, v_pool, slot.contiguous(),
        q_out, k_out, T, query_rows // max(T, 1), qkv.stride(0), slot_stride(k_pool), slot_stride(v_pool),
        1 / k_scale, 1 / v_scale, Q, K, D, triton.next_power_of_2(max(Q, 1)), triton.next_power_of_2(K), num_warps=4,
    )  # fmt: skip
    return q_out, k_out


def merge_beams(
    q: Tensor, out: Tensor, lse: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor, seen: Tensor,
    scale: float, lse_scale: float, quantize: bool, out_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    R, (_, Q, D) = slots.shape[0], out.shape
    BLOCK = triton.next_power_of_2(Q)
    merged, row_scale = ops.empty_rows(q[:R], Q * D, quantize)
    _merge_beams[(R,)](
        q.contiguous(), out.contiguous(), lse.contiguous(), k_pool, v_pool, slots.contiguous(), seen, scale,
        lse_scale, out_scale, merged, row_scale, R, slots.shape[1], slot_stride(k_pool), slot_stride(v_pool),
        out.shape[0] // R, Q, k_pool.shape[1], D, BLOCK, quantize, num_warps=_warps(BLOCK * D, each=8, most=16),
    )  # fmt: skip
    return merged, row_scale


def _warps(elements: int, each: int = 32, most: int = 8) -> int:
    """Warps that hold so many elements, `each` in a thread: what was fastest on an H200."""
    return max(2, min(most, triton.next_power_of_2(elements) // (32 * each)))


def slot_stride(pool: Tensor) -> int:
    """Elements from slot to slot of a pool [S, K, D], whose heads must lie one behind the other."""
    if not pool[0].is_contiguous():
        raise ValueError(f"a slot of the pool is not contiguous: strides {pool.stride()}")
    return pool.stride(0)
