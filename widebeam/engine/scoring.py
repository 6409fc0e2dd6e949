"""From hidden states to candidates: head, normaliser, legality.

Letters: R rows, H hidden, V vocabulary, E tokens of a column, N columns, C codes of a level's codebook (or chosen
columns), M candidates in all, B requests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from widebeam.constraints.trie import Masks, TrieLevel
from widebeam.engine.diversity import Groups, capped
from widebeam.engine.request import Normalizer
from widebeam.engine.segment_top import segment_top
from widebeam.engine.selection import Candidates
from widebeam.engine.stochastic import NoisyRows, children_keys, column_keys, token_keys
from widebeam.engine.vocabulary import VocabularyLogits
from widebeam.model.qwen3 import Qwen3


def vocabulary_candidates(
    model: Qwen3,
    hidden_RH: Tensor,
    cum_R: Tensor,
    first_row_B1: Tensor,
    limit_B1: Tensor,
    num_columns: int,
    suppressed_R: Tensor | None = None,
    special_S: Tensor | None = None,
    groups: Groups | None = None,
    noisy: NoisyRows | None = None,
) -> tuple[Candidates, Tensor]:
    """Any token may follow, in suppressed rows any but the special ones, which count for the log-sum-exp all the same.
    Each request's best `limit` are among the candidates returned, with the rows' log-sum-exp.

    Sorting [R, V] would cost more than the network. So the vocabulary is cut in N columns of E consecutive tokens: only
    a request's `limit` best columns, ranked by their best token, can hold one of its `limit` best tokens, because a
    token of any other column stands behind the best of each of those. `num_columns` bounds their number in all. Under a
    cap that holds for columns and tokens that are within it: of each first code min(cap, columns ahead) stand before a
    token's column, and min(cap, tokens ahead) before the token, which are no fewer.
    """
    logits = VocabularyLogits.of(model, hidden_RH)
    V, E = logits.size, logits.height
    best_RN, lse_R = logits.columns()
    if suppressed_R is not None and special_S is not None:
        logits = logits.without(suppressed_R, special_S)
        best_RN, _ = logits.columns()
    N = best_RN.shape[1]
    total_RN = numbers(cum_R[:, None] + (best_RN - lse_R[:, None]))
    columns = None if noisy is None else column_keys(noisy, logits.column_lse(), V)
    if noisy is not None and columns is not None:
        living_RN = noisy.asks_R[:, None] & (total_RN > -torch.inf)
        total_RN = torch.where(living_RN, columns.key_RN.float(), total_RN)
    key_M = total_RN.flatten()
    if groups is not None:
        key_M = capped(key_M, groups.at(torch.arange(len(key_M), device=key_M.device) // N))
    limit_B = limit_B1[:-1].minimum((first_row_B1[1:] - first_row_B1[:-1]) * N)
    pick_C, real_C = segment_top(key_M, first_row_B1 * N, limit_B, num_columns, True)

    row_CE = (pick_C // N)[:, None].expand(-1, E)
    token_CE = (pick_C % N)[:, None] * E + torch.arange(E, device=cum_R.device)
    real_CE = real_C[:, None] & (token_CE < V)
    token_CE = token_CE.clamp_max(V - 1)
    logit_CE = logits.at(row_CE, token_CE)
    logprob_CE = logit_CE - lse_R[row_CE]
    score_CE = torch.where(real_CE, numbers(cum_R[row_CE] + logprob_CE), -torch.inf)
    start_B1 = F.pad(limit_B.cumsum(0), (1, 0)) * E
    arrays = [score_CE, logprob_CE, row_CE, token_CE, torch.zeros_like(token_CE)]
    if noisy is not None and columns is not None:
        share_CE = noisy.share_R[row_CE] + (logit_CE - columns.lse_R[row_CE])
        arrays += [token_keys(noisy, columns, pick_C, score_CE, share_CE, row_CE, token_CE), share_CE]
    return Candidates(start_B1, *(array.flatten() for array in arrays)), lse_R


def catalog_candidates(
    model: Qwen3,
    hidden_RH: Tensor,
    cum_R: Tensor,
    node_R: Tensor,
    first_row_B1: Tensor,
    trie: TrieLevel,
    normalizer: Normalizer,
    num_slots: int,
    masks: Masks | None = None,
    place_R: Tensor | None = None,
    noisy: NoisyRows | None = None,
) -> tuple[Candidates, Tensor]:
    """Only children of a row's catalog node may follow: M = `num_slots` candidates, and the rows' log-sum-exp [R].

    With masks, only children that lead to an allowed item; that changes the score of none.

    Logits come from the head's rows for the level's codebook; only the `vocab` normaliser reads the whole head. Codes
    that fill the codebook up are legal nowhere and count in no normaliser.
    """
    logits_RC = model.logits(hidden_RH, model.head_VH[trie.codebook_C])
    row_M, node_M, real_M, end_R = trie.expand(node_R, cum_R > -torch.inf, num_slots)
    code_M = trie.code(node_M)
    if normalizer == "level":
        lse_R = _log_sum_exp(logits_RC.masked_fill(trie.padding_C(), -torch.inf))
    elif normalizer == "legal":
        lse_R = _legal_lse(logits_RC, row_M, code_M, real_M)
    else:
        _, lse_R = VocabularyLogits.of(model, hidden_RH).columns()
    if masks is not None and place_R is not None:
        real_M = real_M & trie.allows(masks, place_R[row_M], node_M)
    logprob_M = logits_RC[row_M, code_M] - lse_R[row_M]
    score_M = torch.where(real_M, numbers(cum_R[row_M] + logprob_M), -torch.inf)
    start_B1 = F.pad(end_R, (1, 0))[first_row_B1]
    found = Candidates(start_B1, score_M, logprob_M, row_M, trie.codebook_C[code_M], node_M)
    if noisy is not None:
        legal_R = _legal_lse(logits_RC, row_M, code_M, real_M)
        share_M = noisy.share_R[row_M] + (logits_RC[row_M, code_M] - legal_R[row_M])
        found = found._replace(key_M=children_keys(noisy, score_M, share_M, row_M, found.token_M), share_M=share_M)
    return found, lse_R


def numbers(score: Tensor) -> Tensor:
    """Scores with -inf for what is not a number; rows that hold such are noted and fail their request."""
    return score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _legal_lse(logits_RC: Tensor, row_M: Tensor, code_M: Tensor, real_M: Tensor) -> Tensor:
    """Log-sum-exp over each row's legal children, through a mask: a scattered sum of floats would not be repeatable."""
    R, C = logits_RC.shape
    position_M = torch.where(real_M, row_M * C + code_M, R * C)
    legal = torch.zeros(R * C + 1, dtype=torch.bool, device=logits_RC.device).scatter_(0, position_M, real_M)
    return _log_sum_exp(logits_RC.masked_fill(~legal[: R * C].view(R, C), -torch.inf))


def _log_sum_exp(logits_RC: Tensor) -> Tensor:
    """Float32, summed in float64: so the order of the sum does not show, and how much a codebook is padded neither."""
    most_R1 = logits_RC.amax(-1, keepdim=True)
    sum_R = (logits_RC - most_R1).exp().double().sum(-1)
    return (most_R1[:, 0].double() + sum_R.log()).float()
