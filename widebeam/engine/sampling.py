"""Independent texts, drawn token by token: the step that takes the place of `advance` in waves of such requests.

A drawn token is the largest of the bent logits plus Gumbel noise (the Gumbel-max trick). The noise is a hash of the
request's seed, the text's number, the level and the token, so that a seed draws the same texts whatever else is in the
wave. Runs as it is, never compiled.

Letters: B requests, R rows, D texts that still grow, F places of finished texts, J decoded tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from widebeam.engine import noise
from widebeam.engine.advance import note_broken, put_rows
from widebeam.engine.core import Core
from widebeam.engine.noise import child_key, mix
from widebeam.engine.request import Sampling
from widebeam.engine.selection import exclusive_cumsum, group_of
from widebeam.engine.shapes import LevelShape
from widebeam.engine.staging import to_device
from widebeam.engine.state import LENGTH, STOP, BeamState, WaveData
from widebeam.engine.vocabulary import suppress
from widebeam.engine.wave import Wave

ROWS_AT_ONCE = 64
"""Texts that are drawn together: each takes a few copies of a row of logits."""
COLDEST = 1e-30
"""Temperatures below count as this one, by which no logit overflows float32."""


@dataclass
class Draws:
    """How each request of a wave draws, on the device. Last entries are padding."""

    temperature: Tensor  # float64 [B + 1], like the others below
    top_k: Tensor  # int64
    top_p: Tensor
    min_p: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor
    repetition_penalty: Tensor
    min_new_tokens: Tensor  # int64
    seed: Tensor  # int64
    bias_BV: Tensor | None  # float32
    prompt_BV: Tensor | None  # bool, tokens of the prompts, if any is penalised

    def of(self, request_D: Tensor) -> Draws:
        """One entry for each text, [D, 1]; the tables stay."""
        columns = {name: getattr(self, name)[request_D][:, None] for name in COLUMNS}
        return replace(self, **columns)


COLUMNS = [field.name for field in fields(Draws) if not field.name.endswith("_BV")]


def draws_of(wave: Wave, vocab_size: int, device: torch.device) -> Draws:
    """Stage what the requests of a wave ask for."""
    asked = [search.sampling or Sampling() for search in wave.searches]
    filling = [Sampling()] * (wave.requests + 1 - len(asked))

    def column(name: str) -> np.ndarray:
        values = [getattr(one, name) for one in [*asked, *filling]]
        values = [0 if value is None else value for value in values]
        return np.array(values, dtype=np.int64 if name in ("top_k", "min_new_tokens", "seed") else np.float64)

    arrays = {name: column(name) for name in COLUMNS}
    arrays["top_k"] = np.where(arrays["top_k"] == 0, vocab_size, np.minimum(arrays["top_k"], vocab_size))
    biases = [(b, token, bias) for b, one in enumerate(asked) for token, bias in one.logit_bias.items()]
    repeated = [b for b, one in enumerate(asked) if one.repetition_penalty != 1]
    staged = to_device(
        arrays
        | {
            "bias_at": np.array([(b, token) for b, token, _ in biases], dtype=np.int64).reshape(-1, 2),
            "bias": np.array([bias for *_, bias in biases], dtype=np.float64),
            "prompt_b": np.repeat(repeated, [wave.searches[b].num_tokens for b in repeated]).astype(np.int64),
            "prompt": np.concatenate([[], *(wave.searches[b].token_ids for b in repeated)]).astype(np.int64),
        },
        device,
    )
    bias_BV = prompt_BV = None
    if biases:
        bias_BV = torch.zeros(wave.requests + 1, vocab_size, device=device)
        bias_BV[staged["bias_at"][:, 0], staged["bias_at"][:, 1]] = staged["bias"].float()
    if repeated:
        prompt_BV = torch.zeros(wave.requests + 1, vocab_size, dtype=torch.bool, device=device)
        prompt_BV[staged["prompt_b"], staged["prompt"]] = True
    return Draws(**{name: staged[name] for name in arrays}, bias_BV=bias_BV, prompt_BV=prompt_BV)


def sample(core: Core, wave: WaveData, draws: Draws, shape: LevelShape, level: int) -> None:
    """Draw one token for each text that still grows; those that end are put among the finished, the others go on.

    A request's texts keep their order: text i is its row i, and its finished place i.
    """
    state, D = core.state, shape.finished
    going_B1 = level < wave.levels_B1
    first_B1 = exclusive_cumsum(torch.where(going_B1, wave.finished_B1, 0))
    place_D = torch.arange(D, device=first_B1.device)
    request_D = group_of(torch.where(going_B1, wave.finished_B1, 0), D)
    parent_D = request_D if level == 0 else place_D
    live_D = (state.cum_R[parent_D] > -torch.inf) & (request_D < shape.requests)
    token_D, logprob_D, lse_D = _draw(core, wave, draws, request_D, parent_D, place_D - first_B1[request_D], level)
    note_broken(state, request_D, live_D, lse_D)
    cum_D = state.cum_R[parent_D] + logprob_D

    last_D = wave.levels_B1[request_D] - 1 == level
    stop_D = torch.zeros_like(last_D) if wave.stop_BV is None else wave.stop_BV[request_D, token_D]
    ends_D = live_D & (last_D | stop_D)
    reason_D = torch.where(stop_D, STOP, LENGTH)
    _finish(state, wave, shape, level, first_B1, (ends_D, parent_D, token_D, logprob_D, cum_D, reason_D))
    if shape.rows_out:
        width_B1 = torch.where(level < wave.levels_B1 - 1, wave.finished_B1, 0)
        request_R = group_of(width_B1, shape.rows_out)
        place_R = torch.arange(shape.rows_out, device=first_B1.device)
        here_R = (first_B1[request_R] + place_R - exclusive_cumsum(width_B1)[request_R]).clamp_max(D - 1)
        live_R = (live_D & ~ends_D)[here_R] & (request_R < shape.requests)
        put_rows(
            state, shape, width_B1, live_R, parent_D[here_R], token_D[here_R], logprob_D[here_R], cum_D[here_R],
            torch.zeros_like(here_R),
        )  # fmt: skip
    state.level.add_(1)


def _finish(
    state: BeamState, wave: WaveData, shape: LevelShape, level: int, first_B1: Tensor, drawn: tuple[Tensor, ...]
) -> None:
    """Put the texts that ended at this level in their places."""
    F, room_B1 = shape.finished, wave.finished_B1
    request_F = group_of(room_B1, F)
    place_F = torch.arange(F, device=room_B1.device) - exclusive_cumsum(room_B1)[request_F]
    here_F = (first_B1[request_F] + place_F).clamp_max(F - 1)
    ends_F, parent_F, token_F, logprob_F, cum_F, reason_F = (each[here_F] for each in drawn)
    new_F = ends_F & (level < wave.levels_B1[request_F]) & (request_F < shape.requests)
    score_F = cum_F / (level + 1) ** wave.length_penalty_B1[request_F].float()
    old = state.finished.head(F, shape.path_columns)
    new = old._replace(
        score=score_F, cum=cum_F, length=torch.full_like(token_F, level + 1), token=token_F, logprob=logprob_F,
        node=torch.zeros_like(token_F), reason=reason_F, path=state.path_RJ[:, : shape.path_columns][parent_F],
    )  # fmt: skip
    for mine, fresh in zip(old, new, strict=True):
        mine.copy_(torch.where(new_F if mine.ndim == 1 else new_F[:, None], fresh, mine))


def _draw(
    core: Core, wave: WaveData, draws: Draws, request_D: Tensor, parent_D: Tensor, text_D: Tensor, level: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their log-probabilities before anything bent them, and the rows' log-sum-exp."""
    state = core.state
    path_DJ = state.path_RJ[:, :level][parent_D].long()
    generated_DJ = state.token_JR[torch.arange(level, device=path_DJ.device), path_DJ].long()
    parts = []
    for some in torch.arange(len(request_D), device=path_DJ.device).split(ROWS_AT_ONCE):
        request, own = request_D[some], draws.of(request_D[some])
        logits_DV = core.model.logits(state.hidden_RH[parent_D[some]])
        lse_D = logits_DV.logsumexp(-1)
        bent_DV = _penalised(logits_DV, own, request, generated_DJ[some])
        if wave.stop_BV is not None:
            bent_DV = bent_DV.masked_fill(wave.stop_BV[request] & (level < own.min_new_tokens), -torch.inf)
        if wave.special_S is not None:
            bent_DV = suppress(bent_DV, wave.suppressed_B1[request] > 0, wave.special_S)
        token_D = _choose(bent_DV, own, text_D[some], level)
        parts.append((token_D, logits_DV.gather(1, token_D[:, None])[:, 0] - lse_D, lse_D))
    return tuple(map(torch.cat, zip(*parts, strict=True)))  # type: ignore[return-value]


def _penalised(logits_DV: Tensor, own: Draws, request_D: Tensor, generated_DJ: Tensor) -> Tensor:
    """Repetition first, which scales, then frequency and presence, which subtract, then bias."""
    ones = torch.ones_like(generated_DJ, dtype=torch.float32)
    count_DV = torch.zeros_like(logits_DV).scatter_add_(1, generated_DJ, ones)
    seen_DV = count_DV > 0
    repeated_DV = seen_DV if own.prompt_BV is None else seen_DV | own.prompt_BV[request_D]
    factor = own.repetition_penalty.float()
    scaled_DV = torch.where(logits_DV > 0, logits_DV / factor, logits_DV * factor)
    bent_DV = torch.where(repeated_DV, scaled_DV, logits_DV)
    bent_DV = bent_DV - own.frequency_penalty.float() * count_DV - own.presence_penalty.float() * seen_DV
    return bent_DV if own.bias_BV is None else bent_DV + own.bias_BV[request_D]


def _choose(bent_DV: Tensor, own: Draws, text_D: Tensor, level: int) -> Tensor:
    """Temperature, filters, noise; without a temperature the largest."""
    warm_D1 = own.temperature > 0
    tempered_DV = bent_DV / torch.where(warm_D1, own.temperature.clamp_min(COLDEST), 1.0).float()
    kept_DV = filtered(tempered_DV, own.top_k, own.top_p, own.min_p)
    noise_DV = gumbel(own.seed, text_D[:, None], level, bent_DV.shape[1])
    return torch.where(warm_D1, kept_DV + noise_DV, bent_DV).argmax(-1)


def filtered(logits_DV: Tensor, top_k_D1: Tensor, top_p_D1: Tensor, min_p_D1: Tensor) -> Tensor:
    """-inf for what top-k leaves out, then top-p of the rest, then min-p. Equals of the last one kept are kept."""
    sorted_DV = logits_DV.sort(dim=-1, descending=True).values
    place_V = torch.arange(logits_DV.shape[1], device=logits_DV.device)
    among_DV = sorted_DV.masked_fill(place_V >= top_k_D1, -torch.inf)
    mass_DV = among_DV.double().softmax(-1)
    before_DV = mass_DV.cumsum(-1) - mass_DV
    kept_D1 = ((before_DV < top_p_D1) & (place_V < top_k_D1)).sum(-1, keepdim=True).clamp_min(1)
    least_D1 = torch.maximum(sorted_DV.gather(1, kept_D1 - 1), sorted_DV[:, :1] + min_p_D1.log().float())
    return logits_DV.masked_fill(logits_DV < least_D1, -torch.inf)


def gumbel(seed_D1: Tensor, text_D1: Tensor, level: int, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [D, V], float32: a pure function of its arguments."""
    key_D1 = mix(mix(mix(seed_D1) + text_D1) + level)
    return noise.gumbel(child_key(key_D1, torch.arange(vocab_size, device=seed_D1.device))).float()
