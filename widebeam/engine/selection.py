"""From scores to survivors: pure tensor functions with one total order, on every device.

Order of candidates within a request: score descending, then parent rank ascending, then token id ascending. Scores are
float32 cumulative log-probabilities; a candidate of -inf is illegal or dead. Policies may rank by a key in the place of
the score. Candidates lie request by request, so "segment" means the request that a candidate belongs to; segment B (one
past the last) holds padding.

Letters: M candidates in all, P places for ranked ones, B requests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from widebeam.engine.segment_top import segment_top


class Candidates(NamedTuple):
    """M possible continuations, request by request; among those of a request in order of parent row, then token id."""

    start_B1: Tensor  # int64 [B + 1], where each request's candidates begin
    score_M: Tensor  # float32, cumulative
    logprob_M: Tensor  # float32, of the token alone
    row_M: Tensor  # int64, parent row
    token_M: Tensor  # int64, token id
    node_M: Tensor  # int64, catalog node; 0 without a catalog
    key_M: Tensor | None = None  # float32, what ranks them where that is not the score; -inf where the score is
    share_M: Tensor | None = None  # float32, see stochastic.py


class Ranked(NamedTuple):
    """The best candidates of each request, in the total order. Places that nobody fills are not real."""

    real_P: Tensor  # bool
    segment_P: Tensor  # int64, ascending
    rank_P: Tensor  # int64, within the request
    first_P: Tensor  # int64, place of the request's best
    score_P: Tensor
    logprob_P: Tensor
    row_P: Tensor
    token_P: Tensor
    node_P: Tensor
    key_P: Tensor | None
    share_P: Tensor | None


def rank(found: Candidates, limit_B1: Tensor, places: int) -> Ranked:
    """The best `limit_B1` candidates of each request; the host knows that all of them fit in so many places."""
    start_B1 = found.start_B1
    size_B = (start_B1[1:] - start_B1[:-1]).minimum(limit_B1[:-1])
    key_M = found.score_M if found.key_M is None else found.key_M
    order_P, real_P = segment_top(key_M, start_B1, size_B, places, False)
    size_B1 = torch.cat((size_B, size_B.new_zeros(1)))
    segment_P = group_of(size_B1, places)
    first_P = exclusive_cumsum(size_B1)[segment_P]
    rank_P = torch.arange(places, device=order_P.device) - first_P
    taken = (None if each is None else each[order_P] for each in found[1:])
    return Ranked(real_P, segment_P, rank_P, first_P.clamp_max(places - 1), *taken)  # type: ignore[arg-type]


def exclusive_cumsum(size_S: Tensor) -> Tensor:
    """Where each of consecutive groups of these sizes begins."""
    return size_S.cumsum(0) - size_S


def group_of(size_S: Tensor, num_places: int) -> Tensor:
    """Which of consecutive groups of these sizes each place belongs to; places behind the last group count to it."""
    place = torch.arange(num_places, device=size_S.device)
    return torch.searchsorted(size_S.cumsum(0), place, right=True).clamp_max(size_S.shape[0] - 1)


def count_before(flag_P: Tensor, ranked: Ranked) -> Tensor:
    """How many flagged candidates of the same request stand before each one."""
    count_P = flag_P.cumsum(0) - flag_P.long()
    return count_P - count_P[ranked.first_P]


def compact(keep_M: Tensor, dest_M: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Where each destination's element stands: (index [size], filled [size] bool).

    Destinations of kept elements are distinct and below `size`; those that nobody fills hold index 0.
    """
    dest_M = torch.where(keep_M, dest_M, size)
    index_M = torch.arange(keep_M.shape[0], device=keep_M.device)
    index = dest_M.new_zeros(size + 1).scatter_(0, dest_M, index_M)
    filled = torch.zeros(size + 1, dtype=torch.bool, device=keep_M.device).scatter_(0, dest_M, keep_M)
    return index[:size], filled[:size]
