"""Shapes of Qwen3's dense models by name, for those who have no checkpoint at hand. Imports no torch."""

from __future__ import annotations

from widebeam.model.config import ModelConfig, RopeConfig


def _qwen3(
    hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int, intermediate_size: int, tied_head: bool
) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3", vocab_size=151_936, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128,
        max_position_embeddings=40_960, rms_norm_eps=1e-6, tied_head=tied_head, qkv_bias=False, o_bias=False,
        qk_norm=True, rope=RopeConfig(theta=1e6), dtype="bfloat16", eos_token_ids=(151_645, 151_643),
    )  # fmt: skip


SHAPES = {
    "qwen3-tiny": _qwen3(256, 4, 4, 2, 512, True),  # not one of Qwen's: small enough for tens of thousands of requests
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12_288, False),
}
