"""What a caller asks of the engine, and what it gets back. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from widebeam.config import MAX_BEAM_WIDTH, MAX_LEVELS
from widebeam.policies import PolicySpec

Normalizer = Literal["vocab", "level", "legal"]
FinishReason = Literal["stop", "length", "item"]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

NO_CATALOG = "none"
"""Catalog name that switches the constraint off for one request."""


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
    normalizer: Normalizer | None = None
    """Over what a token's probability is normalised. None: `level` with a catalog, else `vocab`."""
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    """sequence score = cumulative log-probability / length ** length_penalty"""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    """Stop tokens beside the model's own. Not used with a catalog, where the item's depth ends a sequence."""
    ignore_eos: bool = False
    """Empty the whole stop set, `stop_token_ids` included, as SGLang does."""
    timeout_ms: Annotated[int, Meta(ge=1, le=3_600_000)] | None = None
    """Time from submission after which the answer is no longer wanted."""
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
    finish_reason: FinishReason
    """stop: ended by a stop token; item: spells a whole SID of the catalog; length: the last level was reached."""
    node: int = -1
    """Catalog node that the sequence ends at; -1 without a catalog."""


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
    normalizer: Normalizer
    catalog: str | None
    """Name of the catalog that the search ran on."""
    catalog_version: int | None
    timing_ms: Timing
    warnings: list[str] = msgspec.field(default_factory=list)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all returned sequences, as SGLang and OpenAI count them."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)
