"""The native wire format, shared by server and client. Every bound on a search is stated here. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from widebeam.config import MAX_BEAM_WIDTH
from widebeam.constraints.filter_spec import Filters, ItemId
from widebeam.constraints.header import MAX_NAME_LENGTH
from widebeam.engine.request import MAX_TTL_S, MAX_VERSION, Normalizer, Timing, TokenId
from widebeam.engine.results import Item
from widebeam.faults import REQUEST_ID
from widebeam.policies import PolicySpec

MAX_HISTORY = 100_000
MAX_PROMPT_IDS = 1 << 20
MAX_TIMEOUT_MS = 3_600_000

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
ModelName = Annotated[str, Meta(max_length=1024)]
RequestId = Annotated[str, Meta(pattern=REQUEST_ID)]
"""1 to 128 visible ASCII characters, so that it can travel in a header and a log line."""
BeamWidth = Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)]
LengthPenalty = Annotated[float, Meta(ge=-10, le=10)]
TimeoutMs = Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
PromptIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_IDS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
Version = Annotated[int, Meta(ge=0, le=MAX_VERSION)]


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """`{"type": "text", "text": ..}`, the one kind of content part that a text model can read."""

    text: str


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(min_length=1, max_length=1024)]

    def plain(self) -> dict[str, str]:
        """As chat templates take it; text parts are joined by line feeds."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
History = Annotated[list[ItemId], Meta(max_length=MAX_HISTORY)]


class SearchOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every dialect accepts at the top level of its body; the meanings are those of `SearchParams`."""

    policy: PolicySpec | None = None
    catalog: Name | None = None
    min_catalog_version: Version | None = None
    filters: Filters | None = None
    normalizer: Normalizer | None = None
    length_penalty: LengthPenalty | None = None
    """None: 1.0"""
    timeout_ms: TimeoutMs | None = None
    priority: Priority | None = None
    """None: 0. Higher goes first."""


class RecommendRequest(SearchOptions, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/recommend. Exactly one of `history`, `prompt`, `messages` and `input_ids` is given."""

    model: ModelName | None = None
    """Echoed. This server has one model."""
    history: History | None = None
    """Item ids, oldest first; the catalog's template turns them into the prompt."""
    prompt: str | None = None
    messages: Messages | None = None
    input_ids: PromptIds | None = None
    n: BeamWidth = 10
    """Items to return."""
    beam_width: BeamWidth | None = None
    """None: the server's default, and at least n."""
    fields: Annotated[list[Name], Meta(max_length=256)] = []
    """Metadata columns to return with each item."""
    unknown_items: Literal["ignore", "refuse"] = "ignore"
    """What to do with history items that the catalog lacks: leave them out with a warning, or answer 400."""
    exclude_history: bool = False
    """Return no item of the history."""
    cache_salt: CacheSalt | None = None
    """Only prompts of equal salts, and of equal API keys, share what was computed for them."""
    request_id: RequestId | None = None


class PrefillRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/prefill: what of the body of a request that is to come makes its prompt, and for whom."""

    model: ModelName | None = None
    """Not looked at. This server has one model."""
    history: History | None = None
    """Needs a catalog; the other forms do not."""
    prompt: str | None = None
    messages: Messages | None = None
    input_ids: PromptIds | None = None
    catalog: Name | None = None
    """None: the default, if there is one. "none": no catalog, as where a text is to come."""
    min_catalog_version: Version | None = None
    cache_salt: CacheSalt | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)] | None = None
    """Seconds within which it is likely to come; until then what was computed is evicted last."""
    timeout_ms: TimeoutMs | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None


class CatalogRef(msgspec.Struct, kw_only=True):
    name: str
    version: int


class CompletionDetails(msgspec.Struct, kw_only=True):
    """What is part of `completion_tokens`."""

    reasoning_tokens: int


class PromptDetails(msgspec.Struct, kw_only=True):
    """What is part of `prompt_tokens`."""

    cached_tokens: int
    """Not computed again: they were in the prefix cache."""


class Usage(msgspec.Struct, kw_only=True):
    """Token counts; `completion_tokens` is the sum over all returned sequences, and what was thought before them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    """With thinking."""


class RecommendResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/recommend, best item first. `timing_ms` is in milliseconds."""

    id: str
    model: str
    catalog: CatalogRef
    normalizer: Normalizer
    items: list[Item]
    usage: Usage
    timing_ms: Timing
    warnings: list[str]


class PrefillResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/prefill, counts in tokens."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    """Of these, what had been computed before."""
    cacheable_tokens: int
    """Of these, what a request for this prompt need not compute."""
    warnings: list[str]


class ErrorInfo(msgspec.Struct, kw_only=True):
    """`type` is the kind of error (a class of errors.py), `code` the exact reason; both are stable words."""

    message: str
    type: str
    code: str
    param: str | None = None
    request_id: str = ""
    retryable: bool = False
    retry_after_s: float | UnsetType = UNSET
    """What Retry-After rounds up, where the server knows."""


class ErrorBody(msgspec.Struct, kw_only=True):
    """Body of every error of a native route."""

    error: ErrorInfo


class ModelCard(msgspec.Struct, kw_only=True):
    """A model as GET /v1/models lists it; `created` is in Unix seconds, `max_model_len` in tokens."""

    id: str
    created: int
    max_model_len: int
    root: str
    parent: str | None = None
    object: str = "model"
    owned_by: str = "widebeam"


class ModelList(msgspec.Struct, kw_only=True):
    data: list[ModelCard]
    object: str = "list"


class Health(msgspec.Struct, kw_only=True):
    """`status` is the server's state: starting, ready, draining, stopped or dead."""

    status: str
