"""The small parts of the network, each as a function or a module with nothing but its arithmetic.

What every decoder layer has is stored once for all layers, [L, ..]: a compiled step then takes a handful of tensors
instead of hundreds, which it would look at before each replay.

Letters: L layers, T rows (prompt tokens or beams), H hidden, N outputs, D head size, X heads, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from widebeam.model.config import RopeConfig
from widebeam.model.ops import add_product, add_rms_norm, rms_norm
from widebeam.model.parallel import WHOLE, Shard


class RMSNorm(nn.Module):
    """The weights of root-mean-square norms, [L, size]; `ops.add_rms_norm` and `ops.rotate_and_store` apply them."""

    def __init__(self, layers: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(layers, size), requires_grad=False)


class Stream(NamedTuple):
    """What travels between layers, [T, H] each: the residual, and what is still to be added to it, if anything."""

    residual: Tensor
    delta: Tensor | None

    def rows(self, index_R: Tensor) -> Stream:
        """Some of its rows, copied."""
        return Stream(self.residual[index_R], None if self.delta is None else self.delta[index_R])

    def norm(self, weight_H: Tensor, eps: float, quantize: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The residual with all added, its norm, and the norm's scale if that is quantised."""
        if self.delta is None:
            return self.residual, *rms_norm(self.residual, weight_H, eps, quantize)
        return add_rms_norm(self.residual, self.delta, weight_H, eps, quantize)


class Linear(nn.Module):
    """`x @ weight.T + bias` of every layer, with storage left for the loader to fill: weights [L, N, H].

    A quantised one holds float8_e4m3fn weights with a scale for each output, float32 [L, 1, N], and takes quantised
    rows.
    """

    scale: Tensor | None

    def __init__(self, layers: int, size_in: int, size_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(layers, size_out, size_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(layers, size_out), requires_grad=False) if bias else None
        self.register_buffer("scale", None)
        self.out_dtype = torch.bfloat16
        """What a quantised product gives; a plain one gives what it takes."""

    def hold_float8(self) -> None:
        """Become quantised, with storage for the loader to fill; outputs keep the dtype that the weights had."""
        (layers, size_out, _), device = self.weight.shape, self.weight.device
        self.out_dtype = self.weight.dtype
        self.weight = nn.Parameter(torch.empty_like(self.weight, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.scale = torch.empty((layers, 1, size_out), dtype=torch.float32, device=device)

    @property
    def quantized(self) -> bool:
        return self.scale is not None

    def forward(self, layer: int, x_TH: Tensor, scale_T1: Tensor, first: int = 0) -> Tensor:
        """Rows, and their scales if this product is quantised, -> [T, N], or only the outputs from `first` on.

        `first` is a multiple of 16: float8 operands are read 16 bytes at a time.
        """
        weight_NH, bias = self.weight[layer, first:], None if self.bias is None else self.bias[layer, first:]
        if self.scale is None:
            return F.linear(x_TH, weight_NH, bias)
        return scaled_linear(x_TH, scale_T1, weight_NH, self.scale[layer, :, first:], bias, self.out_dtype)

    def onto(self, layer: int, residual_TH: Tensor, x_TH: Tensor, scale_T1: Tensor, shard: Shard = WHOLE) -> Stream:
        """The product as part of a stream: in the residual already, which changes in place, where a product can add.

        In a shard it is a part of a sum over all ranks, of which the first adds the bias.
        """
        if shard.size > 1:
            return Stream(residual_TH, shard.sum(self(layer, x_TH, scale_T1)))
        if self.scale is None and self.bias is None:
            add_product(residual_TH, x_TH, self.weight[layer])
            return Stream(residual_TH, None)
        return Stream(residual_TH, self(layer, x_TH, scale_T1))


def scaled_linear(
    x_TH: Tensor, scale_T1: Tensor, weight_NH: Tensor, scale_1N: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of quantised rows with quantised weights, [T, N] of `dtype`.

    CUDA multiplies float8 operands and scales the sums, in bfloat16 only (`fp8.why_not`); elsewhere the operands are
    widened, which is exact. A bias is added behind: cuBLAS has no scaled product with one for every size.
    """
    if x_TH.is_cuda:
        product = torch._scaled_mm(
            x_TH, weight_NH.t(), scale_a=scale_T1, scale_b=scale_1N, out_dtype=dtype, use_fast_accum=True
        )
    else:
        product = (F.linear(x_TH.float(), weight_NH.float()) * scale_T1 * scale_1N).to(dtype)
    return product if bias is None else product + bias


def float32_linear(x_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """Logits in float32 from operands of any dtype: [T, V].

    Rounding logits to bf16 would make most of a wide cut a tie. CUDA multiplies bf16 operands and writes float32; the
    CPU has no such product, so it widens the operands, which is exact.
    """
    if x_TH.dtype == torch.float32:
        return F.linear(x_TH, weight_VH)
    if x_TH.is_cuda:
        return torch.mm(x_TH, weight_VH.t(), out_dtype=torch.float32)
    return F.linear(x_TH.float(), weight_VH.float())


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021), halves rotated as in Llama and Qwen."""

    inv_freq: Tensor

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        inv_freq, self.scale = _frequencies(config, head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, 1, D/2]; shared by all layers."""
        angle = positions_T.float()[:, None] * self.inv_freq
        return (angle.cos() * self.scale)[:, None], (angle.sin() * self.scale)[:, None]


def _frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] and the factor on cos and sin, for each kind of RopeConfig.

    On the CPU also where the meta device is the default: arithmetic on that loads torch's compiler, which takes 2 s.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    base = 1.0 / (config.theta**steps)
    if config.kind == "linear":
        return base / config.factor, 1.0
    if config.kind == "yarn":
        return _yarn(config, head_dim, base)
    return base, 1.0


def _yarn(config: RopeConfig, head_dim: int, base: Tensor) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): slow dimensions are interpolated, fast ones kept, a linear ramp between."""
    original = config.original_max_position_embeddings or 1

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, device=base.device).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    inv_freq = base / config.factor * ramp + base * (1 - ramp)
    attention = config.attention_factor
    if attention is None:
        attention = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
    return inv_freq, attention
