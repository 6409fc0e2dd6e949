"""The attention ops, by every backend, against naive softmax in float64; and torch's own checks of custom ops."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from widebeam.model.attention import BACKENDS, Plans, context_attention, prefill_attention
from widebeam.model.config import ModelConfig, RopeConfig
from widebeam.model.flashinfer import FlashInferBackend, why_not
from widebeam.model.ops import FP8, merge_beams

Q, K, S = 4, 2, 4
PAGES = 64
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


def make_plans(name: str, device: str, dtype: torch.dtype, D: int, kv_dtype: torch.dtype | None = None) -> Plans:
    config = msgspec.structs.replace(CONFIG, head_dim=D)
    if name == "flashinfer" and (reason := why_not(config, dtype, torch.device(device))):
        pytest.skip(reason)
    return Plans(BACKENDS.get(name)(config, S, PAGES, dtype, torch.device(device), kv_dtype))


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
def test_contexts_may_share_all_their_pages(name: str, device: str, dtype: torch.dtype, D: int, eps: float) -> None:
    """Each as long as a context may be, so that the wave reads more pages than the pool has."""
    torch.manual_seed(3)
    pages, lengths = list(range(PAGES)), [PAGES * S, PAGES * S - 1, PAGES * S - 2]
    q = torch.randn(len(lengths), Q, D, device=device, dtype=dtype)
    pool = torch.randn(PAGES * S, K, D, device=device, dtype=dtype)
    plan, handle = make_plans(name, device, dtype, D).context(len(lengths), len(lengths), 1)
    plan.plan([1] * len(lengths), lengths, [pages] * len(lengths))
    out, _ = context_attention(q, pool, pool.clone(), handle)
    for row, length in enumerate(lengths):
        close(out[row], naive(q[row], pool[:length], pool[:length])[0], eps)


@pytest.mark.parametrize("case", [
    ("torch", "cpu", torch.float32, 8, 1e-5), ("torch", "cpu", torch.bfloat16, 8, 2e-2),
    *(pytest.param(("flashinfer", "cuda", dtype, D, 2e-2), marks=[gpu, pytest.mark.timeout(600)])
      for dtype, D in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 128))),  # minutes to build each
], ids=str)  # fmt: skip
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(
    ("requests", "R", "widths", "lengths"),
    [(4, 70, [2, 0, 65], [7, 6, 9]), (16, 16, [1, 1, 1], [140, 80, 9]), (16, 48, [12, 12, 12], [140, 80, 9])],
    ids=["tiles of many rows", "prompts", "beams"],
)
def test_float8_pages_are_read_with_their_scales(
    case: tuple[str, str, torch.dtype, int, float],
    splits: int,
    requests: int,
    R: int,
    widths: list[int],
    lengths: list[int],
) -> None:
    """As pages that hold what they stand for; rows of several requests and some that fill the shape. A kernel takes
    tiles of another size for fewer rows, and cuts contexts of more than 128 tokens."""
    name, device, dtype, D, eps = case
    torch.manual_seed(2)
    k_scale, v_scale = 2.0**-6, 0.03
    plans = make_plans(name, device, dtype, D, FP8)
    q = torch.randn(R, Q, D, device=device, dtype=dtype)
    k_pool, v_pool = (
        (torch.randn(64 * S, K, D, device=device) / scale).clamp(-448, 448).to(FP8) for scale in (k_scale, v_scale)
    )
    k_wide, v_wide = (pool.double().cpu() * scale for pool, scale in ((k_pool, k_scale), (v_pool, v_scale)))
    plan, handle = plans.context(requests, R, splits)
    ends = np.cumsum([-(-length // S) for length in lengths])
    pages = [part.tolist() for part in np.split(np.random.default_rng(2).permutation(63)[: ends[-1]] + 1, ends[:-1])]
    plan.plan(widths, lengths, pages)
    out, lse = context_attention(q.repeat(splits, 1, 1), k_pool, v_pool, handle, k_scale)
    none = torch.empty(R, 0, dtype=torch.int64, device=device)
    own = torch.zeros(1, K, D, device=device, dtype=dtype)
    seen = torch.zeros(1, dtype=torch.int64, device=device)
    repeated = q.repeat(splits, 1, 1)
    merged, _ = merge_beams(repeated, out, lse, own, own, none, seen, D**-0.5, plans.lse_scale, False, v_scale)
    rows = [b for b, width in enumerate(widths) for _ in range(width)]
    for row, b in enumerate(rows):
        k, v = (pool.unflatten(0, (-1, S))[pages[b]].flatten(0, 1)[: lengths[b]] for pool in (k_wide, v_wide))
        expected, expected_lse = naive(q[row], k, v)
        close(merged[row].view(Q, D), expected, eps)
        if splits == 1:
            close(lse[row] * plans.lse_scale, expected_lse, max(eps, 1e-4))


@backends
def test_opcheck(name: str, device: str, dtype: torch.dtype, D: int, eps: float) -> None:
    """Schema, fake kernel and the absence of aliasing, by torch's own checker."""
    plans = make_plans(name, device, dtype, D)
    prefill, prefill_handle = plans.prefill(4, None)
    context, context_handle = plans.context(4, 5, 1)
    q, k, v = (torch.randn(5, heads, D, device=device, dtype=dtype) for heads in (Q, K, K))
    pool = torch.randn(4 * S, K, D, device=device, dtype=dtype)
    strided = torch.randn(5, Q + K, D, device=device, dtype=dtype)[:, Q:]  # as a slice of fused projections
    prefill.plan([3, 2], 5)
    torch.library.opcheck(prefill_attention, (q, k, v, prefill_handle))
    torch.library.opcheck(prefill_attention, (q, k, strided, prefill_handle))
    context.plan([4, 1], [6, 3], [[1, 2], [3]])
    torch.library.opcheck(context_attention, (q, pool, pool.clone(), context_handle))


def failing(kernels: set[str], real: Any) -> Any:
    """`FlashInferBackend._try` where some kernels do not build."""

    def attempt(backend: FlashInferBackend) -> None:
        if backend.kernel in kernels:
            raise FileNotFoundError(f"no nvcc for {backend.kernel}\n" + "what a compiler prints\n" * 100)
        real(backend)

    return attempt


def test_kernels_are_tried_in_order(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each that fails counts and is named, in one line; where none is left, the backend refuses."""
    arguments = (CONFIG, S, 64, torch.bfloat16, torch.device("cpu"))
    cases = (((9, 0), set[str](), "fa3", 0), ((9, 0), {"fa3"}, "fa2", 1), ((8, 0), {"fa3"}, "fa2", 0))
    for capability, broken, kernel, count in cases:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, now=capability: now)
        monkeypatch.setattr(FlashInferBackend, "_try", failing(broken, lambda _: None))
        caplog.clear()
        backend = FlashInferBackend(*arguments)
        assert backend.kernel == kernel and backend.fallbacks == len(caplog.records) == count
        assert all("no nvcc" in text and "a compiler prints" not in text for text in caplog.messages)
    monkeypatch.setattr(FlashInferBackend, "_try", failing({"fa2", "fa3"}, lambda _: None))
    with pytest.raises(RuntimeError, match=r"\(fa2\) builds and runs here"):
        FlashInferBackend(*arguments)


def test_float8_pages_have_kernels_and_room_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-2 whatever prefill runs on, and room for a float32 row of each tile of any plan, with its
    log-sum-exp: tiles of 16, 64 or 128 rows of one key head, as many as rows and requests can need, and two for each
    multiprocessor at least."""
    config = msgspec.structs.replace(CONFIG, num_heads=32, num_kv_heads=8, head_dim=128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(FlashInferBackend, "_try", lambda _: None)
    monkeypatch.setattr("widebeam.model.flashinfer.WORKSPACE_BYTES", 16)
    plain, backend = (
        FlashInferBackend(config, S, 64, torch.bfloat16, torch.device("cpu"), kv_dtype) for kv_dtype in (None, FP8)
    )
    assert (plain.kernel, plain.context_kernel) == ("fa3", "fa3") and plain.room("fa3", 9999, 17).numel() == 16
    assert (backend.kernel, backend.context_kernel) == ("fa3", "fa2")
    for rows, batch in ((2, 2), (16, 17), (256, 68), (8192, 257), (20_480, 17)):
        room = backend.room("fa2", rows, batch).numel()
        for tile in (16, 64, 128):
            tiles = max(2 * 132 // 8, math.ceil(rows * 4 / tile) + batch - 1)
            assert 32 * tiles * tile * (128 + 1) * 4 + 32 <= room
    assert backend.room("fa2", 2, 2) is backend.workspace and backend.workspace.numel() == room


@gpu
@pytest.mark.timeout(600)  # kernels are built where none are cached
def test_the_next_kernels_serve_where_the_first_do_not_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cuda")
    config = msgspec.structs.replace(CONFIG, head_dim=128)
    if reason := why_not(config, torch.bfloat16, device):
        pytest.skip(reason)
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("there is one kind of kernels alone")
    monkeypatch.setattr(FlashInferBackend, "_try", failing({"fa3"}, FlashInferBackend._try))
    backend = FlashInferBackend(config, S, 64, torch.bfloat16, device)
    assert (backend.kernel, backend.fallbacks) == ("fa2", 1)
    assert len(caplog.records) == 1 and "fa3" in caplog.text
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 128, device=device, dtype=torch.bfloat16) for heads in (Q, K, K))
    plan = backend.prefill_plan(2, None)
    plan.plan([3], 3)
    out, lse = plan.run(q, k, v)
    context = backend.context_plan(2, 3, 1, beside=False)
    context.plan([3], [6], [[2, 1]])
    pool = torch.randn(3 * S, K, 128, device=device, dtype=torch.bfloat16)
    beams, _ = context.run(q, pool, pool, 1.0)
    keys = pool.unflatten(0, (-1, S))[[2, 1]].flatten(0, 1)[:6]
    for row in range(3):
        expected, expected_lse = naive(q[row], k[: row + 1], v[: row + 1])
        close(out[row], expected, 2e-2)
        close(lse[row] * backend.lse_scale, expected_lse, 2e-2)
        close(beams[row], naive(q[row], keys, keys)[0], 2e-2)


def test_a_plan_lives_as_long_as_its_owner() -> None:
    plans = make_plans("torch", "cpu", torch.float32, 8)
    plan, handle = plans.prefill(1, None)
    plan.plan([1], 1)
    row = torch.randn(1, Q, 8)
    prefill_attention(row, row[:, :K], row[:, :K], handle)
    del plan, plans
    with pytest.raises(KeyError):
        prefill_attention(row, row[:, :K], row[:, :K], handle)
