"""From the hidden states of a level's rows to the next level's rows: score, let sequences finish, keep the best.

Letters: R rows, B requests, M candidates, F finished sequences, J decoded tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from widebeam.constraints.trie import TrieLevel
from widebeam.engine.core import Core
from widebeam.engine.diversity import capped, groups_of_finished, groups_of_rows
from widebeam.engine.pruning import prune
from widebeam.engine.scoring import catalog_candidates, vocabulary_candidates
from widebeam.engine.segment_top import segment_top
from widebeam.engine.selection import Ranked, compact, count_before, exclusive_cumsum, group_of, rank
from widebeam.engine.shapes import LevelShape
from widebeam.engine.state import ITEM, LENGTH, STOP, BeamState, Finished, WaveData
from widebeam.engine.stochastic import NoisyRows, noisy_rows, put_noise


def advance(core: Core, wave: WaveData, trie: TrieLevel | None, shape: LevelShape) -> None:
    """Score the rows' continuations, let sequences finish, keep the best of the others as the next level's rows."""
    state, R = core.state, shape.rows_in
    hidden_RH, cum_R, first_row_B1 = state.hidden_RH[:R], state.cum_R[:R], state.first_row_B1[: shape.requests + 1]
    last_B1 = state.level == wave.levels_B1 - 1
    width_B1 = wave.widths_LB1[state.level].squeeze(0)
    limit_B1 = torch.where(last_B1, width_B1.minimum(wave.finished_B1), wave.join_B1 * width_B1)
    request_R = state.request_R[:R]
    groups = None if wave.cap_B1 is None else groups_of_rows(state, wave.cap_B1, request_R)
    noisy = None if wave.noise is None else noisy_rows(state, wave.noise, request_R)
    if trie is None:
        suppressed_R = None if wave.special_S is None else wave.suppressed_B1[request_R] > 0
        found, lse_R = vocabulary_candidates(
            core.model, hidden_RH, cum_R, first_row_B1, limit_B1, shape.candidates, suppressed_R, wave.special_S,
            groups, noisy,
        )  # fmt: skip
    else:
        found, lse_R = catalog_candidates(
            core.model, hidden_RH, cum_R, state.node_R[:R], first_row_B1, trie, shape.normalizer, shape.candidates,
            wave.masks, None if wave.masks is None else wave.masks.place_B1[request_R], noisy,
        )  # fmt: skip
    note_broken(state, request_R, cum_R > -torch.inf, lse_R)
    if groups is not None:
        key_M = found.score_M if found.key_M is None else found.key_M
        found = found._replace(key_M=capped(key_M, groups.at(found.row_M)))
    ranked = rank(found, limit_B1, shape.ranked)
    keep_P, finish_P, reason_P = _decide(wave, trie, shape, ranked, last_B1, limit_B1, width_B1)
    if wave.pruning is not None:
        keep_P = prune(keep_P, ranked, wave.pruning)
    if shape.finishing:
        _finish(state, wave, shape, ranked, finish_P, reason_P)
    if shape.rows_out:
        _next_rows(state, wave, shape, ranked, keep_P, noisy)
    state.level.add_(1)


def note_broken(state: BeamState, request_R: Tensor, live_R: Tensor, lse_R: Tensor) -> None:
    """Mark requests of which a live row has logits that are not numbers; the host fails them."""
    state.broken_B.scatter_reduce_(0, request_R, (live_R & ~lse_R.isfinite()).int(), "amax")


def _decide(
    wave: WaveData,
    trie: TrieLevel | None,
    shape: LevelShape,
    ranked: Ranked,
    last_B1: Tensor,
    limit_B1: Tensor,
    width_B1: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each request's candidates best first, as merged SGLang does: (keep, finish, reason).

    A candidate that can end (stop token, or an item's SID) finishes if fewer than `width` survivors stand before it;
    the others survive until `width` do. Only the best `limit` = join * width candidates are ranked; if those hold fewer
    survivors than that, the search of the request ends and its survivors finish as they are. At a request's last level
    its best candidates all finish; only greedy text, which is the same as a drawn one, tells a stop token from length.
    """
    width_P = width_B1[ranked.segment_P]
    if not shape.finishing:
        nothing = torch.zeros_like(ranked.real_P)
        return ranked.real_P & (ranked.rank_P < width_P), nothing, nothing.long()

    last_P = last_B1[ranked.segment_P]
    can_end_P, goes_on_P, reason_P = _ends(wave, trie, ranked)
    if trie is None:
        looks_P = wave.join_B1[ranked.segment_P] == 1  # of those with stop tokens, only greedy text
        reason_P = torch.where(last_P & ~(can_end_P & looks_P), LENGTH, reason_P)
    can_end_P, goes_on_P = can_end_P | last_P, goes_on_P & ~last_P
    survive_P = ranked.real_P & goes_on_P
    before_P = count_before(survive_P, ranked)
    keep_P, finish_P = survive_P & (before_P < width_P), ranked.real_P & can_end_P & (before_P < width_P)
    if shape.stops:
        starved_P = _starved(shape, ranked, keep_P, limit_B1, width_B1)[ranked.segment_P] & ~last_P
        finish_P = finish_P | (keep_P & starved_P)
        reason_P = torch.where(keep_P & starved_P, LENGTH, reason_P)
        keep_P = keep_P & ~starved_P
    return keep_P, finish_P, reason_P


def _ends(wave: WaveData, trie: TrieLevel | None, ranked: Ranked) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each candidate may end here and may go on, and why it would end."""
    if trie is not None:
        node_P, masks = ranked.node_P, wave.masks
        place_P = None if masks is None else masks.place_B1[ranked.segment_P]
        ends_P, goes_on_P = trie.is_terminal(node_P, masks, place_P), trie.has_children(node_P, masks, place_P)
        return ends_P, goes_on_P, torch.full_like(node_P, ITEM)
    if wave.stop_BV is None:
        stop_P = torch.zeros_like(ranked.real_P)
    else:
        stop_P = wave.stop_BV[ranked.segment_P, ranked.token_P]
    return stop_P, ~stop_P, torch.full_like(ranked.token_P, STOP)


def _starved(shape: LevelShape, ranked: Ranked, keep_P: Tensor, limit_B1: Tensor, width_B1: Tensor) -> Tensor:
    """Whether each request looked at all the candidates that it may and found fewer survivors than its width."""
    per_request = torch.zeros(2, shape.requests + 1, dtype=torch.int64, device=keep_P.device)
    flags = torch.stack((ranked.real_P, keep_P)).long()
    per_request.scatter_add_(1, ranked.segment_P.expand(2, -1), flags)
    considered_B1, kept_B1 = per_request
    return (considered_B1 == limit_B1) & (kept_B1 < width_B1)


def _next_rows(
    state: BeamState, wave: WaveData, shape: LevelShape, ranked: Ranked, keep_P: Tensor, noisy: NoisyRows | None
) -> None:
    """The survivors are the next level's rows."""
    width_B1 = torch.where(state.level < wave.levels_B1 - 1, wave.widths_LB1[state.level].squeeze(0), 0)
    dest_P = exclusive_cumsum(width_B1)[ranked.segment_P] + count_before(keep_P, ranked)
    pick_R, live_R = compact(keep_P, dest_P, shape.rows_out)
    of_R = (array[pick_R] for array in (ranked.row_P, ranked.token_P, ranked.logprob_P, ranked.score_P, ranked.node_P))
    put_rows(state, shape, width_B1, live_R, *of_R)
    if noisy is not None and ranked.key_P is not None and ranked.share_P is not None:
        of_R = (array[pick_R] for array in (ranked.key_P, ranked.share_P, ranked.row_P, ranked.token_P))
        put_noise(state, noisy, *of_R)


def put_rows(
    state: BeamState,
    shape: LevelShape,
    width_B1: Tensor,
    live_R: Tensor,
    parent_R: Tensor,
    token_R: Tensor,
    logprob_R: Tensor,
    cum_R: Tensor,
    node_R: Tensor,
) -> None:
    """Write the next level's rows, `width_B1` of each request. Beams are re-pathed, never copied."""
    R, level = shape.rows_out, state.level
    row_R = torch.arange(R, device=level.device)
    token_R = torch.where(live_R, token_R, 0)
    path_RJ = state.path_RJ[:, : shape.path_columns]
    here_J = torch.arange(path_RJ.shape[1], device=level.device) == level
    path_RJ[:R].copy_(torch.where(here_J, row_R[:, None].int(), path_RJ[parent_R]))
    state.cum_R[:R].copy_(torch.where(live_R, cum_R, -torch.inf))
    state.token_R[:R].copy_(token_R)
    state.node_R[:R].copy_(torch.where(live_R, node_R, 0))
    state.request_R[:R].copy_(group_of(width_B1, R))
    state.first_row_B1[: shape.requests + 1].copy_(exclusive_cumsum(width_B1))
    state.token_JR[:, :R].index_copy_(0, level, token_R.int()[None])
    state.logprob_JR[:, :R].index_copy_(0, level, logprob_R[None])


def _finish(
    state: BeamState, wave: WaveData, shape: LevelShape, ranked: Ranked, finish_P: Tensor, reason_P: Tensor
) -> None:
    """Merge newly ended sequences into each request's finished ones, and keep the best by final score.

    Those that ended at one level differ in score as their cumulative values do, so the first `finished_B1` of them are
    all that can matter. Between equal scores the one that ended earlier stands first. A sample lies in order of its
    noise, until `flight.unpack` puts it in order of score.
    """
    F, room_B1 = shape.finished, wave.finished_B1
    old = state.finished.head(F, shape.path_columns)
    first_B1 = exclusive_cumsum(room_B1)
    count_P = count_before(finish_P, ranked)
    dest_P = first_B1[ranked.segment_P] + count_P
    pick_F, new_F = compact(finish_P & (count_P < room_B1[ranked.segment_P]), dest_P, F)
    segment_F = group_of(room_B1, F)
    length_F = (state.level + 1).expand(F)
    cum_F = ranked.score_P[pick_F]
    score_F = cum_F / length_F.float() ** wave.length_penalty_B1[segment_F].float()
    new = Finished(
        score=torch.where(new_F, score_F, -torch.inf),
        cum=cum_F,
        length=length_F,
        token=ranked.token_P[pick_F],
        logprob=ranked.logprob_P[pick_F],
        node=ranked.node_P[pick_F],
        reason=reason_P[pick_F],
        path=state.path_RJ[:, : shape.path_columns][ranked.row_P[pick_F]],
    )
    both = Finished(*(torch.cat(pair) for pair in zip(old, new, strict=True)))
    noised_F = None if ranked.key_P is None else ranked.key_P[pick_F]
    key_2F = _final_keys(state, wave, both, noised_F, segment_F.repeat(2))
    best_F, full_F = _best_of_both(key_2F, room_B1)
    for mine, of_both in zip(old, both, strict=True):
        mine.copy_(of_both[best_F])
    if wave.noise is not None:
        state.finished_key_F[:F].copy_(key_2F[best_F])
    old.score.masked_fill_(~full_F, -torch.inf)


def _final_keys(
    state: BeamState, wave: WaveData, both: Finished, noised_F: Tensor | None, segment_2F: Tensor
) -> Tensor:
    """What finished sequences, old and new, are kept by: their score, a sample's noise; -inf beyond a cap."""
    key_2F = both.score
    if wave.noise is not None and noised_F is not None:
        asks_2F = (wave.noise.asks_B1[segment_2F] > 0) & (both.score > -torch.inf)
        key_2F = torch.where(asks_2F, torch.cat((state.finished_key_F[: len(noised_F)], noised_F)), key_2F)
    if wave.cap_B1 is not None:
        key_2F = capped(key_2F, groups_of_finished(state, both, wave.cap_B1, segment_2F))
    return key_2F


def _best_of_both(key_2F: Tensor, room_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the old places (0 .. F - 1) and the new ones (F .. 2 F - 1) each place holds next, and whether any.

    Each request's old ones are laid before its new ones, so that the older of equals stands first.
    """
    places = len(key_2F)
    first_B1 = exclusive_cumsum(room_B1)
    segment_2F = group_of(2 * room_B1, places)
    room_2F = room_B1[segment_2F]
    within_2F = torch.arange(places, device=key_2F.device) - 2 * first_B1[segment_2F]
    source_2F = first_B1[segment_2F] + within_2F + torch.where(within_2F < room_2F, 0, places // 2 - room_2F)
    source_2F = source_2F.clamp_max(places - 1)
    order_F, full_F = segment_top(key_2F[source_2F], 2 * first_B1, room_B1[:-1], places // 2, False)
    return source_2F[order_F], full_F
