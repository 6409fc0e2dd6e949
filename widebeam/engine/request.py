"""What a caller asks of the engine, and what it gets back. Imports no torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from widebeam.config import MAX_BEAM_WIDTH, MAX_LEVELS, Seed
from widebeam.constraints.filter_spec import Filters
from widebeam.policies import PolicySpec

if TYPE_CHECKING:
    from widebeam.constraints.filters import ItemMask

Normalizer = Literal["vocab", "level", "legal"]
FinishReason = Literal["stop", "length", "item"]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

NO_CATALOG = "none"
"""Catalog name that switches the constraint off for one request."""


MAX_TOP_LOGPROBS = 128
MAX_TTL_S = 3600
MAX_VERSION = 2**53
"""Of catalogs: what every reader of JSON has exactly."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of a text are drawn. In this order: repetition, frequency and presence penalty, bias, temperature,
    top-k, top-p of the rest, min-p. Reported log-probabilities are the model's own, before any of these."""

    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    """0: the most probable token."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Tokens less probable than this share of the most probable one are left out."""
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Taken from a logit for each time that its token was generated."""
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Taken once if its token was generated."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    """Divides a positive logit and multiplies a negative one, if its token is in the prompt or was generated."""
    logit_bias: dict[TokenId, float] = {}
    """Added to the logits of these tokens."""
    min_new_tokens: Annotated[int, Meta(ge=0, le=MAX_LEVELS)] = 0
    """Until there are so many, no stop token is drawn."""
    seed: Seed | None = None
    """The same seed draws the same texts, whatever else runs. None: others each time."""


class SearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to search. Every field has the meaning that it has on the wire; `Engine.submit` checks them."""

    n: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)] = 1
    """Sequences to return, at most the width of the last level."""
    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    """Beams kept at each level. None or 1 without `policy`: greedy text generation that ends at a stop token."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_LEVELS)] | None = None
    """Levels of the search. None: the depth of the catalog, or 128 without one."""
    policy: PolicySpec | None = None
    """Beam width per level; None: `fixed` at `beam_width`."""
    catalog: str | None = None
    """Name of the catalog whose items are legal. None: the only one, if there is one. "none": any token."""
    min_catalog_version: Annotated[int, Meta(ge=0, le=MAX_VERSION)] | None = None
    """Answer from this version of the catalog or a newer one, or not at all (CatalogVersionNotReady)."""
    filters: Filters | None = None
    """Which items of the catalog may be returned. Only beams that lead to one are kept, at unchanged scores."""
    normalizer: Normalizer | None = None
    """Over what a token's probability is normalised. None: `level` with a catalog, else `vocab`."""
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    """sequence score = cumulative log-probability / length ** length_penalty"""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    """Stop tokens beside the model's own. Not used with a catalog, where the item's depth ends a sequence."""
    ignore_eos: bool = False
    """Empty the whole stop set, `stop_token_ids` included, as SGLang does."""
    sampling: Sampling | None = None
    """Draw `n` independent texts. None: beams, or the one text of the most probable tokens. Not with a catalog, a
    policy or a `beam_width` over 1."""
    suppress_special_tokens: bool = False
    """Never generate the tokenizer's special tokens: what NVIDIA's server does under ignore_eos. Not with a catalog,
    whose items decide."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    """For each token of a result, so many of the most probable tokens in its place. Not with the normaliser `legal`."""
    return_beam_details: bool = False
    """Also return all beams that were live after each level."""
    timeout_ms: Annotated[int, Meta(ge=1, le=3_600_000)] | None = None
    """Time from submission after which the answer is no longer wanted."""
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    """Only prompts of equal salts share what was computed for them."""
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)] | None = None
    """Time within which the prompt is likely to come again: until then what was computed for it is evicted last."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Higher goes first, as with SGLang, for as long as nobody else is held up for too long by it."""
    request_id: str | None = None
    """Echoed in the result; made up when missing."""


class Sequence(msgspec.Struct, kw_only=True):
    """One result of a search."""

    token_ids: list[int]
    """Generated tokens, a stop token included."""
    logprobs: list[float]
    """Log-probability of each token under the request's normaliser; their sum is `cum_logprob`."""
    cum_logprob: float
    score: float
    """cum_logprob / len(token_ids) ** length_penalty; results are sorted by it, best first."""
    finish_reason: FinishReason | None
    """stop: ended by a stop token; item: spells a whole SID of the catalog; length: the last level was reached. None:
    it still grows, which only a `Follower` sees."""
    node: int = -1
    """Catalog node that the sequence ends at; -1 without a catalog."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """For each token, the most probable tokens in its place with their log-probabilities, best first, if asked for."""


class LevelBeams(msgspec.Struct, kw_only=True):
    """The beams that were live after a level, best first; of the last level, those that are returned."""

    parents: list[int]
    """Places in the level before; 0 at the first level, whose parent is the prompt."""
    token_ids: list[int]
    scores: list[float]
    """Cumulative log-probabilities."""


class Timing(msgspec.Struct, kw_only=True):
    """Milliseconds of one request's life."""

    queue: float
    prefill: float
    decode: float
    total: float


class SearchResult(msgspec.Struct, kw_only=True):
    """The outcome of one search, best sequence first. May hold fewer than `n`; never a filler or a duplicate."""

    request_id: str
    sequences: list[Sequence]
    prompt_tokens: int
    cached_tokens: int = 0
    """The first of them, which were in the prefix cache."""
    widths: tuple[int, ...]
    """Beams that each level could have at most: as asked, but no more than are legal."""
    normalizer: Normalizer
    catalog: str | None
    """Name of the catalog that the search ran on."""
    catalog_version: int | None
    timing_ms: Timing
    warnings: list[str] = msgspec.field(default_factory=list)
    levels: list[LevelBeams] | None = None
    """Beams by level, if asked for."""
    mask: ItemMask | None = None
    """Items that the filters allow; None: all."""

    @property
    def completion_tokens(self) -> int:
        """Tokens of all returned sequences, as SGLang and OpenAI count them."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


Follower = Callable[[SearchResult], Awaitable[bool]]
"""Sees the texts of a search as they are, between pieces of it: without likely tokens and beams by level. Whether that
is enough: then the search ends, with what was seen last as its result."""
