"""The attention ops, by every backend, against naive softmax in float64; and torch's own checks of custom ops."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from torch import Tensor

from widebeam.model.attention import BACKENDS, Plans, context_attention, prefill_attention
from widebeam.model.config import ModelConfig, RopeConfig
from widebeam.model.flashinfer import why_not
from widebeam.model.ops import merge_beams

Q, K, S = 4, 2, 4
CONFIG = ModelConfig(
    model_type="qwen3", vocab_size=10, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=Q, num_kv_heads=K,
    head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6, tied_head=True, qkv_bias=False, o_bias=False,
    qk_norm=True, rope=RopeConfig(), dtype="float32", eos_token_ids=(),
)  # fmt: skip
gpu = pytest.mark.gpu
CASES = [
    pytest.param("torch", "cpu", torch.float32, 8, 1e-5, id="torch-cpu-float32"),
    pytest.param("torch", "cpu", torch.bfloat16, 8, 2e-2, id="torch-cpu-bfloat16"),
    pytest.param("torch", "cuda", torch.float32, 8, 1e-5, id="torch-cuda-float32", marks=gpu),
    pytest.param("torch", "cuda", torch.bfloat16, 128, 2e-2, id="torch-cuda-bfloat16", marks=gpu),
    pytest.param("flashinfer", "cuda", torch.bfloat16, 128, 2e-2, id="flashinfer-bfloat16", marks=gpu),
]
backends = pytest.mark.parametrize(("name", "device", "dtype", "D", "eps"), CASES)


def make_plans(name: str, device: str, dtype: torch.dtype, D: int) -> Plans:
    config = msgspec.structs.replace(CONFIG, head_dim=D)
    if name == "flashinfer" and (reason := why_not(config, dtype, torch.device(device))):
        pytest.skip(reason)
    return Plans(BACKENDS.get(name)(config, S, 64, dtype, torch.device(device)))


def naive(q_QD: Tensor, k_LKD: Tensor, v_LKD: Tensor) -> tuple[Tensor, Tensor]:
    """One row over L keys, head by head, in float64."""
    D = q_QD.shape[-1]
    out, lse = torch.zeros(Q, D, dtype=torch.float64), torch.full((Q,), -math.inf, dtype=torch.float64)
    for head in range(Q):
        k, v = k_LKD[:, head // (Q // K)].double().cpu(), v_LKD[:, head // (Q // K)].double().cpu()
        logits = k @ q_QD[head].double().cpu() / math.sqrt(D)
        lse[head] = logits.logsumexp(0)
        out[head] = (logits - lse[head]).exp() @ v
    return out, lse


def close(actual: Tensor, expected: Tensor, eps: float) -> None:
    torch.testing.assert_close(actual.double().cpu(), expected, atol=eps, rtol=eps)


@backends
@pytest.mark.parametrize("fixed", [False, True], ids=["any-rows", "fixed-rows"])
def test_prefill_is_causal_and_apart(
    name: str, device: str, dtype: torch.dtype, D: int, eps: float, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("widebeam.model.reference.SCORES_AT_ONCE", 64)  # several blocks for each request
    torch.manual_seed(0)
    rows = 18 if fixed else 15  # some only fill the shape
    q, k, v = (torch.randn(rows, heads, D, device=device, dtype=dtype) for heads in (Q, K, K))
    plans = make_plans(name, device, dtype, D)
    plan, handle = plans.prefill(4, rows if fixed else None)
    for lengths in ([5, 1, 9], [15]):
        plan.plan(lengths, rows)
        out, lse = prefill_attention(q, k, v, handle)
        start = 0
        for length in lengths:
            for row in range(length):
                seen = slice(start, start + row + 1)
                expected, expected_lse = naive(q[start + row], k[seen], v[seen])
                close(out[start + row], expected, eps)
                close(lse[start + row] * plans.lse_scale, expected_lse, max(eps, 1e-4))
            start += length


@backends
@pytest.mark.parametrize("splits", [1, 2])
def test_beams_see_their_own_context_and_tokens(
    name: str, device: str, dtype: torch.dtype, D: int, eps: float, splits: int
) -> None:
    """Pages in any order, a request without rows, rows that fill the shape, decoded keys merged, plans made again."""
    torch.manual_seed(1)
    J, R = 3, 6
    one_q = torch.randn(R, Q, D, device=device, dtype=dtype)
    k_pool, v_pool = (torch.randn(10 * S, K, D, device=device, dtype=dtype) for _ in range(2))
    own_k, own_v = (torch.randn(R * J, K, D, device=device, dtype=dtype) for _ in range(2))
    slots, seen = torch.randperm(R * J).view(R, J).to(device), torch.tensor([2], device=device)
    plans = make_plans(name, device, dtype, D)
    plan, handle = plans.context(4, R, splits)
    for pages, widths, lengths in (
        ([[3, 1], [5, 7], [2, 6, 4]], [2, 0, 3], [7, 6, 9]),
        ([[9, 8, 2], [1, 4]], [1, 5], [12, 5]),
    ):
        plan.plan(widths, lengths, pages)
        q = one_q.repeat(splits, 1, 1)
        out, lse = context_attention(q, k_pool, v_pool, handle)
        merged, _ = merge_beams(q, out, lse, own_k, own_v, slots, seen, D**-0.5, plans.lse_scale, False)
        row = 0
        for width, length, table in zip(widths, lengths, pages, strict=True):
            k, v = (pool.unflatten(0, (-1, S))[table].flatten(0, 1)[:length] for pool in (k_pool, v_pool))
            for _ in range(width):
                if splits == 1:
                    expected, expected_lse = naive(one_q[row], k, v)
                    close(out[row], expected, eps)
                    close(lse[row] * plans.lse_scale, expected_lse, max(eps, 1e-4))
                own = slots[row, :2]
                both, _ = naive(one_q[row], torch.cat((k, own_k[own])), torch.cat((v, own_v[own])))
                close(merged[row].view(Q, D), both, eps)
                row += 1
        assert merged.isfinite().all(), "rows that fill the shape must stay finite"


@backends
def test_opcheck(name: str, device: str, dtype: torch.dtype, D: int, eps: float) -> None:
    """Schema, fake kernel and the absence of aliasing, by torch's own checker."""
    plans = make_plans(name, device, dtype, D)
    prefill, prefill_handle = plans.prefill(4, None)
    prefill.plan([3, 2], 5)
    context, context_handle = plans.context(4, 5, 1)
    context.plan([4, 1], [6, 3], [[1, 2], [3]])
    q, k, v = (torch.randn(5, heads, D, device=device, dtype=dtype) for heads in (Q, K, K))
    pool = torch.randn(4 * S, K, D, device=device, dtype=dtype)
    strided = torch.randn(5, Q + K, D, device=device, dtype=dtype)[:, Q:]  # as a slice of fused projections
    torch.library.opcheck(prefill_attention, (q, k, v, prefill_handle))
    torch.library.opcheck(prefill_attention, (q, k, strided, prefill_handle))
    torch.library.opcheck(context_attention, (q, pool, pool.clone(), context_handle))


def test_a_plan_lives_as_long_as_its_owner() -> None:
    plans = make_plans("torch", "cpu", torch.float32, 8)
    plan, handle = plans.prefill(1, None)
    plan.plan([1], 1)
    row = torch.randn(1, Q, 8)
    prefill_attention(row, row[:, :K], row[:, :K], handle)
    del plan, plans
    with pytest.raises(KeyError):
        prefill_attention(row, row[:, :K], row[:, :K], handle)
