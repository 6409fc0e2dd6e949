"""From hidden states to candidates: head, normaliser, legality.

Letters: R rows, H hidden, V vocabulary, E tokens of a column, N columns, C codes of a level's codebook (or chosen
columns), M candidates in all.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from widebeam.constraints.trie import DeviceTrie
from widebeam.engine.request import Normalizer
from widebeam.engine.selection import Candidates, compact, exclusive_cumsum, order_by_segment, row_top
from widebeam.model.qwen3 import Qwen3

LOGITS_AT_ONCE = 1 << 26
"""Elements of a [rows, V] block of which only the log-sum-exp is kept (256 MiB of float32)."""


def vocabulary_candidates(
    model: Qwen3,
    hidden_RH: Tensor,
    cum_R: Tensor,
    request_R: Tensor,
    limit_B1: Tensor,
    offered: int,
    num_columns: int,
) -> tuple[Candidates, Tensor]:
    """Any token may follow; each request's best `limit` are among the candidates returned, with the rows' log-sum-exp.

    Sorting [R, V] would cost more than the network. So the vocabulary is cut in N = V / E columns of E tokens: only a
    request's `limit` best columns, ranked by their best token, can hold one of its `limit` best tokens, because a token
    of any other column stands behind the best of each of those. `offered` bounds `limit` of a single request,
    `num_columns` the sum over all.
    """
    logits_RV = model.logits(hidden_RH)
    lse_R = logits_RV.logsumexp(-1)
    V = logits_RV.shape[1]
    E = column_height(V)
    N = -(-V // E)
    if E * N > V:
        logits_RV = F.pad(logits_RV, (0, E * N - V), value=-torch.inf)
    blocks = [block.split(_rows_at_once(E * N)) for block in (logits_RV, lse_R, cum_R)]
    best = [
        _best_of_columns(cum[:, None] + (logits - lse[:, None]), E) for logits, lse, cum in zip(*blocks, strict=True)
    ]
    best_RN, token_RN = (torch.cat(parts) for parts in zip(*best, strict=True))
    score_Rk, place_Rk = row_top(best_RN, token_RN, min(offered, N))

    row_Q = torch.arange(cum_R.shape[0], device=cum_R.device).repeat_interleave(score_Rk.shape[1])
    ordered = order_by_segment(score_Rk.flatten(), request_R[row_Q], limit_B1.shape[0] - 1)
    rank_Q = torch.arange(row_Q.shape[0], device=cum_R.device) - ordered.start_S[ordered.segment_M]
    wanted_Q = rank_Q < limit_B1[ordered.segment_M]
    dest_Q = exclusive_cumsum(limit_B1)[ordered.segment_M] + rank_Q
    pick_C, real_C = compact(wanted_Q, dest_Q, ordered.order_M, num_columns)

    row_CE = row_Q[pick_C][:, None].expand(-1, E)
    token_CE = torch.arange(E, device=cum_R.device) * N + place_Rk.flatten()[pick_C][:, None]
    logprob_CE = logits_RV[row_CE, token_CE] - lse_R[row_CE]
    score_CE = torch.where(real_C[:, None], cum_R[row_CE] + logprob_CE, -torch.inf)
    by_position = (row_CE * V + token_CE).flatten().argsort()
    score_M, logprob_M, row_M, token_M = (
        array.flatten()[by_position] for array in (score_CE, logprob_CE, row_CE, token_CE)
    )
    return Candidates(score_M, logprob_M, row_M, token_M, torch.zeros_like(token_M)), lse_R


def _best_of_columns(total_RV: Tensor, E: int) -> tuple[Tensor, Tensor]:
    """Score and token of the best in each column (first of equals): column n holds tokens n, n + N, n + 2 N, .."""
    total_REN = total_RV.unflatten(1, (E, -1))
    which_RN = total_REN.argmax(1)
    N = total_REN.shape[2]
    return total_REN.gather(1, which_RN[:, None]).squeeze(1), which_RN * N + torch.arange(N, device=total_RV.device)


def column_height(vocab_size: int) -> int:
    """Tokens in a column: near the square root of the vocabulary, which balances both sorts.

    The largest divisor up to there, so that no padding is needed; the root itself where that would be far smaller.
    """
    root = math.isqrt(vocab_size)
    divisor = max(e for e in range(1, root + 1) if vocab_size % e == 0)
    return divisor if divisor * 4 >= root else root


def _rows_at_once(width: int) -> int:
    """Rows of a block of which only a summary is kept, so that wide beams over a large vocabulary fit in memory."""
    return max(1, LOGITS_AT_ONCE // width)


def catalog_candidates(
    model: Qwen3,
    hidden_RH: Tensor,
    cum_R: Tensor,
    node_R: Tensor,
    trie: DeviceTrie,
    level: int,
    normalizer: Normalizer,
    num_slots: int,
) -> tuple[Candidates, Tensor]:
    """Only children of a row's catalog node may follow: M = `num_slots` candidates, and the rows' log-sum-exp [R].

    Logits come from the head sliced to the level's codebook; only the `vocab` normaliser reads the whole head.
    """
    logits_RC = model.logits(hidden_RH, trie.heads[level])
    row_M, node_M, real_M = trie.expand(node_R, cum_R > -torch.inf, num_slots)
    code_M = trie.code[node_M].long()
    if normalizer == "level":
        lse_R = logits_RC.logsumexp(-1)
    elif normalizer == "legal":
        lse_R = _legal_lse(logits_RC, row_M, code_M, real_M)
    else:
        blocks = hidden_RH.split(_rows_at_once(model.config.vocab_size))
        lse_R = torch.cat([model.logits(block).logsumexp(-1) for block in blocks])
    logprob_M = logits_RC[row_M, code_M] - lse_R[row_M]
    score_M = torch.where(real_M, cum_R[row_M] + logprob_M, -torch.inf)
    return Candidates(score_M, logprob_M, row_M, trie.codebooks[level][code_M], node_M), lse_R


def _legal_lse(logits_RC: Tensor, row_M: Tensor, code_M: Tensor, real_M: Tensor) -> Tensor:
    """Log-sum-exp over each row's legal children, through a mask: a scattered sum of floats would not be repeatable."""
    R, C = logits_RC.shape
    position_M = torch.where(real_M, row_M * C + code_M, R * C)
    legal = torch.zeros(R * C + 1, dtype=torch.bool, device=logits_RC.device).scatter_(0, position_M, real_M)
    return logits_RC.masked_fill(~legal[: R * C].view(R, C), -torch.inf).logsumexp(-1)
