"""Hugging Face's own beam search, EOS out of play, finds the same sequences in the same order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests import hf, tiny
from widebeam import Engine, SearchParams

FILLER = -1e8
"""Hugging Face pads with repeated rows of such scores when it runs out of candidates."""


def hugging_face_beams(folder: Path, prompt: list[int], width: int, levels: int) -> list[tuple[tuple[int, ...], float]]:
    model = hf.load(folder, torch.float32)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            num_beams=width, num_return_sequences=width, max_new_tokens=levels, min_new_tokens=levels,
            eos_token_id=None, pad_token_id=0, length_penalty=1.0, early_stopping=False,
            return_dict_in_generate=True, output_scores=True, output_logits=False,
        )  # fmt: skip
    rows = out.sequences[:, len(prompt) :].tolist()
    if width == 1:
        forced = [sum(hf.rescore(folder, prompt, row)) / len(row) for row in rows]
        return [(tuple(row), score) for row, score in zip(rows, forced, strict=True)]
    return [
        (tuple(row), score) for row, score in zip(rows, out.sequences_scores.tolist(), strict=True) if score > FILLER
    ]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("width", [1, 4, 64])
async def test_same_beams(kind: str, width: int, tmp_path: Path) -> None:
    folder = tiny.save_checkpoint(tmp_path / kind, kind=kind, scale=0.3, seed=width)
    rng = np.random.default_rng(width)
    async with Engine(str(folder), device="cpu", max_wave_rows=512, max_beam_width=64) as engine:
        for length in (3, 40, 120):
            prompt = rng.integers(0, 60, length).tolist()
            params = SearchParams(n=width, beam_width=width, max_new_tokens=3, ignore_eos=True)
            result = await engine.submit(prompt, params)
            expected = hugging_face_beams(folder, prompt, width, 3)
            assert [tuple(s.token_ids) for s in result.sequences] == [tokens for tokens, _ in expected]
            assert [s.score for s in result.sequences] == pytest.approx([score for _, score in expected], abs=1e-4)
        await engine.check_integrity()
