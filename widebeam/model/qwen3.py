"""The dense Qwen3 / Qwen2 decoder, in pieces that a search puts together. It maps tokens at positions to hidden states;
where keys and values are kept and which of them a token sees is the business of the `attend` function that the caller
passes in.

Between layers the residual stream travels. A plain product adds to it while it is written; what a quantised one wants
added travels beside it, so that one kernel adds and norms.

Letters: T rows (packed prompt tokens, or beams), H hidden, Q query heads, K key/value heads, D head size, N layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from widebeam.kv.pools import UNSCALED, Pools, Scales
from widebeam.model.config import ModelConfig
from widebeam.model.layers import Linear, RMSNorm, Rotary, Stream, float32_linear
from widebeam.model.ops import rotate_and_store, silu_mul
from widebeam.model.parallel import WHOLE, Shard


class Rotation(NamedTuple):
    """Cosines and sines of the rows' positions, float32 [T, 1, D/2]; the same in all layers."""

    cos: Tensor
    sin: Tensor


class Attention(nn.Module):
    """Projections, per-head norms (Qwen3) and rotation of every layer; the attention itself is the caller's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        layers = config.num_layers
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.eps = config.rms_norm_eps
        self.qkv_proj = Linear(layers, config.hidden_size, self.q_size + 2 * kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(layers, self.q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(layers, config.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(layers, config.head_dim) if config.qk_norm else None

    def place(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        pools: Pools,
        slot_T: Tensor,
        query_rows: int,
        scales: Scales = UNSCALED,
    ) -> tuple[Tensor, Tensor]:
        """Norm, rotate, and store keys and values in their slots: (q [query_rows, Q, D], k [T, K, D]).

        `query_rows` is a multiple of T: q then lies there several times over. With 0 there are no queries in `qkv`.
        `scales` are those of float8 pools.
        """
        q_norm = None if self.q_norm is None else self.q_norm.weight[layer]
        k_norm = None if self.k_norm is None else self.k_norm.weight[layer]
        heads = self.num_heads if query_rows else 0
        return rotate_and_store(
            qkv, *rotation, q_norm, k_norm, self.eps, *pools, slot_T, heads, self.num_kv_heads, query_rows, *scales
        )

    def values(self, qkv: Tensor) -> Tensor:
        """A view of the values in the product, [T, K, D]."""
        size = self.num_kv_heads * self.head_dim
        return qkv[:, -size:].unflatten(-1, (self.num_kv_heads, self.head_dim))


Attend = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The qkv product, [T, (Q + 2 K) D] -> what goes into the output projection: rows [T, Q D] and, if that is quantised,
their scales"""


class MLP(nn.Module):
    """SwiGLU of every layer, with gate and up projections in one product."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        self.shard = shard
        self.gate_up_proj = Linear(config.num_layers, config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = Linear(config.num_layers, config.intermediate_size, config.hidden_size)

    def forward(self, layer: int, residual_TH: Tensor, x_TH: Tensor, scale_T1: Tensor) -> Stream:
        gate_up = self.gate_up_proj(layer, x_TH, scale_T1)
        inner_TI, scale = silu_mul(gate_up, self.down_proj.quantized)
        return self.down_proj.onto(layer, residual_TH, inner_TI, scale, self.shard)


class Layers(nn.Module):
    """All pre-norm decoder layers."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        self.eps, self.shard = config.rms_norm_eps, shard
        self.input_layernorm = RMSNorm(config.num_layers, config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.num_layers, config.hidden_size)
        self.mlp = MLP(config, shard)

    def forward(self, layer: int, stream: Stream, attend: Attend) -> Stream:
        """One of them. The residual that comes in may change in place."""
        qkv_proj, o_proj, mlp = self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp
        residual, x_TH, scale = stream.norm(self.input_layernorm.weight[layer], self.eps, qkv_proj.quantized)
        rows, scale = attend(qkv_proj(layer, x_TH, scale))
        stream = o_proj.onto(layer, residual, rows, scale, self.shard)
        weight = self.post_attention_layernorm.weight[layer]
        return mlp(layer, *stream.norm(weight, self.eps, mlp.gate_up_proj.quantized))

    def store(
        self, layer: int, stream: Stream, rotation: Rotation, pools: Pools, slot_T: Tensor, scales: Scales = UNSCALED
    ) -> None:
        """Nothing but a layer's keys and values, put in their slots: all that the last layer's early tokens owe."""
        attention = self.self_attn
        _, x_TH, scale = stream.norm(self.input_layernorm.weight[layer], self.eps, attention.qkv_proj.quantized)
        kv = attention.qkv_proj(layer, x_TH, scale, attention.q_size)
        attention.place(layer, kv, rotation, pools, slot_T, 0, scales)


class Qwen3(nn.Module):
    """The network without its beams: tokens -> stream -> layers -> hidden states -> float32 logits.

    In a shard `config` is the part's, but embedding and head are whole. Hidden states and logits are the same on all
    ranks.
    """

    def __init__(self, config: ModelConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.kv_scales: tuple[Scales, ...] = ()
        """Those of each layer that the checkpoint has, for float8 pages."""
        self.embed_tokens = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        self.rotary = Rotary(config.rope, config.head_dim)
        self.layers = Layers(config, shard)
        self.norm = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.lm_head = (
            None
            if config.tied_head
            else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size), requires_grad=False)
        )

    @property
    def head_VH(self) -> Tensor:
        """Rows of the output projection: the embedding where the checkpoint ties them."""
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def embed(self, tokens_T: Tensor) -> Stream:
        """What enters the first layer."""
        return Stream(F.embedding(tokens_T, self.embed_tokens), None)

    def rotation(self, positions_T: Tensor) -> Rotation:
        """The rows' rotation by their positions."""
        return Rotation(*self.rotary(positions_T))

    def hidden(self, stream: Stream) -> Tensor:
        """Hidden states after the final norm, [T, H]."""
        return stream.norm(self.norm, self.config.rms_norm_eps, False)[1]

    def logits(self, hidden_RH: Tensor, head_VH: Tensor | None = None) -> Tensor:
        """Float32 logits over the vocabulary, [R, V], or over the rows of a smaller head. Ranks share the work."""
        head_VH = self.head_VH if head_VH is None else head_VH
        if self.shard.size == 1:
            return float32_linear(hidden_RH, head_VH)
        V = head_VH.shape[0]
        part = self.shard.part(V)
        own_RV = float32_linear(hidden_RH, head_VH[part.first : part.first + part.size])
        return self.shard.joined(own_RV, V, part.room)
