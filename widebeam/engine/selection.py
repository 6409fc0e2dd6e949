"""From scores to survivors: pure tensor functions with one total order, on every device.

Order of candidates within a request: score descending, then parent rank ascending, then token id ascending. Scores are
float32 cumulative log-probabilities; a candidate of -inf is illegal or dead. Rows of a wave lie request by request, so
"segment" means the request that a candidate belongs to, and segment B (one past the last) is padding.

Letters: R rows, V vocabulary, K candidates per row, M candidates in all, B requests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Candidates(NamedTuple):
    """M possible continuations. Among equal scores of a request they lie in order of parent row, then token id."""

    score_M: Tensor  # float32, cumulative
    logprob_M: Tensor  # float32, of the token alone
    row_M: Tensor  # int64, parent row
    token_M: Tensor  # int64, token id
    node_M: Tensor  # int64, catalog node; 0 without a catalog


class Ordered(NamedTuple):
    """Candidates sorted by segment and then by the total order."""

    order_M: Tensor  # int64, index into the candidates
    segment_M: Tensor  # int64, ascending
    start_S: Tensor  # int64 [B + 1], where each segment begins (at most M - 1)


def row_top(score_RN: Tensor, tie_RN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Each row's best k by score descending, then tie ascending: (score [R, k], place [R, k]).

    `tie` holds distinct integers of a row, below 2**31. topk promises no order among equal values, so it runs on 64-bit
    keys that hold the score's bits, made monotonic, above the inverted tie: no two keys are equal.
    """
    bits = torch.where(score_RN == 0, 0.0, score_RN).view(torch.int32)  # -0.0 and 0.0 are one score
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    place_Rk = torch.topk((rising << 32) | (0x7FFFFFFF - tie_RN), k, dim=1).indices
    return score_RN.gather(1, place_Rk), place_Rk


def exclusive_cumsum(size_S: Tensor) -> Tensor:
    """Where each of consecutive groups of these sizes begins."""
    return size_S.cumsum(0) - size_S


def group_of(size_S: Tensor, num_places: int) -> Tensor:
    """Which of consecutive groups of these sizes each place belongs to; places behind the last group count to it."""
    place = torch.arange(num_places, device=size_S.device)
    return torch.searchsorted(size_S.cumsum(0), place, right=True).clamp_max(size_S.shape[0] - 1)


def order_by_segment(score_M: Tensor, segment_M: Tensor, num_segments: int) -> Ordered:
    """Sort by segment, then score descending, then position. Two stable sorts keep the positions of equals."""
    best = torch.sort(score_M, descending=True, stable=True).indices
    by_segment = torch.sort(segment_M[best], stable=True)
    start = torch.searchsorted(by_segment.values, torch.arange(num_segments + 1, device=score_M.device))
    return Ordered(best[by_segment.indices], by_segment.values, start.clamp_max(score_M.shape[0] - 1))


def count_before(flag_M: Tensor, ordered: Ordered) -> Tensor:
    """How many flagged candidates of the same segment stand before each one."""
    count_M = flag_M.cumsum(0) - flag_M.long()
    return count_M - count_M[ordered.start_S[ordered.segment_M]]


def compact(keep_M: Tensor, dest_M: Tensor, source_M: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Write `source` of each kept candidate to its destination row: (source [size], filled [size] bool).

    Destinations of kept candidates are distinct and below `size`; rows that nobody fills hold source 0.
    """
    dest_M = torch.where(keep_M, dest_M, size)
    source = source_M.new_zeros(size + 1).scatter_(0, dest_M, source_M)
    filled = torch.zeros(size + 1, dtype=torch.bool, device=source_M.device).scatter_(0, dest_M, keep_M)
    return source[:size], filled[:size]
