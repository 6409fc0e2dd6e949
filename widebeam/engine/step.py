"""The steps of a search on the device, each without a look back at the host: prefill with level 0, and one level more.

These are the units that get compiled: sizes come from LevelShape, everything else is data in BeamState and WaveData.

Letters: R rows, B requests, T packed prompt tokens, Q query heads, K key/value heads, D head size, J decoded tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from widebeam.constraints.trie import DeviceTrie
from widebeam.engine.advance import advance
from widebeam.engine.core import Core
from widebeam.engine.shapes import LevelShape
from widebeam.engine.state import PackedPrompts, WaveData
from widebeam.kv.beam import ancestor_slots
from widebeam.model.attention import context_attention, merge_beam_keys, prefill_attention
from widebeam.model.qwen3 import Attend


def first_step(
    core: Core, wave: WaveData, trie: DeviceTrie | None, shape: LevelShape, prompts: PackedPrompts, plan: int
) -> None:
    """Prefill and level 0 in one."""
    advance(core, wave, trie, shape, 0, prefill(core, prompts, plan, core.programs.step_layer))


def prefill(core: Core, prompts: PackedPrompts, plan: int, run: Callable[..., Tensor]) -> Tensor:
    """Run the packed prompts, filling ContextKV: hidden state at each request's last token, [B, H]."""
    page_T, offset_T = prompts.page_T.clone(), prompts.offset_T.clone()  # a nested region takes no views of one buffer

    def attend_with(k_pages: Tensor, v_pages: Tensor) -> Attend:
        """The attention of one layer, which also puts keys and values on their pages."""

        def attend(q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            k_pages[page_T, offset_T] = k_TKD
            v_pages[page_T, offset_T] = v_TKD
            return prefill_attention(q_TQD, k_TKD, v_TKD, plan)[0]

        return attend

    attends = [attend_with(*pages) for pages in zip(core.context.k, core.context.v, strict=True)]
    return core.model(prompts.tokens_T, prompts.positions_T, attends, prompts.last_B, run)


def level_step(core: Core, wave: WaveData, trie: DeviceTrie | None, shape: LevelShape, level: int, plan: int) -> None:
    """Decode the live rows' newest tokens and select the next rows.

    `level` >= 1 only names the codebook's level; `plan` is the handle of the shape's ContextPlan.
    """
    advance(core, wave, trie, shape, level, forward_rows(core, wave, shape, plan))


def forward_rows(core: Core, wave: WaveData, shape: LevelShape, plan: int) -> Tensor:
    """Run the network over the newest token of every row: [R, H]. Their keys and values go to BeamKV."""
    state, R = core.state, shape.rows_in
    slots_RJ, seen_RJ, own_R = ancestor_slots(
        state.path_RJ[:R, : shape.depth], state.level, wave.slot_base, wave.slot_stride
    )
    positions_R = wave.context_len_B1[state.request_R[:R]] + state.level - 1
    scale = core.model.config.head_dim**-0.5

    def attend_with(k_pages: Tensor, v_pages: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> Attend:
        """The attention of one layer: its context pages, and its slots of decoded tokens."""

        def attend(q_RQD: Tensor, k_RKD: Tensor, v_RKD: Tensor) -> Tensor:
            k_SKD[own_R] = k_RKD  # index_put: the compiler does this in place, where index_copy_ would copy the pool
            v_SKD[own_R] = v_RKD
            out_RQD, lse_RQ = context_attention(q_RQD, k_pages, v_pages, plan)
            return merge_beam_keys(q_RQD, out_RQD, lse_RQ, k_SKD[slots_RJ], v_SKD[slots_RJ], seen_RJ, scale)

        return attend

    context, beams = core.context, core.beams
    attends = [attend_with(*pools) for pools in zip(context.k, context.v, beams.k, beams.v, strict=True)]
    return core.model(state.token_R[:R], positions_R, attends, run=core.programs.step_layer)
