"""The dense Qwen3 / Qwen2 decoder. It maps tokens at positions to hidden states; where keys and values are kept and
which of them a token sees is the business of the `attends` functions that the caller passes in, one for each layer.

Letters: T rows (packed prompt tokens, or beams), H hidden, Q query heads, K key/value heads, D head size, N layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from widebeam.model.config import ModelConfig
from widebeam.model.layers import Linear, RMSNorm, Rotary, float32_linear, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [T, Q, D], k [T, K, D], v [T, K, D]) -> attention output [T, Q, D]"""


class Attention(nn.Module):
    """Projections, per-head norms (Qwen3) and rotation; the attention itself is `attend`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.split = [size, kv_size, kv_size]
        self.qkv_proj = Linear(config.hidden_size, sum(self.split), bias=config.qkv_bias)
        self.o_proj = Linear(size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_TH: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv_proj(x_TH).split(self.split, dim=-1)
        q_TQD = rotate(self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim))), cos, sin)
        k_TKD = rotate(self.k_norm(k.unflatten(-1, (self.num_kv_heads, self.head_dim))), cos, sin)
        v_TKD = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        return self.o_proj(attend(q_TQD, k_TKD, v_TKD).flatten(1))


class MLP(nn.Module):
    """SwiGLU, with gate and up projections in one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_TH: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x_TH).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_TH: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x_TH = x_TH + self.self_attn(self.input_layernorm(x_TH), cos, sin, attend)
        return x_TH + self.mlp(self.post_attention_layernorm(x_TH))


def run_layer(layer: Layer, x_TH: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    """One layer as a function: the unit that is compiled once and runs for all of them."""
    return layer(x_TH, cos, sin, attend)


class Qwen3(nn.Module):
    """The network without its beams: `forward` gives normed hidden states, `logits` turns them into float32 scores."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        self.rotary = Rotary(config.rope, config.head_dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None
            if config.tied_head
            else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        )

    @property
    def head_VH(self) -> Tensor:
        """Rows of the output projection: the embedding where the checkpoint ties them."""
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attends: Sequence[Attend],
        keep_R: Tensor | None = None,
        run: Callable[..., Tensor] = run_layer,
    ) -> Tensor:
        """Hidden states after the final norm, [T, H], or only those of rows `keep_R`, [R, H].

        `attends` has an attention for each layer; `run` is `run_layer` or a compiled form of it.
        """
        x_TH = F.embedding(tokens_T, self.embed_tokens)
        cos, sin = self.rotary(positions_T)
        for layer, attend in zip(self.layers, attends, strict=True):
            x_TH = run(layer, x_TH, cos, sin, attend)
        return self.norm(x_TH if keep_R is None else x_TH[keep_R])

    def logits(self, hidden_RH: Tensor, head_VH: Tensor | None = None) -> Tensor:
        """Float32 logits over the vocabulary, [R, V], or over the rows of a smaller head."""
        return float32_linear(hidden_RH, self.head_VH if head_VH is None else head_VH)
