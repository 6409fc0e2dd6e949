"""Beam search and rescoring over Hugging Face's own network, written plainly: accuracy.py's independent judges.

Every prefix is computed whole, without any cache: right by construction, and only for small cases.

Letters: R rows (beams), V vocabulary, L generated tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

Tokens = tuple[int, ...]
TOKENS_AT_ONCE = 1 << 15
"""Prefix tokens of one forward pass."""
LOGITS_AT_ONCE = 1 << 28
"""Logits of one forward pass."""


class Rules:
    """What may follow what, and over what probabilities are normalised: the vocabulary, or the level's codebook."""

    def __init__(self, sids: np.ndarray | None) -> None:
        """`sids`: token ids [items, levels] of all that is legal; None: any token is."""
        self.books = None if sids is None else [torch.from_numpy(np.unique(column)) for column in sids.T]
        self._children: dict[Tokens, list[int]] = defaultdict(list)
        for level in range(0 if sids is None else sids.shape[1]):
            for *prefix, token in np.unique(sids[:, : level + 1], axis=0).tolist():  # type: ignore[index]
                self._children[tuple(prefix)].append(token)

    def normalised(self, logits_RV: Tensor, level: int) -> Tensor:
        """Float32 log-probabilities [R, V]; -inf outside the codebook."""
        if self.books is None:
            return logits_RV.float().log_softmax(-1)
        book = self.books[level].to(logits_RV.device)
        out_RV = torch.full(logits_RV.shape, -torch.inf, device=logits_RV.device)
        out_RV[:, book] = logits_RV[:, book].float().log_softmax(-1)
        return out_RV

    def legal(self, logprobs_RV: Tensor, prefixes: Sequence[Tokens]) -> Tensor:
        """The same with -inf for what may not follow each prefix."""
        if self.books is None:
            return logprobs_RV
        children = [self._children[prefix] for prefix in prefixes]
        rows = [row for row, tokens in enumerate(children) for _ in tokens]
        places = torch.tensor([rows, [token for tokens in children for token in tokens]], device=logprobs_RV.device)
        out_RV = torch.full_like(logprobs_RV, -torch.inf)
        out_RV[places[0], places[1]] = logprobs_RV[places[0], places[1]]
        return out_RV


class HuggingFace:
    """A checkpoint as transformers runs it."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device).eval()
        self._device = device

    def _logits(self, rows: Sequence[Sequence[int]], keep: int) -> Tensor:
        """Logits at the last `keep` tokens of rows of one length, [R, keep, V]."""
        tokens = torch.tensor(rows, device=self._device)
        vocab = self._model.config.vocab_size
        at_once = max(1, min(TOKENS_AT_ONCE // tokens.shape[1], LOGITS_AT_ONCE // (keep * vocab)))
        parts = [
            self._model(block, use_cache=False, logits_to_keep=keep).logits[:, -keep:]
            for block in tokens.split(at_once)
        ]
        return torch.cat(parts)

    @torch.inference_mode()
    def beams(self, prompt: Sequence[int], width: int, levels: int, rules: Rules) -> list[Tokens]:
        """The best `width` sequences, best first; equals in order of parent, then of token."""
        prefixes: list[Tokens] = [()]
        cum_R = torch.zeros(1, device=self._device)
        for level in range(levels):
            logits_RV = self._logits([[*prompt, *prefix] for prefix in prefixes], 1)[:, 0]
            total_RV = cum_R[:, None] + rules.legal(rules.normalised(logits_RV, level), prefixes)
            V = total_RV.shape[1]
            best, place = total_RV.flatten().sort(descending=True, stable=True)
            cum_R, chosen = best[:width], place[:width][best[:width] > -torch.inf].tolist()
            cum_R = cum_R[: len(chosen)]
            prefixes = [(*prefixes[position // V], position % V) for position in chosen]
        return prefixes

    @torch.inference_mode()
    def scores(self, prompt: Sequence[int], sequences: Sequence[Tokens], rules: Rules) -> list[float]:
        """Mean log-probability of each sequence's tokens, teacher-forced."""
        L = len(sequences[0])
        logits_RLV = self._logits([[*prompt, *sequence] for sequence in sequences], L + 1)[:, :-1]
        tokens_RL = torch.tensor(sequences, device=self._device)
        total_R = torch.zeros(len(sequences), device=self._device)
        for level in range(L):
            logprobs_RV = rules.normalised(logits_RLV[:, level], level)
            total_R += logprobs_RV.gather(1, tokens_RL[:, level : level + 1])[:, 0]
        return (total_R / L).tolist()
