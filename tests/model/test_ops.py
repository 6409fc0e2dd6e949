"""The ops between the products against independent formulations, and their CUDA kernels against the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from widebeam.model.ops import (
    FP8,
    add_product,
    add_rms_norm,
    merge_beams,
    quantize_rows,
    rms_norm,
    rotate_and_store,
    silu_mul,
)

EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
QUANTIZE = pytest.mark.parametrize("quantize", [False, True], ids=["plain", "quantized"])
HEADS = pytest.mark.parametrize(("Q", "K", "D"), [(16, 8, 128), (32, 8, 128), (4, 4, 64), (2, 1, 64), (6, 3, 64)])
ROUNDINGS = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""One unit in the last place, at worst."""


def to(device: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies on the device with the same strides, gaps included."""
    return tuple(
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=device).copy_(a) if isinstance(a, Tensor) else a
        for a in args
    )


def close(actual: Tensor, expected: Tensor, eps: float) -> None:
    """Equal to within `eps` of the value, or of a tenth of the largest where terms cancelled."""
    expected = expected.double()
    floor = expected.abs().max().item() / 10 if expected.numel() else 0.0
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=eps, atol=eps * floor)


def close_rows(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], eps: float) -> None:
    """The same for values with a scale: if quantised they may differ by one step, and rarely."""
    (values, scale), (wanted, wanted_scale) = actual, expected
    assert (values.dtype, values.shape, scale.shape) == (wanted.dtype, wanted.shape, wanted_scale.shape)
    if values.dtype != FP8:
        close(values, wanted, eps)
        return
    close(scale, wanted_scale, eps)
    apart = (values.cpu().float() - wanted.float()).abs()
    assert (apart <= (wanted.float().abs() / 8).clamp(min=2**-9)).all()
    assert (apart > 0).double().mean() < 0.02 or values.numel() < 500


def rows(*shape: int, dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * spread).to(dtype)


def norm_args(T: int, H: int, dtype: torch.dtype, quantize: bool) -> tuple[Any, ...]:
    x, delta, weight = rows(T, H, dtype=dtype, spread=3), rows(T, H, dtype=dtype), rows(H, dtype=dtype)
    return x, delta, weight, EPS, quantize


def rotate_args(
    T: int, Q: int, K: int, D: int, dtype: torch.dtype, *, normed: bool = True, copies: int = 1
) -> tuple[Any, ...]:
    """Rows and slots of one pool with a gap between them, slots in any order."""
    qkv = rows(T, 8 + (Q + 2 * K) * D, dtype=dtype)[:, 8:]
    angle = torch.randn(T, 1, D // 2) * 5
    norms = [rows(D, dtype=dtype) if normed else None for _ in range(2)]
    k_pool, v_pool = rows(T + 3, K, D, dtype=dtype), rows(T + 3, K + 1, D, dtype=dtype)[:, :K]
    return qkv, angle.cos(), angle.sin(), *norms, EPS, k_pool, v_pool, torch.randperm(T + 3)[:T], Q, K, copies * T


def float8_args(T: int, Q: int, K: int, D: int, dtype: torch.dtype, **how: Any) -> tuple[Any, ...]:
    """The same with pools of float8, and a scale each: half of the keys and a few values are too large for theirs."""
    args = list(rotate_args(T, Q, K, D, dtype, **how))
    args[6:8] = (pool.to(FP8) for pool in args[6:8])
    return *args, 2.0**-10, 3 / 448


def merge_args(
    R: int, Q: int, K: int, D: int, dtype: torch.dtype, quantize: bool, *, P: int, J: int, seen: int, base: float = 2.0
) -> tuple[Any, ...]:
    """Random partials, some of which count nothing and hold NaN; slots that do not exist yet are far outside."""
    q, out = rows(R, Q, D, dtype=dtype).repeat(P, 1, 1), rows(P * R, Q, D, dtype=dtype)
    lse = torch.randn(P * R, Q) * 2
    nothing = torch.rand(P * R, Q) < 0.3
    lse[nothing], out[nothing] = -torch.inf, torch.nan
    k_pool, v_pool = (rows(40, K, D, dtype=dtype) for _ in range(2))
    slots = torch.randint(40, (R, J))
    slots[:, seen:] = 1 << 40
    return q, out, lse, k_pool, v_pool, slots, torch.tensor([seen]), D**-0.5, math.log(base), quantize


def dequantized(values: Tensor, scale: Tensor) -> Tensor:
    return values.double() * scale.double()


# the plain implementations


@DTYPES
def test_quantized_rows_keep_their_values(dtype: torch.dtype) -> None:
    """The scale maps the largest magnitude to 448; every value keeps three bits, or an absolute step if tiny."""
    torch.manual_seed(0)
    x = rows(50, 96, dtype=dtype) * torch.logspace(-3, 3, 50)[:, None].to(dtype)
    x[7] = 0
    values, scale = quantize_rows(x)
    assert values.dtype == FP8
    assert scale.shape == (50, 1)
    largest = x.float().abs().amax(-1, keepdim=True)
    assert torch.equal(scale[largest > 0], (largest / 448)[largest > 0])
    assert (values[7].float() == 0).all()
    assert torch.isfinite(scale).all()
    assert (values.float().abs().amax(-1)[largest[:, 0] > 0] == 448).all()
    error = (dequantized(values, scale) - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * 2**-4, scale.double() * 2**-10) * 1.001).all()


@DTYPES
@QUANTIZE
def test_add_rms_norm(dtype: torch.dtype, quantize: bool) -> None:
    torch.manual_seed(1)
    x, delta, weight, eps, _ = args = norm_args(9, 96, dtype, quantize)
    total, normed, scale = add_rms_norm(*args)
    assert torch.equal(total, x + delta)
    wide = total.double()
    expected = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    if quantize:
        plain = add_rms_norm(x, delta, weight, eps, False)[1]
        assert all(map(torch.equal, (normed.float(), scale), (q.float() for q in quantize_rows(plain))))
    else:
        close(normed, expected, 2 * ROUNDINGS[dtype])
        assert scale.shape == (0,)
    assert all(map(torch.equal, rms_norm(total, weight, eps, quantize), (normed, scale)))


@DTYPES
def test_add_product(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    total, x, weight = rows(7, 48, dtype=dtype, spread=3), rows(7, 96, dtype=dtype), rows(48, 96, dtype=dtype)
    expected = total.double() + x.double() @ weight.double().t()
    add_product(total, x, weight)
    close(total, expected, 4 * ROUNDINGS[dtype])


@DTYPES
@QUANTIZE
def test_silu_mul(dtype: torch.dtype, quantize: bool) -> None:
    torch.manual_seed(2)
    gate_up = rows(9, 192, dtype=dtype, spread=4)
    values, scale = silu_mul(gate_up, quantize)
    gate, up = gate_up.double().split(96, dim=-1)
    if quantize:
        plain = silu_mul(gate_up, False)[0]
        assert all(map(torch.equal, (values.float(), scale), (q.float() for q in quantize_rows(plain))))
    else:
        close(values, gate * gate.sigmoid() * up, 2 * ROUNDINGS[dtype])


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("copies", [1, 3])
def test_rotate_and_store(dtype: torch.dtype, normed: bool, copies: int) -> None:
    """Each pair of a normed head is one complex number turned by the row's angle; other slots stay."""
    torch.manual_seed(3)
    T, Q, K, D = 7, 4, 2, 16
    args = rotate_args(T, Q, K, D, dtype, normed=normed, copies=copies)
    qkv, cos, sin, q_norm, k_norm, _, k_pool, v_pool, slot, *_ = args
    before = k_pool.clone(), v_pool.clone()
    q, k = rotate_and_store(*args)

    def expected(heads: Tensor, weight: Tensor | None) -> Tensor:
        wide = heads.double().view(T, -1, D)
        if weight is not None:
            wide = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        turned = torch.complex(*wide.chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())
        return torch.cat((turned.real, turned.imag), dim=-1)

    close(q, expected(qkv[:, : Q * D], q_norm).repeat(copies, 1, 1), 4 * ROUNDINGS[dtype])
    close(k, expected(qkv[:, Q * D : (Q + K) * D], k_norm), 4 * ROUNDINGS[dtype])
    assert torch.equal(k_pool[slot], k)
    assert torch.equal(v_pool[slot], qkv[:, (Q + K) * D :].reshape(T, K, D))
    untouched = torch.ones(len(k_pool), dtype=torch.bool).index_fill(0, slot, False)
    assert torch.equal(k_pool[untouched], before[0][untouched])
    assert torch.equal(v_pool[untouched], before[1][untouched])


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_float8_pools_keep_three_bits(dtype: torch.dtype, normed: bool) -> None:
    """Within half a step of what plain pools get, a step being 1/8 of a power of two, and the largest where that is
    too large; what is not stored is as ever, and other slots stay."""
    torch.manual_seed(9)
    T, Q, K, D = 60, 4, 2, 16
    args = float8_args(T, Q, K, D, dtype, normed=normed)
    k_pool, v_pool, slot, k_scale, v_scale = (*args[6:9], *args[-2:])
    before = k_pool.clone(), v_pool.clone()
    plain = (*args[:6], *(torch.empty(pool.shape, dtype=dtype) for pool in (k_pool, v_pool)), *args[8:-2])
    for mine, other in zip(rotate_and_store(*args), rotate_and_store(*plain), strict=True):
        assert torch.equal(mine, other)
    for pool, exact, scale, was in zip((k_pool, v_pool), plain[6:8], (k_scale, v_scale), before, strict=True):
        wanted, stored = exact[slot].double() / scale, pool[slot].double()
        too_large = wanted.abs() > 448
        assert 0 < too_large.sum() < too_large.numel()
        assert torch.equal(stored[too_large], wanted[too_large].sign() * 448)
        half_step = torch.maximum(2.0 ** (wanted.abs().log2().floor() - 4), torch.tensor(2.0**-10))
        assert ((stored - wanted).abs() <= half_step * 1.001)[~too_large].all()
        untouched = torch.ones(len(pool), dtype=torch.bool).index_fill(0, slot, False)
        assert torch.equal(pool[untouched].float(), was[untouched].float())


def test_infinite_keys_are_stored_as_the_largest() -> None:
    args = float8_args(2, 1, 1, 16, torch.float32, normed=False)
    args[0][:, 32:] = torch.tensor([torch.inf, -torch.inf])[:, None]
    rotate_and_store(*args)
    assert args[7][args[8]].float()[:, 0, 0].tolist() == [448, -448]


def test_rotate_and_store_without_queries() -> None:
    torch.manual_seed(4)
    both = rotate_args(5, 4, 2, 16, torch.float32, copies=2)
    only = (both[0][:, 4 * 16 :], *to("cpu", both[1:9]), 0, 2, 10)
    q, k = rotate_and_store(*only)
    assert q.shape == (10, 0, 16)
    assert torch.equal(k, rotate_and_store(*both)[1])
    assert torch.equal(only[6], both[6])
    assert torch.equal(only[7], both[7])


@DTYPES
@pytest.mark.parametrize("parts", [[8], [3, 0, 5], [0]], ids=["one-part", "three-parts", "no-context"])
@pytest.mark.parametrize(("J", "seen"), [(1, 1), (3, 2), (4, 4)])
@pytest.mark.parametrize("base", [math.e, 2.0])
def test_merge_beams_is_softmax_over_all_keys(
    dtype: torch.dtype, parts: list[int], J: int, seen: int, base: float
) -> None:
    """Partials made of real keys, merged, against one softmax in float64 over those keys and the beam's own."""
    torch.manual_seed(5)
    R, Q, K, D = 6, 4, 2, 16
    q, _, _, k_pool, v_pool, slots, seen_1, scale, _, _ = merge_args(R, Q, K, D, dtype, False, P=1, J=J, seen=seen)
    k, v = (rows(R, sum(parts), K, D, dtype=dtype) for _ in range(2))

    def attend(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.double().repeat_interleave(Q // K, dim=2) for x in (k, v))
        logit = torch.einsum("rqd,rlqd->rql", q.double(), k) * scale
        return torch.einsum("rql,rlqd->rqd", logit.softmax(-1), v), logit.logsumexp(-1)

    partials = [attend(*pair) for pair in zip(k.split(parts, dim=1), v.split(parts, dim=1), strict=True)]
    out, lse = (torch.cat(part) for part in zip(*partials, strict=True))
    own = slots[:, :seen]
    expected, _ = attend(torch.cat((k, k_pool[own]), dim=1), torch.cat((v, v_pool[own]), dim=1))
    lse = (lse / math.log(base)).float()
    args = (q.repeat(len(parts), 1, 1), out.to(dtype), lse, k_pool, v_pool, slots, seen_1, scale, math.log(base))
    merged, no_scale = merge_beams(*args, False)
    close(merged, expected.flatten(1), 4 * ROUNDINGS[dtype])
    assert no_scale.shape == (0,)
    quantized = merge_beams(*args, True)
    assert all(map(torch.equal, (t.float() for t in quantized), (t.float() for t in quantize_rows(merged))))
    divided = merge_beams(args[0], args[1] / 4, *args[2:], False, 4.0)
    assert torch.equal(divided[0], merged)


# the kernels

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@DTYPES
@QUANTIZE
def test_opcheck(device: str, dtype: torch.dtype, quantize: bool) -> None:
    """Schema, fake, mutation and the absence of aliasing, by torch's own checker."""
    torch.library.opcheck(add_rms_norm, to(device, norm_args(5, 64, dtype, quantize)))
    x, _, weight, eps, _ = norm_args(5, 64, dtype, quantize)
    torch.library.opcheck(rms_norm, to(device, (x, weight, eps, quantize)))
    torch.library.opcheck(add_product, to(device, (x, rows(5, 32, dtype=dtype), rows(64, 32, dtype=dtype))))
    torch.library.opcheck(silu_mul, to(device, (rows(5, 64, dtype=dtype), quantize)))
    torch.library.opcheck(quantize_rows, to(device, (rows(5, 64, dtype=dtype),)))
    torch.library.opcheck(merge_beams, to(device, merge_args(5, 4, 2, 16, dtype, quantize, P=2, J=3, seen=2)))
    for Q, copies in ((4, 1), (4, 3), (0, 2)):
        args = rotate_args(5, Q, 2, 16, dtype, normed=quantize, copies=copies)
        torch.library.opcheck(rotate_and_store, to(device, args))
        args = float8_args(5, Q, 2, 16, dtype, normed=quantize, copies=copies)
        able = ("test_faketensor", "test_aot_dispatch_dynamic")  # test_schema cannot compare float8
        torch.library.opcheck(rotate_and_store, to(device, args), test_utils=able)


@pytest.mark.gpu
@DTYPES
@QUANTIZE
@pytest.mark.parametrize("T", [0, 1, 7, 1000])
def test_rows_on_cuda(dtype: torch.dtype, quantize: bool, T: int) -> None:
    torch.manual_seed(6)
    eps = ROUNDINGS[dtype]
    for H in (64, 1000, 1024, 2048, 2560):
        args = norm_args(T, H, dtype, quantize)
        total, *normed = add_rms_norm(*to("cuda", args))
        expected_total, *expected = add_rms_norm(*args)
        assert torch.equal(total.cpu(), expected_total)
        close_rows(tuple(normed), tuple(expected), 2 * eps)
        alone = rms_norm(total, args[2].cuda(), EPS, quantize)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(alone, normed, strict=True))
        x = rows(T, H, dtype=dtype)
        x[: T // 2] *= 1e-3
        values, scale = quantize_rows(x.cuda())
        expected_values, expected_scale = quantize_rows(x)
        assert torch.equal(scale.cpu(), expected_scale)
        assert torch.equal(values.cpu().float(), expected_values.float())
    for size in (96, 1000, 3072, 9728):
        gate_up = rows(T, 2 * size, dtype=dtype, spread=4)
        close_rows(silu_mul(gate_up.cuda(), quantize), silu_mul(gate_up, quantize), 2 * eps)


@pytest.mark.gpu
@DTYPES
@HEADS
@pytest.mark.parametrize(("T", "normed", "copies"), [(1, True, 1), (7, False, 2), (1000, True, 3), (0, True, 1)])
def test_rotate_and_store_on_cuda(
    dtype: torch.dtype, Q: int, K: int, D: int, T: int, normed: bool, copies: int
) -> None:
    torch.manual_seed(7)
    for queries in (Q, 0):
        args = rotate_args(T, queries, K, D, dtype, normed=normed, copies=copies)
        on_cuda = to("cuda", args)
        for actual, expected in zip(rotate_and_store(*on_cuda), rotate_and_store(*args), strict=True):
            assert actual.shape == expected.shape
            close(actual, expected, 2 * ROUNDINGS[dtype])
        close(on_cuda[6], args[6], 2 * ROUNDINGS[dtype])
        assert torch.equal(on_cuda[7].cpu(), args[7])


@pytest.mark.gpu
@DTYPES
@HEADS
def test_float8_pools_on_cuda(dtype: torch.dtype, Q: int, K: int, D: int) -> None:
    """As on the CPU, but for keys that rounding put to the other side of a step."""
    torch.manual_seed(10)
    args = float8_args(300, Q, K, D, dtype)
    on_cuda = to("cuda", args)
    for actual, expected in zip(rotate_and_store(*on_cuda), rotate_and_store(*args), strict=True):
        close(actual, expected, 2 * ROUNDINGS[dtype])
    close_rows((on_cuda[6].cpu(), torch.ones(1)), (args[6], torch.ones(1)), 0)
    assert torch.equal(on_cuda[7].cpu().float(), args[7].float())


@pytest.mark.gpu
@DTYPES
@QUANTIZE
@HEADS
@pytest.mark.parametrize(
    ("R", "P", "J", "seen"), [(1, 1, 1, 1), (7, 3, 4, 2), (1000, 1, 3, 3), (300, 8, 9, 9), (7, 2, 3, 0)]
)
def test_merge_beams_on_cuda(
    dtype: torch.dtype, quantize: bool, Q: int, K: int, D: int, R: int, P: int, J: int, seen: int
) -> None:
    torch.manual_seed(8)
    args = merge_args(R, Q, K, D, dtype, quantize, P=P, J=J, seen=seen)
    if seen == 0:  # a row needs something
        args[2][:R], args[1][:R] = 1.0, 0.5
    args = (*args, 0.75)
    close_rows(merge_beams(*to("cuda", args)), merge_beams(*args), max(2 * ROUNDINGS[dtype], 5e-6))
