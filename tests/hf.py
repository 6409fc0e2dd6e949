"""Hugging Face's own network as the judge: logits of any prefix, teacher-forced scores, its beam search."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@cache
def load(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The checkpoint as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@lru_cache(maxsize=4096)
def logits(folder: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """Float64 logits after the whole of `tokens`, without any cache."""
    with torch.no_grad():
        return load(folder)(torch.tensor([tokens])).logits[0, -1]


def normalised(row: torch.Tensor, among: Sequence[int] | None = None) -> list[float]:
    """Log-probabilities over the whole vocabulary, or over some tokens of it."""
    return (row - (row if among is None else row[list(among)]).logsumexp(-1)).tolist()


def rescore(folder: Path, prompt: Sequence[int], generated: Sequence[int]) -> list[float]:
    """Teacher-forced full-vocabulary log-probability of each generated token, in one float64 pass."""
    tokens = [*prompt, *generated]
    with torch.no_grad():
        rows = load(folder)(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(generated)]
