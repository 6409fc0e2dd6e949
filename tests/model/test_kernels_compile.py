"""Our kernels compile for the GPUs that they are for, wherever Triton is installed; that takes no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.model.test_ops import DTYPES, EPS, float8_args, merge_args, norm_args, rotate_args, rows
from tests.model.test_row_attention import row_args

triton = pytest.importorskip("triton")
NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
HOPPER, AMPERE = 90, 80


def compile_for(capability: int, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """As a launch with these arguments would."""
    named = [options.pop(parameter.name) for parameter in kernel.params[len(args) :]]
    signature, constants = {}, {}
    for number, (parameter, value) in enumerate(zip(kernel.params, (*args, *named), strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(number,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{NAMES[value.dtype]}"
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    triton.compile(triton.compiler.ASTSource(kernel, signature, constants), target=target, options=options)


@pytest.fixture(params=[HOPPER, AMPERE], ids=["sm90", "sm80"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Kernels are compiled for it where they would be launched."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compile_for(request.param, kernel, args, options)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    return int(request.param)


@DTYPES
@pytest.mark.parametrize("quantize", [False, True])
def test_kernels_of_layers(capability: int, dtype: torch.dtype, quantize: bool) -> None:
    from widebeam.model import ops_triton

    if quantize and capability < HOPPER:
        pytest.skip("float8 is for Ada and later")
    x, delta, weight, _, _ = norm_args(5, 64, dtype, quantize)
    ops_triton.add_rms_norm(x, delta, weight, EPS, quantize)
    ops_triton.rms_norm(x, weight, EPS, quantize)
    ops_triton.silu_mul(rows(5, 64, dtype=dtype), quantize)
    ops_triton.merge_beams(*merge_args(5, 4, 2, 16, dtype, quantize, P=2, J=3, seen=2))
    make_args = float8_args if quantize else rotate_args
    for queries, normed in ((4, True), (4, False), (0, True)):
        ops_triton.rotate_and_store(*make_args(5, queries, 2, 16, dtype, normed=normed, copies=2))
    if quantize:
        ops_triton.quantize_rows(x)


@DTYPES
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize(("Q", "K", "D", "page_size"), [(16, 8, 128, 64), (7, 1, 16, 7)])
def test_kernels_of_row_attention(
    capability: int, dtype: torch.dtype, float8: bool, Q: int, K: int, D: int, page_size: int
) -> None:
    from widebeam.model import row_attention_triton

    if float8 and capability < HOPPER:
        pytest.skip("float8 is for Ada and later")
    args = row_args([5, 0, 100], Q, K, D, dtype, page_size=page_size, quantize=float8, float8=float8)
    row_attention_triton.row_attention(*args)


@pytest.mark.parametrize("by_position", [False, True])
def test_kernels_of_selection(capability: int, by_position: bool) -> None:
    from widebeam.engine import column_best_triton, segment_top_triton

    start, limit = torch.tensor([0, 40, 100]), torch.tensor([5, 9])
    segment_top_triton.segment_top(torch.randn(100), start, limit, 14, by_position)
    column_best_triton.column_best(torch.randn(3, 1000), 128)


@pytest.mark.parametrize("causal", [False, True])
def test_kernel_of_work_lists(capability: int, causal: bool) -> None:
    from widebeam.model import work_lists_triton

    arrays = (torch.zeros(size, dtype=torch.int32) for size in (100, 8, 4, 4, 3))
    work_lists_triton.write_lists(*arrays, most=9, heads=40, tile=128, causal=causal, processors=132)
