"""The network's part of a search: prompts through all layers, then the newest token of every row, level by level.

These are the units that get compiled: sizes come as integers, everything else is data in BeamState and WaveData. Each
leaves hidden states in `BeamState.hidden_RH`, where `advance` finds them.

Letters: R rows, B requests, T packed prompt tokens, H hidden, J decoded tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from widebeam.engine.core import Core
from widebeam.engine.state import DecodedRows, PackedPrompts
from widebeam.kv.beam import ancestor_slots
from widebeam.kv.pools import Pools, Scales
from widebeam.model.attention import context_attention, prefill_attention
from widebeam.model.layers import Stream
from widebeam.model.ops import merge_beams, quantize_rows
from widebeam.model.qwen3 import Attend, Attention
from widebeam.model.row_attention import row_attention


class Reuse(NamedTuple):
    """How the rows of prompts see the prefixes before them, which all of these prompts have."""

    plan: int
    """Handle of a ContextPlan over the prefixes' pages."""
    query_rows: int
    """The rows times the parts in which it cuts prefixes."""


def prompt_body(core: Core, prompts: PackedPrompts, plan: int, reuse: Reuse | None = None) -> Stream:
    """Run the packed prompts through all layers but the last, filling ContextKV. `plan` is a PrefillPlan's handle.

    With `reuse` the rows are what follows prefixes whose keys and values are in ContextKV already.
    """
    model = core.model
    position_T, slot_T = prompts.rows(core.context.page_size)
    rotation = model.rotation(position_T)

    attention = model.layers.self_attn

    def attend_in(layer: int) -> Attend:
        def attend(qkv: Tensor) -> tuple[Tensor, Tensor]:
            rows, pools, scales = qkv.shape[0], core.context.pools.of(layer), core.context.scales(layer)
            query_rows = rows if reuse is None else reuse.query_rows
            q, k_TKD = attention.place(layer, qkv, rotation, pools, slot_T, query_rows, scales)
            out_TQD, lse_TQ = prefill_attention(q[:rows], k_TKD, attention.values(qkv), plan)
            if reuse is None:
                return rows_for(attention, out_TQD)
            return _behind_prefixes(core, slot_T, reuse, q, out_TQD, lse_TQ, pools, scales)

        return attend

    stream = model.embed(prompts.tokens_T)
    for layer in range(model.config.num_layers - 1):
        stream = model.layers(layer, stream, attend_in(layer))
    return stream


def prompt_last(core: Core, prompts: PackedPrompts, stream: Stream) -> None:
    """The last layer: every token leaves its keys and values, and only each prompt's last token goes on, to where the
    search starts: it attends to its whole context in ContextKV, itself included.
    """
    model, layer, pools = core.model, core.model.config.num_layers - 1, core.context.pools.of(-1)
    attention, scales = model.layers.self_attn, core.context.scales(layer)
    position_T, slot_T = prompts.rows(core.context.page_size)
    model.layers.store(layer, stream, model.rotation(position_T), pools, slot_T, scales)
    last_B, position_B, slot_B = prompts.last(core.context.page_size)
    rotation = model.rotation(position_B)

    def attend(qkv: Tensor) -> tuple[Tensor, Tensor]:
        q_BQD, _ = attention.place(layer, qkv, rotation, pools, slot_B, qkv.shape[0], scales)
        return row_attention(
            q_BQD, *pools, prompts.pages_BN, prompts.length_B, core.context.page_size, model.config.head_dim**-0.5,
            attention.o_proj.quantized, *scales,
        )  # fmt: skip

    core.state.hidden_RH[prompts.row_B] = model.hidden(model.layers(layer, stream.rows(last_B), attend))
    core.state.start(prompts.num_requests, len(prompts.row_B))


def forward_rows(core: Core, wave: DecodedRows, rows: int, query_rows: int, depth: int, plan: int) -> None:
    """Run the network over the newest token of every row; its keys and values go to BeamKV.

    `query_rows` is `rows` times the parts in which the ContextPlan with the handle `plan` cuts contexts.
    """
    model, state, beams = core.model, core.state, core.beams
    slots_RJ, own_R = ancestor_slots(state.path_RJ[:rows, :depth], state.level, wave.slot_base, wave.slot_stride)
    rotation = model.rotation(wave.context_len_B1[state.request_R[:rows]] + state.level - 1)
    scale, lse_scale = model.config.head_dim**-0.5, core.plans.lse_scale

    attention = model.layers.self_attn

    def attend_in(layer: int) -> Attend:
        """The attention of one layer: its context pages, and its slots of decoded tokens."""

        def attend(qkv: Tensor) -> tuple[Tensor, Tensor]:
            decoded, scales = beams.pools.of(layer), core.context.scales(layer)
            q, _ = attention.place(layer, qkv, rotation, decoded, own_R, query_rows)
            out, lse = context_attention(q, *core.context.pools.of(layer), plan, scales.k)
            quantize = attention.o_proj.quantized
            return merge_beams(q, out, lse, *decoded, slots_RJ, state.level, scale, lse_scale, quantize, scales.v)

        return attend

    stream = model.embed(state.token_R[:rows])
    for layer in range(model.config.num_layers):
        stream = model.layers(layer, stream, attend_in(layer))
    state.hidden_RH[:rows].copy_(model.hidden(stream))


def _behind_prefixes(
    core: Core,
    slot_T: Tensor,
    reuse: Reuse,
    q: Tensor,
    out_TQD: Tensor,
    lse_TQ: Tensor,
    pools: Pools,
    scales: Scales,
) -> tuple[Tensor, Tensor]:
    """Attention over the rows' own prompt merged with that over the prefix before it, as the output projection takes
    it."""
    before, lse_before = context_attention(q, *pools, reuse.plan, scales.k)
    before = before if scales.v == 1 else before * scales.v  # here, since the prompt's own values have no scale
    nothing_TJ = slot_T[:, None][:, :0]
    return merge_beams(
        q, torch.cat((out_TQD, before)), torch.cat((lse_TQ, lse_before)), *pools, nothing_TJ, core.state.level,
        core.model.config.head_dim**-0.5, core.plans.lse_scale, core.model.layers.self_attn.o_proj.quantized,
    )  # fmt: skip


def rows_for(attention: Attention, out_TQD: Tensor) -> tuple[Tensor, Tensor]:
    """Attention output as the output projection takes it."""
    rows = out_TQD.flatten(1)
    if attention.o_proj.quantized:
        return quantize_rows(rows)
    return rows, rows.new_empty(0)
