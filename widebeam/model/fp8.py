"""Float8 projections (W8A8) and float8 context pages: when they are wanted, and what keeps a machine from them.

All four products of every layer are float8 or none; embeddings, norms and head never are. That is decided here, once,
and never by the size of a wave, so that no request's answer depends on its company. Pages are float8 in all layers, or
in none.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from widebeam.errors import ConfigError
from widebeam.model import flashinfer
from widebeam.model.config import ModelConfig
from widebeam.model.layers import scaled_linear
from widebeam.model.ops import FP8

log = logging.getLogger(__name__)
CAPABILITY = (8, 9)
ALIGNMENT = 16
"""Elements by which both sizes of a float8 weight must be divisible on CUDA."""
ROWS = (1, 16, 64, 128, 256, 512, 4096)
"""Numbers of rows that products are tried with: cuBLAS chooses kernels by them, and has none for some sizes."""


class Product(NamedTuple):
    """A weight that is multiplied by itself."""

    name: str
    outputs: int  # N
    inputs: int  # H
    bias: bool = False


def wants_fp8(setting: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the projections are to be float8, by `--quantization` and the checkpoint.

    Raises ConfigError if they contradict each other, or if the device cannot do it.
    """
    stored = config.quantization == "fp8"
    if setting == "none" and stored:
        raise ConfigError("--quantization none: the checkpoint itself is quantised (fp8); use auto, or the bf16 one")
    if setting != "fp8" and not stored:
        return False
    if reason := why_not(config, dtype, device):
        raise ConfigError(f"{'the checkpoint is fp8' if stored else '--quantization fp8'}: {reason}")
    return True


def kv_dtype(
    setting: str, attention: str, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype of context pages, by `--kv-cache-dtype` and `--attention-backend`.

    Raises ConfigError if pages are to be float8 and the device, or the backend that was named, does not read them.
    """
    if setting == "auto":
        if config.kv_scales:
            log.info("the checkpoint has scales for a float8 KV cache, which --kv-cache-dtype fp8 would use")
        return dtype
    reads = "flashinfer" if device.type == "cuda" else "torch"
    reason = why_no_pages(config, dtype, device)
    if reason is None and attention not in ("auto", reads):
        reason = f"float8 pages are read by --attention-backend {reads} here, not by {attention}"
    if reason:
        raise ConfigError(f"--kv-cache-dtype {setting}: {reason}")
    return FP8


def why_no_pages(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """What keeps context pages from being float8 here, or None. A CPU widens what it reads, and has no conditions."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:  # they could be read, but the kernel that writes them has no such type
        return "float8 pages need sm_89 (Ada) or later, and this GPU is sm_{}{}".format(*capability)
    return flashinfer.why_not(config, dtype, device)


def why_not(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """What keeps float8 products from running this model here, or None. A CPU widens them, and has no conditions."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return "float8 products need sm_89 (Ada) or later, and this GPU is sm_{}{}".format(*capability)
    if dtype != torch.bfloat16:
        return f"float8 products are made in bfloat16 only, not in {str(dtype).removeprefix('torch.')}"
    products = _products(config)
    for product in products:
        if product.outputs % ALIGNMENT or product.inputs % ALIGNMENT:
            size = f"{product.outputs} x {product.inputs}"
            return f"{product.name} is {size}, and float8 products need multiples of {ALIGNMENT}"
    return next(filter(None, (_trial(product, device) for product in products)), None)


def _products(config: ModelConfig) -> list[Product]:
    """One of each shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        Product("qkv_proj", q + 2 * kv, hidden, config.qkv_bias),
        Product("the k and v part of qkv_proj", 2 * kv, hidden, config.qkv_bias),  # all that most last rows need
        Product("o_proj", hidden, q, config.o_bias),
        Product("gate_up_proj", 2 * inner, hidden),
        Product("down_proj", hidden, inner),
    ]


def _trial(product: Product, device: torch.device) -> str | None:
    """What this torch and its cuBLAS say against a product, or None: better heard now than in a wave."""
    _, N, H, biased = product
    with torch.device(device):
        weight_NH, scale_1N = torch.empty(N, H, dtype=FP8), torch.ones(1, N)
        bias = torch.zeros(N, dtype=torch.bfloat16) if biased else None
        for T in ROWS:
            try:
                scaled_linear(torch.empty(T, H, dtype=FP8), torch.ones(T, 1), weight_NH, scale_1N, bias, torch.bfloat16)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                return f"{product.name} ({N} x {H}) does not run on {T} rows with torch {torch.__version__}: {reason}"
    return None
