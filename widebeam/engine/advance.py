"""From the hidden states of a level's rows to the next level's rows: score, let sequences finish, keep the best.

Letters: R rows, B requests, M candidates, F finished sequences, J decoded tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from widebeam.constraints.trie import DeviceTrie
from widebeam.engine.core import Core
from widebeam.engine.scoring import catalog_candidates, vocabulary_candidates
from widebeam.engine.selection import (
    Candidates,
    Ordered,
    compact,
    count_before,
    exclusive_cumsum,
    group_of,
    order_by_segment,
)
from widebeam.engine.shapes import LevelShape
from widebeam.engine.state import ITEM, LENGTH, STOP, BeamState, Finished, WaveData


def advance(
    core: Core, wave: WaveData, trie: DeviceTrie | None, shape: LevelShape, level: int, hidden_RH: Tensor
) -> None:
    """Score the rows' continuations, let sequences finish, keep the best of the others as the next level's rows."""
    state, R, B = core.state, shape.rows_in, shape.requests
    cum_R, request_R = state.cum_R[:R], state.request_R[:R]
    last_B1 = state.level == wave.levels_B1 - 1
    limit_B1 = torch.where(last_B1, 1, wave.join_B1) * wave.widths_LB1[state.level].squeeze(0)
    if trie is None:
        found, lse_R = vocabulary_candidates(
            core.model, hidden_RH, cum_R, request_R, limit_B1, shape.offered, shape.candidates
        )
    else:
        found, lse_R = catalog_candidates(
            core.model, hidden_RH, cum_R, state.node_R[:R], trie, level, shape.normalizer, shape.candidates
        )
    _note_broken(state, request_R, cum_R, lse_R)
    found = found._replace(score_M=found.score_M.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))
    ordered = order_by_segment(found.score_M, request_R[found.row_M], B)
    keep_M, finish_M, reason_M = _decide(state, wave, trie, shape, found, ordered, last_B1, limit_B1)
    if shape.finishing:
        _finish(state, wave, shape, found, ordered, finish_M, reason_M)
    if shape.rows_out:
        _next_rows(state, wave, shape, found, ordered, keep_M)
    state.level.add_(1)


def _note_broken(state: BeamState, request_R: Tensor, cum_R: Tensor, lse_R: Tensor) -> None:
    """Mark requests of which a live row has logits that are not numbers; the host fails them."""
    broken_R = (cum_R > -torch.inf) & ~lse_R.isfinite()
    state.broken_B.scatter_reduce_(0, request_R, broken_R.int(), "amax")


def _decide(
    state: BeamState,
    wave: WaveData,
    trie: DeviceTrie | None,
    shape: LevelShape,
    found: Candidates,
    ordered: Ordered,
    last_B1: Tensor,
    limit_B1: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each request's candidates best first, as merged SGLang does: (keep, finish, reason), in sorted order.

    A candidate that can end (stop token, or an item's SID) finishes if fewer than `width` survivors stand before it;
    the others survive until `width` do. Only the best `limit` = join * width candidates are considered; if those hold
    fewer survivors than that, the search of the request ends and its survivors finish as they are. At a request's last
    level the best `width` candidates all finish.
    """
    order, segment = ordered.order_M, ordered.segment_M
    alive_M = found.score_M[order] > -torch.inf
    width_M = wave.widths_LB1[state.level].squeeze(0)[segment]
    rank_M = torch.arange(order.shape[0], device=order.device) - ordered.start_S[segment]
    if not shape.finishing:
        nothing = torch.zeros_like(alive_M)
        return alive_M & (rank_M < width_M), nothing, nothing.long()

    last_M, limit_M = last_B1[segment], limit_B1[segment]
    considered_M = alive_M & (rank_M < limit_M)
    can_end_M, goes_on_M, reason = _ends(wave, trie, shape, found, ordered)
    can_end_M, goes_on_M = can_end_M | last_M, goes_on_M & ~last_M
    survive_M = considered_M & goes_on_M
    before_M = count_before(survive_M, ordered)
    keep_M, finish_M = survive_M & (before_M < width_M), considered_M & can_end_M & (before_M < width_M)
    reason_M = torch.where(last_M & (trie is None), LENGTH, reason)
    if shape.stops:
        starved_M = _starved(wave, shape, considered_M, keep_M, ordered, limit_M, width_M) & ~last_M
        finish_M = finish_M | (keep_M & starved_M)
        reason_M = torch.where(keep_M & starved_M, LENGTH, reason_M)
        keep_M = keep_M & ~starved_M
    return keep_M, finish_M, reason_M


def _ends(
    wave: WaveData, trie: DeviceTrie | None, shape: LevelShape, found: Candidates, ordered: Ordered
) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each candidate may end here and may go on, and why it would end."""
    if trie is not None:
        node_M = found.node_M[ordered.order_M]
        return trie.is_terminal(node_M), trie.has_children(node_M), torch.full_like(node_M, ITEM)
    token_M = found.token_M[ordered.order_M]
    if wave.stop_BV is None:
        stop_M = torch.zeros_like(token_M, dtype=torch.bool)
    else:
        stop_M = wave.stop_BV[ordered.segment_M, token_M]
    return stop_M, ~stop_M, torch.full_like(token_M, STOP)


def _starved(
    wave: WaveData,
    shape: LevelShape,
    considered_M: Tensor,
    keep_M: Tensor,
    ordered: Ordered,
    limit_M: Tensor,
    width_M: Tensor,
) -> Tensor:
    """Whether the request looked at all the candidates that it may and found fewer survivors than its width."""
    per_request = torch.zeros(2, shape.requests + 1, dtype=torch.int64, device=keep_M.device)
    flags = torch.stack((considered_M, keep_M)).long()
    per_request.scatter_add_(1, ordered.segment_M.expand(2, -1), flags)
    considered, kept = per_request[:, ordered.segment_M]
    return (considered == limit_M) & (kept < width_M)


def _next_rows(
    state: BeamState, wave: WaveData, shape: LevelShape, found: Candidates, ordered: Ordered, keep_M: Tensor
) -> None:
    """Write the survivors as the next level's rows. Beams are re-pathed, never copied."""
    R = shape.rows_out
    device = keep_M.device
    width_B1 = torch.where(state.level < wave.levels_B1 - 1, wave.widths_LB1[state.level].squeeze(0), 0)
    offset_B1 = exclusive_cumsum(width_B1)
    dest_M = offset_B1[ordered.segment_M] + count_before(keep_M, ordered)
    pick_R, live_R = compact(keep_M, dest_M, ordered.order_M, R)
    row_R = torch.arange(R, device=device)
    parent_R, token_R = found.row_M[pick_R], torch.where(live_R, found.token_M[pick_R], 0)
    path_RJ = state.path_RJ[:, : shape.path_columns]
    here_J = torch.arange(path_RJ.shape[1], device=device) == state.level
    path_RJ[:R].copy_(torch.where(here_J, row_R[:, None].int(), path_RJ[parent_R]))
    state.cum_R[:R].copy_(torch.where(live_R, found.score_M[pick_R], -torch.inf))
    state.token_R[:R].copy_(token_R)
    state.node_R[:R].copy_(torch.where(live_R, found.node_M[pick_R], 0))
    state.request_R[:R].copy_(group_of(width_B1, R))
    state.token_JR[:, :R].index_copy_(0, state.level, token_R.int()[None])
    state.logprob_JR[:, :R].index_copy_(0, state.level, found.logprob_M[pick_R][None])


def _finish(
    state: BeamState,
    wave: WaveData,
    shape: LevelShape,
    found: Candidates,
    ordered: Ordered,
    finish_M: Tensor,
    reason_M: Tensor,
) -> None:
    """Merge newly ended sequences into each request's finished ones, and keep the best by final score.

    Those that ended at one level differ in score as their cumulative values do, so the first `finished_B1` of them are
    all that can matter. Between equal scores the one that ended earlier stands first.
    """
    F = shape.finished
    old = state.finished.head(F, shape.path_columns)
    offset_B1 = exclusive_cumsum(wave.finished_B1)
    count_M = count_before(finish_M, ordered)
    room_M = wave.finished_B1[ordered.segment_M]
    position_M = torch.arange(finish_M.shape[0], device=finish_M.device)
    dest_M = offset_B1[ordered.segment_M] + count_M
    place_F, new_F = compact(finish_M & (count_M < room_M), dest_M, position_M, F)
    segment_F = group_of(wave.finished_B1, F)
    pick_F = ordered.order_M[place_F]
    length_F = (state.level + 1).expand(F)
    cum_F = found.score_M[pick_F]
    score_F = cum_F / length_F.float() ** wave.length_penalty_B1[segment_F]
    new = Finished(
        score=torch.where(new_F, score_F, -torch.inf),
        cum=cum_F,
        length=length_F,
        token=found.token_M[pick_F],
        logprob=found.logprob_M[pick_F],
        node=found.node_M[pick_F],
        reason=reason_M[place_F],
        path=state.path_RJ[:, : shape.path_columns][found.row_M[pick_F]],
    )
    both = order_by_segment(torch.cat((old.score, new.score)), segment_F.repeat(2), shape.requests)
    rank = torch.arange(2 * F, device=finish_M.device) - both.start_S[both.segment_M]
    keep = rank < wave.finished_B1[both.segment_M]
    best_F, _ = compact(keep, offset_B1[both.segment_M] + rank, both.order_M, F)
    for mine, fresh in zip(old, new, strict=True):
        mine.copy_(torch.cat((mine, fresh))[best_F])
