"""From hidden states to candidates: head, normaliser, legality.

Letters: R rows, H hidden, V vocabulary, C codes of a level's codebook, K candidates per row, M candidates in all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from widebeam.constraints.trie import DeviceTrie
from widebeam.engine.request import Normalizer
from widebeam.engine.selection import Candidates, row_top
from widebeam.model.qwen3 import Qwen3

LOGITS_AT_ONCE = 1 << 26
"""Elements of a [rows, V] block that exist at a time (256 MiB of float32): bounds memory for wide beams."""


def vocabulary_candidates(model: Qwen3, hidden_RH: Tensor, cum_R: Tensor, k: int) -> tuple[Candidates, Tensor]:
    """Any token may follow: each row offers its best k, all that a joint cut of k can take from it.

    Returns R * k candidates and the rows' log-sum-exp over the vocabulary, [R].
    """
    lses, scores, tokens, logprobs = [], [], [], []
    for hidden, cum in _blocks(model, hidden_RH, cum_R):
        logits = model.logits(hidden)
        lse = logits.logsumexp(-1)
        logprob = logits - lse[:, None]
        score, token = row_top(cum[:, None] + logprob, k)
        lses.append(lse)
        scores.append(score)
        tokens.append(token)
        logprobs.append(logprob.gather(1, token))
    token_M = torch.cat(tokens).flatten()
    row_M = torch.arange(hidden_RH.shape[0], device=hidden_RH.device).repeat_interleave(k)
    candidates = Candidates(
        torch.cat(scores).flatten(), torch.cat(logprobs).flatten(), row_M, token_M, torch.zeros_like(token_M)
    )
    return candidates, torch.cat(lses)


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
        lse_R = torch.cat([model.logits(hidden).logsumexp(-1) for hidden, _ in _blocks(model, hidden_RH, cum_R)])
    logprob_M = logits_RC[row_M, code_M] - lse_R[row_M]
    score_M = torch.where(real_M, cum_R[row_M] + logprob_M, -torch.inf)
    return Candidates(score_M, logprob_M, row_M, trie.codebooks[level][code_M], node_M), lse_R


def _legal_lse(logits_RC: Tensor, row_M: Tensor, code_M: Tensor, real_M: Tensor) -> Tensor:
    """Log-sum-exp over each row's legal children, through a mask: a scattered sum of floats would not be repeatable."""
    R, C = logits_RC.shape
    position_M = torch.where(real_M, row_M * C + code_M, R * C)
    legal = torch.zeros(R * C + 1, dtype=torch.bool, device=logits_RC.device).scatter_(0, position_M, real_M)
    return logits_RC.masked_fill(~legal[: R * C].view(R, C), -torch.inf).logsumexp(-1)


def _blocks(model: Qwen3, hidden_RH: Tensor, cum_R: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Rows in blocks whose full logits fit LOGITS_AT_ONCE."""
    rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    return list(zip(hidden_RH.split(rows), cum_R.split(rows), strict=True))
