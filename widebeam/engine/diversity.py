"""At most so many beams behind one first code: candidates beyond are struck out before the best are taken.

What is taken of the rest is exact: the best `width` of all candidates such that no first code has more than `cap` of
them. A candidate is among those if and only if fewer than `cap` of its first code and fewer than `width` of all that
are not struck out stand before it. No other set within the cap has a larger sum of scores: such sets are a matroid,
where taking the best that still fits is best.

Letters: M candidates in all, R rows, B requests, F finished sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from widebeam.engine.segment_top import MOST
from widebeam.engine.state import BeamState, Finished


class Groups(NamedTuple):
    """Which group each element belongs to, and how many of the group may be taken."""

    group: Tensor  # int64
    cap: Tensor  # int64

    def at(self, index: Tensor) -> Groups:
        return Groups(self.group[index], self.cap[index])


def groups_of_rows(state: BeamState, cap_B1: Tensor, request_R: Tensor) -> Groups:
    """Rows of one request and one first token. Prompts have none yet: of their children each is its own."""
    first_R = state.token_JR[0, state.path_RJ[: len(request_R), 0].long()]
    return Groups(_group(request_R, first_R), torch.where(state.level > 0, cap_B1[request_R], MOST))


def groups_of_finished(state: BeamState, found: Finished, cap_B1: Tensor, request_F: Tensor) -> Groups:
    """Finished sequences of one request and one first token."""
    first_F = torch.where(found.length > 1, state.token_JR[0, found.path[:, 0].long()], found.token)
    return Groups(_group(request_F, first_F), cap_B1[request_F])


def capped(key_M: Tensor, groups: Groups) -> Tensor:
    """The keys, -inf for all but the best `cap` of each group: best by key, then by position."""
    best_M = key_M.sort(descending=True, stable=True).indices
    group_M, order_M = groups.group[best_M].sort(stable=True)
    best_M = best_M[order_M]
    before_M = torch.arange(len(key_M), device=key_M.device) - torch.searchsorted(group_M, group_M)
    kept_M = torch.zeros_like(best_M, dtype=torch.bool).scatter(0, best_M, before_M < groups.cap[best_M])
    return key_M.masked_fill(~kept_M, -torch.inf)


def _group(request: Tensor, first: Tensor) -> Tensor:
    return (request << 32) + first
