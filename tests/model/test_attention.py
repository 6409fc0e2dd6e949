"""The attention ops against naive softmax in float64, and against torch's own checks of custom ops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from widebeam.model.attention import context_attention, merge_beam_keys, prefill_attention, register_plan
from widebeam.model.config import ModelConfig, RopeConfig
from widebeam.model.reference import TorchAttention

Q, K, D, S = 4, 2, 8, 4
CONFIG = ModelConfig(
    model_type="qwen3", vocab_size=10, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=Q, num_kv_heads=K,
    head_dim=D, max_position_embeddings=64, rms_norm_eps=1e-6, tied_head=True, qkv_bias=False, o_bias=False,
    qk_norm=True, rope=RopeConfig(), dtype="float32", eos_token_ids=(),
)  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


def naive(q_QD: Tensor, k_LKD: Tensor, v_LKD: Tensor) -> tuple[Tensor, Tensor]:
    """One row over L keys, head by head, in float64."""
    out, lse = torch.zeros(Q, D, dtype=torch.float64), torch.full((Q,), -math.inf, dtype=torch.float64)
    for head in range(Q):
        k, v = k_LKD[:, head // (Q // K)].double().cpu(), v_LKD[:, head // (Q // K)].double().cpu()
        logits = k @ q_QD[head].double().cpu() / math.sqrt(D)
        lse[head] = logits.logsumexp(0)
        out[head] = (logits - lse[head]).exp() @ v
    return out, lse


def make_plan(device: str, dtype: torch.dtype) -> tuple[TorchAttention, int]:
    plan = TorchAttention(config=CONFIG, page_size=S, dtype=dtype, device=torch.device(device))
    return plan, register_plan(plan)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "eps"), DTYPES)
def test_prefill_is_causal_and_apart(
    device: str, dtype: torch.dtype, eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("widebeam.model.reference.SCORES_AT_ONCE", 64)  # several blocks for each request
    torch.manual_seed(0)
    lengths = [5, 1, 9]
    q, k, v = (torch.randn(15, heads, D, device=device, dtype=dtype) for heads in (Q, K, K))
    plan, handle = make_plan(device, dtype)
    plan.plan_prefill(lengths)
    out, lse = prefill_attention(q, k, v, handle)
    start = 0
    for length in lengths:
        for row in range(length):
            seen = slice(start, start + row + 1)
            expected, expected_lse = naive(q[start + row], k[seen], v[seen])
            torch.testing.assert_close(out[start + row].double().cpu(), expected, atol=eps, rtol=eps)
            torch.testing.assert_close(lse[start + row].double().cpu(), expected_lse, atol=1e-4, rtol=1e-4)
        start += length


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "eps"), DTYPES)
def test_beams_see_their_own_context_and_tokens(device: str, dtype: torch.dtype, eps: float) -> None:
    """Pages in any order, a request without rows, padding rows, and decoded keys merged by log-sum-exp."""
    torch.manual_seed(1)
    pages, widths, lengths, J = [[3, 1], [5], [2, 6, 4]], [2, 0, 3], [7, 2, 9], 3
    q = torch.randn(6, Q, D, device=device, dtype=dtype)
    k_pages, v_pages = (torch.randn(8, S, K, D, device=device, dtype=dtype) for _ in range(2))
    own_k, own_v = (torch.randn(6, J, K, D, device=device, dtype=dtype) for _ in range(2))
    seen = (torch.arange(J) < 2).expand(6, J).to(device)
    plan, handle = make_plan(device, dtype)
    plan.plan_context(widths, lengths, pages)
    out, lse = context_attention(q, k_pages, v_pages, handle)
    merged = merge_beam_keys(q, out, lse, own_k, own_v, seen, D**-0.5)
    row = 0
    for width, length, table in zip(widths, lengths, pages, strict=True):
        k, v = (p[table].flatten(0, 1)[:length] for p in (k_pages, v_pages))
        for _ in range(width):
            expected, expected_lse = naive(q[row], k, v)
            torch.testing.assert_close(out[row].double().cpu(), expected, atol=eps, rtol=eps)
            torch.testing.assert_close(lse[row].double().cpu(), expected_lse, atol=1e-4, rtol=1e-4)
            both, _ = naive(q[row], torch.cat((k, own_k[row, :2])), torch.cat((v, own_v[row, :2])))
            torch.testing.assert_close(merged[row].double().cpu(), both, atol=eps, rtol=eps)
            row += 1
    assert out[row:].abs().max() == 0 and (lse[row:] == -math.inf).all()
    assert merged[row:].isfinite().all(), "padding rows must stay finite"


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    """Schema, fake kernel and the absence of aliasing, by torch's own checker."""
    plan, handle = make_plan(device, torch.float32)
    plan.plan_prefill([3, 2])
    plan.plan_context([4, 1], [6, 3], [[1, 2], [3]])
    q, k, v = (torch.randn(5, heads, D, device=device) for heads in (Q, K, K))
    pages = torch.randn(4, S, K, D, device=device)
    torch.library.opcheck(prefill_attention, (q, k, v, handle))
    torch.library.opcheck(context_attention, (q, pages, pages.clone(), handle))
    torch.library.opcheck(prefill_attention, (q.transpose(0, 1).contiguous().transpose(0, 1), k, v, handle))


def test_a_plan_lives_as_long_as_its_owner() -> None:
    plan, handle = make_plan("cpu", torch.float32)
    plan.plan_prefill([1])
    row = torch.randn(1, Q, D)
    prefill_attention(row, row[:, :K], row[:, :K], handle)
    del plan
    with pytest.raises(KeyError):
        prefill_attention(row, row[:, :K], row[:, :K], handle)
