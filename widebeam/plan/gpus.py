"""GPUs by name, and how long a part of a wave takes on one. Imports no torch.

A rate is a share of the datasheet's peak, and a launch has a time of its own. Both are calibrated on whole waves of an
H200 (bench/calibrate.py), so that they hold for a GPU that is hot and limited by its power, not for one kernel alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from widebeam.errors import ConfigError

TILE = 256
"""Rows by which causal attention goes: of the square on the diagonal, half is computed in vain."""
SPLITS = (1, 4)
"""In how many parts attention over a context may be cut."""
FP8_PAGES = 2.0
"""Attention over float8 pages is FlashAttention-2's: about twice the time on an H200 (bf16 pages, 4 x 5000 tokens)."""


@dataclass(frozen=True)
class Gpu:
    """What a datasheet says of it: dense TFLOP/s, TB/s and, as PyTorch counts it, GiB."""

    name: str
    memory_gib: float
    bf16_tflops: float
    fp8_tflops: float | None
    tb_per_s: float
    measured: bool = False
    """The rates were calibrated on this one; on all others they are those of the H200, scaled."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 139.8, 989.0, 1979.0, 4.8, measured=True),
        Gpu("h100", 79.1, 989.0, 1979.0, 3.35),  # SXM
        Gpu("a100", 79.1, 312.0, None, 2.039),  # SXM, 80 GB
        Gpu("l40s", 44.4, 362.0, 733.0, 0.864),
    )
}


def gpu_named(name: str) -> Gpu:
    """Raises ConfigError."""
    if name not in GPUS:
        raise ConfigError(f"--gpu {name!r} is not known: {', '.join(GPUS)}")
    return GPUS[name]


@dataclass(frozen=True)
class Calibration:
    """Shares of the peak that waves reach, and times in microseconds (`wave` and `level`: milliseconds)."""

    products: float = 0.76
    fp8_products: float = 0.736
    prompt_attention: float = 0.549
    """Of the peak in bf16, as all that follow."""
    context_attention: float = 0.457
    memory: float = 0.613
    product_us: float = 2.94
    prompt_us: float = 5.47
    context_us: float = 5.82
    context_token_us: float = 0.0122
    """For each token of a context, since one block walks through it."""
    split_us: float = 14.4
    """To merge the parts of a context that was cut."""
    pointwise_us: float = 4.32
    """To launch one pass between products."""
    wave_ms: float = 1.0
    """Before a wave's prompts run: copies and plans."""
    level_ms: float = 0.055
    """Scoring and selection, besides reading logits."""


class Rates:
    """A Timer (plan/work.py) by rates. `kv_bytes`: of an element in the context's pages."""

    def __init__(self, gpu: Gpu, kv_bytes: int = 2, calibration: Calibration | None = None) -> None:
        self.gpu, self.kv_bytes = gpu, kv_bytes
        self.calibration = calibration or Calibration()

    def _matmul_ms(self, flops: float, share: float, peak: float | None = None) -> float:
        return flops / (share * (peak or self.gpu.bf16_tflops) * 1e9)

    def _bytes_ms(self, nbytes: float) -> float:
        return nbytes / (self.calibration.memory * self.gpu.tb_per_s * 1e9)

    def product_ms(self, rows: int, n: int, k: int) -> float:
        fit = self.calibration
        return fit.product_us / 1e3 + max(self._matmul_ms(2.0 * rows * n * k, fit.products), self._bytes_ms(2 * n * k))

    def fp8_product_ms(self, rows: int, n: int, k: int) -> float:
        fit, peak = self.calibration, self.gpu.fp8_tflops
        if peak is None:
            return float("inf")
        arithmetic = self._matmul_ms(2.0 * rows * n * k, fit.fp8_products, peak)
        return fit.product_us / 1e3 + max(arithmetic, self._bytes_ms(n * k))

    def head_ms(self, rows: int, columns: int, hidden: int) -> float:
        return self.product_ms(rows, columns, hidden)

    def prefill_attention_ms(self, requests: int, context: int, Q: int, K: int, D: int) -> float:
        fit = self.calibration
        return fit.prompt_us / 1e3 + self._matmul_ms(
            2.0 * requests * Q * D * context * (context + TILE), fit.prompt_attention
        )

    def context_attention_ms(self, requests: int, width: int, context: int, Q: int, K: int, D: int) -> float:
        fit = self.calibration
        arithmetic = self._matmul_ms(4.0 * requests * width * Q * D * context, fit.context_attention)
        moved = self._bytes_ms(2.0 * requests * context * K * D * self.kv_bytes)
        slower = FP8_PAGES if self.kv_bytes == 1 else 1.0
        return min(
            (fit.context_us + (fit.split_us if parts > 1 else 0.0)) / 1e3
            + max(arithmetic * slower, moved, fit.context_token_us * context / parts / 1e3)
            for parts in SPLITS
        )

    def copy_ms(self, nbytes: int) -> float:
        return self.calibration.pointwise_us / 1e3 + self._bytes_ms(nbytes)
