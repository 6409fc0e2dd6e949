"""Beams that are a sample: sequences drawn without replacement, by the Gumbel-top-k trick along the tree.

Stochastic beam search (Kool, van Hoof and Welling 2019): each sequence's log-probability gets Gumbel noise, and those
with the largest sums are a sample without replacement. A node's perturbed log-probability is the largest of the
sequences below it, so that from the root down the children of a node are noised on condition of their maximum, and the
best `width` nodes of a level hold the best `width` sequences.

The distribution that is sampled is the model's over what is legal: a row's legal children share its probability, as if
tokens were drawn one by one. `share` is the logarithm of that, `key` is it with noise; scores are left alone. The
root's key is 0: what the largest key is says nothing about whose it is.

Letters: R rows, M candidates, V vocabulary, N columns of E tokens, C chosen columns, B requests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from widebeam.engine.noise import child_key, conditioned, gumbel, mix
from widebeam.engine.state import BeamState, Noise


class NoisyRows(NamedTuple):
    """The rows of a level."""

    asks_R: Tensor  # bool, whether their request wants a sample
    key_R: Tensor  # float32, log-probability with noise
    share_R: Tensor  # float32, cumulative log-probability among what is legal
    path_R: Tensor  # int64, hash of the seed and the tokens so far


class Columns(NamedTuple):
    """Columns of the vocabulary as a level of the tree between a row and its tokens."""

    key_RN: Tensor  # float64
    lse_R: Tensor  # float32, over the tokens that are legal


def noisy_rows(state: BeamState, noise: Noise, request_R: Tensor) -> NoisyRows:
    """What the last level left; at the first, a root for each request."""
    R, first = len(request_R), state.level == 0
    return NoisyRows(
        noise.asks_B1[request_R] > 0,
        torch.where(first, 0.0, state.key_R[:R]),
        torch.where(first, 0.0, state.share_R[:R]),
        torch.where(first, mix(noise.seed_B1[request_R]), state.hash_R[:R]),
    )


def put_noise(
    state: BeamState, rows: NoisyRows, key_R: Tensor, share_R: Tensor, row_R: Tensor, token_R: Tensor
) -> None:
    """Leave it for the next level, whose rows come from these."""
    R = len(key_R)
    state.key_R[:R].copy_(key_R)
    state.share_R[:R].copy_(share_R)
    state.hash_R[:R].copy_(child_key(rows.path_R[row_R], token_R))


def children_keys(rows: NoisyRows, score_M: Tensor, share_M: Tensor, row_M: Tensor, token_M: Tensor) -> Tensor:
    """Keys of catalog candidates, float32; where a request wants no sample, their scores."""
    noised_M = _noised(share_M, score_M, child_key(rows.path_R[row_M], token_M))
    most_R = noised_M.new_full(rows.key_R.shape, -torch.inf).scatter_reduce(0, row_M, noised_M, "amax")
    key_M = conditioned(noised_M, most_R[row_M], rows.key_R[row_M].double())
    return torch.where(rows.asks_R[row_M], key_M.float(), score_M)


def column_keys(rows: NoisyRows, lse_RN: Tensor, vocab_size: int) -> Columns:
    """Noise for columns of tokens, each with the probability of them all: there are far fewer than tokens."""
    lse_R = lse_RN.logsumexp(-1)
    share_RN = rows.share_R[:, None] + (lse_RN - lse_R[:, None])
    number_N = torch.arange(lse_RN.shape[1], device=lse_RN.device) + vocab_size  # those before are tokens
    noised_RN = _noised(share_RN, lse_RN, child_key(rows.path_R[:, None], number_N))
    most_R1 = noised_RN.amax(1, keepdim=True)
    return Columns(conditioned(noised_RN, most_R1, rows.key_R[:, None].double()), lse_R)


def token_keys(
    rows: NoisyRows, columns: Columns, pick_C: Tensor, score_CE: Tensor, share_CE: Tensor, row_CE: Tensor,
    token_CE: Tensor,
) -> Tensor:  # fmt: skip
    """Keys of the tokens of chosen columns; where a request wants no sample, their scores."""
    noised_CE = _noised(share_CE, score_CE, child_key(rows.path_R[row_CE], token_CE))
    parent_C1 = columns.key_RN.flatten()[pick_C][:, None]
    key_CE = conditioned(noised_CE, noised_CE.amax(1, keepdim=True), parent_C1)
    return torch.where(rows.asks_R[row_CE], key_CE.float(), score_CE)


def _noised(share: Tensor, score: Tensor, key: Tensor) -> Tensor:
    """Log-probability plus noise, float64; -inf where the score is, or is no number."""
    return torch.where(score > -torch.inf, share.double() + gumbel(key), -torch.inf)
