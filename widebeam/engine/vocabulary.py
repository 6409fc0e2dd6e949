"""Logits over the whole vocabulary, of which each rank has some columns; alone it has all.

A column is COLUMN consecutive tokens. Ranks exchange the best of each column and the log-sum-exp of what they have, and
then the logits of single tokens: far less than the logits themselves. All of them get the same bits.

Letters: R rows, H hidden, V vocabulary, N columns, C x E any tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from widebeam.engine.segment_top import column_best
from widebeam.model.layers import float32_linear
from widebeam.model.parallel import Part, Shard
from widebeam.model.qwen3 import Qwen3

COLUMN = 128
"""E: near the root of a Qwen vocabulary, which balances the search for columns and the search inside them."""


@dataclass
class VocabularyLogits:
    """Float32 logits of rows."""

    own: Tensor
    """Of this rank's tokens, [R, of them]."""
    size: int  # V
    part: Part
    shard: Shard

    @classmethod
    def of(cls, model: Qwen3, hidden_RH: Tensor) -> VocabularyLogits:
        """The head over all tokens."""
        head_VH, shard = model.head_VH, model.shard
        if shard.size == 1:
            own = model.logits(hidden_RH)
            return cls(own, own.shape[1], shard.part(own.shape[1]), shard)
        V = head_VH.shape[0]
        part = shard.part(V, COLUMN)
        own = float32_linear(hidden_RH, head_VH[part.first : part.first + part.size])
        return cls(own, V, part, shard)

    def columns(self) -> tuple[Tensor, Tensor]:
        """The best of each column and each row's log-sum-exp: [R, N], [R]."""
        best_RN, lse_R = column_best(self.own, COLUMN)
        if self.shard.size == 1:
            return best_RN, lse_R
        if self.part.spare:
            lse_R = torch.full_like(lse_R, -torch.inf)
        room = self.part.room // COLUMN
        both = self.shard.gather(torch.cat((F.pad(best_RN, (0, room - best_RN.shape[1])), lse_R[:, None]), 1))
        best_RN = both[:, :, :-1].transpose(0, 1).flatten(1)[:, : -(-self.size // COLUMN)]
        return best_RN, both[:, :, -1].double().logsumexp(0).float()

    @property
    def height(self) -> int:
        """E, tokens of a column."""
        return COLUMN

    def column_lse(self) -> Tensor:
        """Log-sum-exp of each column, [R, N]."""
        padded = F.pad(self.own, (0, -self.own.shape[1] % COLUMN), value=-torch.inf)
        lse_RN = padded.unflatten(1, (-1, COLUMN)).logsumexp(-1)
        if self.shard.size == 1:
            return lse_RN
        return self.shard.joined(lse_RN, -(-self.size // COLUMN), self.part.room // COLUMN)

    def at(self, row_CE: Tensor, token_CE: Tensor) -> Tensor:
        """Logits of single tokens."""
        if self.shard.size == 1:
            return self.own[row_CE, token_CE]
        place_CE = token_CE - self.part.first
        mine_CE = (place_CE >= 0) & (place_CE < self.part.size)
        logit_CE = self.own[row_CE, place_CE.clamp(0, self.part.size - 1)]
        return self.shard.largest(torch.where(mine_CE, logit_CE, -torch.inf))

    def without(self, rows_R: Tensor, tokens_S: Tensor) -> VocabularyLogits:
        """With -inf for these tokens in some of the rows, bool [R]."""
        if self.shard.size == 1:
            return replace(self, own=suppress(self.own, rows_R, tokens_S))
        place_S, count = tokens_S - self.part.first, self.part.size
        place_S = torch.where((place_S >= 0) & (place_S < count), place_S, count)  # a column for those of others
        own = suppress(F.pad(self.own, (0, 1)), rows_R, place_S)[:, :count].contiguous()
        return replace(self, own=own)


def suppress(logits_RV: Tensor, suppressed_R: Tensor, special_S: Tensor) -> Tensor:
    """The logits with -inf for special tokens in suppressed rows."""
    special_RS = logits_RV[:, special_S].masked_fill(suppressed_R[:, None], -torch.inf)
    return logits_RV.index_copy(1, special_S, special_RS)
