"""Beams that a policy gives up although there is room for them: too far behind the best, or outside its mass.

Letters: P places of ranked candidates, B requests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from widebeam.engine.selection import Ranked, count_before


class Pruning(NamedTuple):
    """What each request of a wave asks; the last entry is padding. Those who ask nothing have what changes nothing."""

    margin_B1: Tensor  # float64, in cumulative log-probability; inf: any distance
    mass_B1: Tensor  # float64; 1: all of it
    floor_B1: Tensor  # int64, so many stay in any case


def prune(keep_P: Tensor, ranked: Ranked, pruning: Pruning) -> Tensor:
    """Which survivors stay: those within the margin of the best of their request, and the best ones that together have
    the mass, a survivor's mass being exp(score) over the sum of all survivors'."""
    segments = len(pruning.floor_B1)
    segment_P, before_P, score_P = ranked.segment_P, count_before(keep_P, ranked), ranked.score_P.double()
    count_B1 = torch.zeros(segments, dtype=torch.int64, device=keep_P.device)
    count_B1 = count_B1.scatter_add(0, segment_P, keep_P.long())

    def at(chosen_P: Tensor, value_P: Tensor) -> Tensor:
        """The value of each request's chosen place, of which there is one at most."""
        place_P = torch.where(chosen_P, segment_P, segments)
        return value_P.new_zeros(segments + 1).scatter(0, place_P, value_P)[:-1][segment_P]

    first_P, last_P = keep_P & (before_P == 0), keep_P & (before_P == count_B1[segment_P] - 1)
    behind_P = torch.where(keep_P, at(first_P, score_P) - score_P, 0.0)
    weight_P = torch.where(keep_P, (-behind_P).exp(), 0.0)
    upto_P = weight_P.cumsum(0)
    start_P = at(first_P, upto_P - weight_P)
    share_P = (upto_P - weight_P - start_P) / (at(last_P, upto_P) - start_P)
    stays_P = (behind_P <= pruning.margin_B1[segment_P]) & (share_P < pruning.mass_B1[segment_P])
    return keep_P & (stays_P | (before_P < pruning.floor_B1[segment_P]))
