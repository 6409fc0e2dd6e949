"""What the beam and sampling fields of SGLang and OpenAI clients mean.

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

from widebeam.config import MAX_LEVELS, Seed
from widebeam.engine.request import Sampling, TokenId
from widebeam.errors import InvalidRequest
from widebeam.http.protocol import BeamWidth
from widebeam.policies import PolicySpec

ALL_TOKENS = 1 << 30  # SGLang's default for top_k
GREEDY_BELOW = 1e-6  # SGLang's threshold of temperature

Levels = Annotated[int, Meta(ge=1, le=MAX_LEVELS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=64)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-1e30, le=1e30)]  # float32, also when divided by the least temperature
MinTokens = Annotated[int, Meta(ge=0, le=MAX_LEVELS)]


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
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=4096)] | None = None
    min_tokens: MinTokens | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    """Each dialect has its own bounds."""
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    suppress_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    @property
    def cold(self) -> bool:
        """The temperature is 0, or as good as that."""
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    @property
    def greedy(self) -> bool:
        """The client asks for the most probable token, so there is nothing to draw."""
        return self.cold or self.top_k == 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(string for string in given if string)

    @property
    def keeps_stop(self) -> bool:
        """What ended the text is shown in it."""
        return bool(self.no_stop_trim)

    def wire_name(self, name: str) -> str:
        """A field as this dialect calls it."""
        return self.__struct_encode_fields__[self.__struct_fields__.index(name)]


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text that is drawn before the search, which goes on behind it. null means the default."""

    max_tokens: Levels | None = None
    """None: as many as there is room for, at most --max-levels."""
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """None: 1."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Seed | None = None
    """The same seed draws the same text. None: another each time."""
    stop: Annotated[str, Meta(min_length=1, max_length=256)] | TokenId | None = None
    """The one token that ends it, and is put behind a text that ends otherwise. None: `</think>`."""
    suffix: Annotated[str, Meta(max_length=1024)] | None = None
    """Text between that token and the item. None: an empty line, as Qwen3's chat template has it."""


class BeamPlan(msgspec.Struct, frozen=True):
    """`width` None: the widths of the policy. Neither beams nor a catalog: `n` texts of one beam each."""

    n: int
    width: int | None
    beams: bool
    """The answer has the form of a beam search, even if it is one beam wide."""
    by_greed: bool = False
    """It is one because nothing is to be drawn: temperature 0 or top_k 1 have had their effect."""


def beam_plan(fields: SamplingFields, policy: PolicySpec | None, catalog_in_use: bool, where: str = "") -> BeamPlan:
    """Beams, or independent texts. Raises InvalidRequest where the fields contradict each other."""
    n = fields.n or 1
    if fields.beam_width is not None and n > fields.beam_width:
        raise InvalidRequest(f"n is {n}, but beam_width is only {fields.beam_width}", param=where + "n")
    beams = policy is not None or bool(fields.use_beam_search) or (fields.beam_width or 1) > 1
    several = not beams and n > 1 and not catalog_in_use
    if several and not fields.greedy:
        return BeamPlan(n, 1, False)
    width = fields.beam_width
    if width is None and (policy is None or policy.widths is None):
        width = n
    return BeamPlan(n, width, beams or n > 1, by_greed=several)


def text_sampling(fields: SamplingFields, vocab_size: int, where: str = "") -> Sampling | None:
    """How to draw a text; None: its tokens are the most probable ones, and nothing bends that."""
    bends = any(_biasing(fields).values()) or bool(fields.min_tokens)
    if fields.greedy and not bends:
        return None
    sampling = Sampling(
        temperature=0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        repetition_penalty=fields.repetition_penalty or 1.0,
        logit_bias=token_bias(fields, vocab_size, where),
        min_new_tokens=fields.min_tokens or 0,
        seed=fields.seed,
    )
    if fields.greedy:
        return sampling
    return msgspec.structs.replace(
        sampling,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=fields.top_p or 1.0,
        top_k=fields.top_k if _cuts_top_k(fields) else None,
        min_p=fields.min_p or 0.0,
    )


def without_effect(fields: SamplingFields, where: str = "", by_greed: bool = False) -> list[str]:
    """Warnings for a search of beams or of a catalog, which ranks by the model's own log-probabilities. `by_greed`: see
    BeamPlan.

    Raises InvalidRequest for what would have to change its result and cannot.
    """
    if fields.min_tokens:
        name = where + fields.wire_name("min_tokens")
        raise InvalidRequest(
            f"{name} is for texts: it does not act on beams or in a catalog", code="unsupported_field", param=name
        )
    if fields.stop_strings:
        raise InvalidRequest(
            f"{where}stop is for texts: beams end at stop_token_ids, items of a catalog at their depth",
            code="unsupported_field",
            param=where + "stop",
        )
    given = {
        "temperature": fields.temperature not in (None, 1.0) and not (by_greed and fields.cold),
        "top_p": fields.top_p not in (None, 1.0),
        "top_k": _cuts_top_k(fields) and not (by_greed and fields.top_k == 1),
        "min_p": bool(fields.min_p),
        **_biasing(fields),
        fields.wire_name("seed"): fields.seed is not None,
    }
    idle = [name for name, asked in given.items() if asked]
    return [f"no effect on a beam search: {', '.join(idle)}"] if idle else []


def token_bias(fields: SamplingFields, vocab_size: int, where: str = "") -> dict[int, float]:
    """`logit_bias` by token id. Raises InvalidRequest for a key that is no id of the vocabulary."""
    bias = {}
    for key, value in (fields.logit_bias or {}).items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 20 else -1
        if str(token) != key or not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{where}logit_bias: {key[:32]!r} is not a token id of the vocabulary of {vocab_size}",
                code="token_out_of_vocabulary",
                param=where + "logit_bias",
            )
        bias[token] = value
    return bias


def _cuts_top_k(fields: SamplingFields) -> bool:
    return fields.top_k is not None and 0 < fields.top_k < ALL_TOKENS


def _biasing(fields: SamplingFields) -> dict[str, bool]:
    """Which of the fields that bend probabilities ask for something."""
    return {
        "frequency_penalty": bool(fields.frequency_penalty),
        "presence_penalty": bool(fields.presence_penalty),
        "repetition_penalty": fields.repetition_penalty not in (None, 1.0),
        "logit_bias": bool(fields.logit_bias),
    }
