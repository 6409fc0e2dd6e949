"""Where float8 products run, and that they give on a GPU what they give on a CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.model.test_quantization import rounded, same
from widebeam.errors import ConfigError
from widebeam.model import flashinfer, fp8
from widebeam.model.config import load_model_config
from widebeam.model.layers import Linear, scaled_linear
from widebeam.model.weights import load_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "dtype", "sizes", "words"),
    [
        ((8, 0), torch.bfloat16, {}, "sm_89 .* sm_80"),
        ((9, 0), torch.float16, {}, "bfloat16 only, not in float16"),
        ((9, 0), torch.float32, {}, "bfloat16 only, not in float32"),
        ((9, 0), torch.bfloat16, {"intermediate_size": 40}, "down_proj is 32 x 40"),
        ((9, 0), torch.bfloat16, {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}, "k and v part .* is 8 x 32"),
        ((9, 0), torch.bfloat16, {"hidden_size": 24}, "qkv_proj is 128 x 24"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stored", ["none", "fp8"])
def test_what_a_gpu_cannot_do_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capability: Any, dtype: torch.dtype, sizes: Any, words: str,
    stored: Any,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(fp8, "_trial", lambda product, device: None)
    config = msgspec.structs.replace(load_model_config(checkpoint), quantization=stored)
    assert fp8.wants_fp8("auto", config, torch.float16, CPU) == (stored == "fp8")
    bad = msgspec.structs.replace(config, **sizes)
    with pytest.raises(
        ConfigError, match=f"{'the checkpoint is fp8' if stored == 'fp8' else 'quantization fp8'}: .*{words}"
    ):
        fp8.wants_fp8("fp8", bad, dtype, CUDA)


@pytest.mark.parametrize(
    ("capability", "dtype", "sizes", "attention", "words"),
    [
        ((8, 0), torch.bfloat16, {}, "auto", "sm_89 .* sm_80"),
        ((9, 0), torch.float32, {}, "auto", "FlashInfer has no float32 kernels"),
        ((9, 0), torch.bfloat16, {"head_dim": 80}, "flashinfer", "no kernels for head size 80"),
        ((9, 0), torch.bfloat16, {"head_dim": 128}, "torch", "by --attention-backend flashinfer here, not by torch"),
    ],
)
def test_pages_that_a_gpu_cannot_read_are_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capability: Any, dtype: torch.dtype, sizes: Any, attention: str,
    words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: name)
    config = msgspec.structs.replace(load_model_config(checkpoint), **sizes)
    assert fp8.kv_dtype("auto", attention, config, dtype, CUDA) == dtype
    with pytest.raises(ConfigError, match=f"^--kv-cache-dtype fp8: .*{words}"):
        fp8.kv_dtype("fp8", attention, config, dtype, CUDA)


def test_who_reads_float8_pages(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: name)
    config = msgspec.structs.replace(load_model_config(checkpoint), head_dim=128)
    for device, dtypes in ((CPU, (torch.float32, torch.bfloat16)), (CUDA, (torch.float16, torch.bfloat16))):
        for dtype in dtypes:
            assert fp8.kv_dtype("fp8", "auto", config, dtype, device) == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8: .*-backend torch here, not by other"):
        fp8.kv_dtype("fp8", "other", config, torch.float32, CPU)


def test_a_product_that_fails_is_refused_with_its_size(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(x: Tensor, scale: Tensor, weight: Tensor, *rest: Any) -> None:
        if tuple(weight.shape) == (32, 48) and x.shape[0] == 256:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand more")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fp8, "scaled_linear", product)
    trial = fp8._trial
    monkeypatch.setattr(fp8, "_trial", lambda product, device: trial(product, CPU))
    config = load_model_config(checkpoint)
    with pytest.raises(ConfigError, match=r"down_proj \(32 x 48\) does not run on 256 rows .*NOT_SUPPORTED$"):
        fp8.wants_fp8("fp8", config, torch.bfloat16, CUDA)


def test_slices_lie_as_scaled_mm_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transposed weight column by column, scales and bias in one piece."""
    linear = Linear(2, 64, 96, bias=True)
    linear.hold_float8()
    monkeypatch.setattr("widebeam.model.layers.scaled_linear", lambda *args: args)
    _, _, weight, scale, bias, dtype = linear(1, torch.ones(3, 64), torch.ones(3, 1), 32)
    assert weight.t().stride() == (1, 64)
    assert scale.is_contiguous() and scale.shape == (1, 64)
    assert bias.is_contiguous() and bias.shape == (64,)
    assert dtype == torch.float32


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("H", "N", "first"), [(32, 96, 32), (2048, 4096, 2048), (6144, 2048, 0), (12288, 4096, 16)])
def test_products_on_cuda_equal_those_of_the_cpu(H: int, N: int, first: int, biased: bool) -> None:
    """To rounding to bfloat16, and to what Hopper's tensor cores lose, which keep 13 bits or so of a sum as they go."""
    torch.manual_seed(0)
    linear = Linear(1, H, N, bias=biased).to(torch.bfloat16)
    linear.hold_float8()
    values, scale = rounded(torch.randn(N, H) * torch.logspace(-2, 0, N)[:, None])
    linear.weight.data[0].copy_(values)
    assert linear.scale is not None
    linear.scale[0].copy_(scale.t())
    if linear.bias is not None:
        linear.bias.data.normal_()
    on_cuda = copy.deepcopy(linear).cuda()
    for T in (1, 7, 127, 256, 1000):
        x, x_scale = rounded(torch.randn(T, H))
        expected = linear(0, x, x_scale, first).float()
        result = on_cuda(0, x.cuda(), x_scale.cuda(), first)
        assert result.dtype == torch.bfloat16
        summed = scaled_linear(
            x.float().abs(), x_scale, values.float().abs()[first:], scale.t()[:, first:], None, torch.float32
        )
        lost = 2**-7 * expected.abs() + 2**-10 * summed
        if linear.bias is not None:  # the product was rounded before it
            lost += 2**-7 * (expected - linear.bias[0, first:].float()).abs()
        assert ((result.float().cpu() - expected).abs() <= lost).all(), f"{T} rows"


@pytest.mark.gpu
def test_weights_are_quantised_on_cuda_as_on_the_cpu(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    on_cuda = load_model(checkpoint, config, torch.bfloat16, CUDA, fp8=True)
    assert same(on_cuda.cpu(), load_model(checkpoint, config, torch.bfloat16, CPU, fp8=True))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(2048, 6144, 16, 8), (4096, 12288, 32, 8), (1024, 3072, 16, 8), (2560, 9728, 32, 8)])
def test_every_product_of_real_models_runs(checkpoint: Path, sizes: tuple[int, int, int, int]) -> None:
    names = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
    config = msgspec.structs.replace(
        load_model_config(checkpoint), head_dim=128, **dict(zip(names, sizes, strict=True))
    )
    assert fp8.why_not(config, torch.bfloat16, CUDA) is None
