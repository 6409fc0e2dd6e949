"""What the beam and sampling fields of SGLang and OpenAI clients mean to a beam search.

Beam dialects, in order of precedence:

    beam_width: k, n: m            width k, m sequences (default 1)    SGLang
    use_beam_search: true, n: k    width k, k sequences                vLLM, early SGLang forks
    n: k alone, k > 1              width k, k sequences                GR harnesses

`n` alone asks for beams only where a catalog is in use or the temperature is 0; elsewhere it asks for samples.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from widebeam.config import MAX_LEVELS
from widebeam.engine.request import TokenId
from widebeam.errors import InvalidRequest
from widebeam.http.protocol import BeamWidth
from widebeam.policies import PolicySpec

ALL_TOKENS = 1 << 30  # SGLang's default for top_k
GREEDY_BELOW = 1e-6  # SGLang's threshold of temperature

Levels = Annotated[int, Meta(ge=1, le=MAX_LEVELS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=64)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that SGLang's sampling_params and OpenAI's bodies have in common. null means the default everywhere."""

    n: BeamWidth | None = None
    beam_width: BeamWidth | None = None
    use_beam_search: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=4096)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    @property
    def greedy(self) -> bool:
        """The client asks for the most probable token, so there is nothing to sample."""
        return (self.temperature is not None and self.temperature < GREEDY_BELOW) or self.top_k == 1


class BeamPlan(msgspec.Struct, frozen=True):
    """`width` None: one greedy sequence, or the widths of the policy."""

    n: int
    width: int | None
    beams: bool
    """The answer has the form of a beam search, even if it is one beam wide."""


def beam_plan(fields: SamplingFields, policy: PolicySpec | None, catalog_in_use: bool, where: str = "") -> BeamPlan:
    """Which search the fields ask for. Raises InvalidRequest where they ask for samples or contradict each other."""
    n = fields.n or 1
    if fields.beam_width is not None and n > fields.beam_width:
        raise InvalidRequest(f"n is {n}, but beam_width is only {fields.beam_width}", param=where + "n")
    beams = policy is not None or bool(fields.use_beam_search) or (fields.beam_width or 1) > 1
    if n > 1 and not (beams or catalog_in_use or fields.greedy):
        raise InvalidRequest(
            f"n = {n} asks for {n} samples, which is not supported: set beam_width, use_beam_search or temperature 0",
            code="unsupported_field",
            param=where + "n",
        )
    width = fields.beam_width
    if width is None and (policy is None or policy.widths is None):
        width = n
    return BeamPlan(n, width, beams or n > 1)


def check_sampling(fields: SamplingFields, seed: int | None, beams: bool, where: str = "") -> list[str]:
    """Warnings about fields without effect. Raises InvalidRequest for an effect that is asked for and missing.

    Beams are ranked by the model's own log-probabilities: temperature, top-p, top-k, min-p, penalties, bias and seed do
    not change them.
    """
    shaping = {  # they matter only where a token is drawn
        "temperature": fields.temperature not in (None, 1.0) and not fields.greedy,
        "top_p": fields.top_p not in (None, 1.0),
        "top_k": fields.top_k not in (None, -1, 0, 1) and (fields.top_k or 0) < ALL_TOKENS,
        "min_p": bool(fields.min_p),
    }
    biasing = {
        "frequency_penalty": bool(fields.frequency_penalty),
        "presence_penalty": bool(fields.presence_penalty),
        "repetition_penalty": fields.repetition_penalty not in (None, 1.0),
        "logit_bias": bool(fields.logit_bias),
    }
    if beams:
        idle = [name for name, given in {**shaping, **biasing, "seed": seed is not None}.items() if given]
        return [f"no effect on a beam search: {', '.join(idle)}"] if idle else []
    wanted = biasing if fields.greedy else {**shaping, **biasing}
    for name, given in wanted.items():
        if given:
            raise InvalidRequest(
                f"{where}{name}: sampling is not supported by this server; use temperature 0 or a beam",
                code="unsupported_field",
                param=where + name,
            )
    return [] if fields.greedy else ["decoded greedily, as with temperature 0: sampling is not supported"]
