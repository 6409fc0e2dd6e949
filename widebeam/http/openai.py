"""The wire format of OpenAI's chat completions with its extensions. All fields of the OpenAI body are known here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from widebeam.engine.request import Normalizer
from widebeam.http.body import Neutral, known_fields
from widebeam.http.protocol import (
    BeamWidth,
    ChatMessage,
    LengthPenalty,
    Name,
    Priority,
    PromptIds,
    RequestId,
    SearchOptions,
    TimeoutMs,
    Usage,
)
from widebeam.http.sampling import Levels, SamplingFields
from widebeam.policies import PolicySpec

LABELS = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    "cache_salt",
)  # fmt: skip
"""There is no prompt cache."""

_MESSAGE_OFF = "name refusal annotations audio function_call tool_calls reasoning_content"
MESSAGE_NEUTRAL: Neutral = dict.fromkeys(_MESSAGE_OFF.split(), ())
_CHAT_OFF = """
    audio functions moderation prediction stop store tools web_search_options
    early_stopping allowed_token_ids continue_final_message return_meta_info return_token_ids
    include_stop_str_in_output
"""
CHAT_NEUTRAL: Neutral = {
    **dict.fromkeys(_CHAT_OFF.split(), ()),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    "top_logprobs": (0,),
    "min_tokens": (0,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
}


@known_fields(MESSAGE_NEUTRAL)
class OpenAIMessage(ChatMessage, kw_only=True, forbid_unknown_fields=True):
    """A turn as the SDK writes it, with the fields that it leaves empty for plain text."""


class TemplateOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The variables of a chat template that a request may set. Never the template itself."""

    enable_thinking: bool | None = None
    """Qwen3: false starts the answer behind an empty thought."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One chunk holds the whole answer, so usage at the end of the stream is usage throughout."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Padding of chunks; never sent."""


@known_fields(CHAT_NEUTRAL, LABELS)
class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions. Exactly one of `messages` and `input_ids` is given."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    """Echoed. This server has one model."""
    messages: Annotated[list[OpenAIMessage], Meta(min_length=1, max_length=4096)] | None = None
    input_ids: PromptIds | None = None
    """The prompt as token ids; no chat template."""
    max_completion_tokens: Levels | None = None
    """None: `max_tokens`; if that is null too, the depth of the catalog, 128 for beams, else the end of the context."""
    max_tokens: Levels | None = None
    best_of: BeamWidth | None = None
    """Equal to n, or null."""
    chat_template_kwargs: TemplateOptions | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: RequestId | None = None
    policy: PolicySpec | None = None
    catalog: Name | None = None
    normalizer: Normalizer | None = None
    length_penalty: LengthPenalty | None = None
    timeout_ms: TimeoutMs | None = None
    priority: Priority | None = None

    def options(self) -> SearchOptions:
        """The fields that all dialects share (a struct cannot inherit from two)."""
        return SearchOptions(**{name: getattr(self, name) for name in SearchOptions.__struct_fields__})


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any] = []


class Logprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class BeamInfo(msgspec.Struct, kw_only=True):
    """`sglext`: what SGLang adds to a choice."""

    sequence_score: float
    normalizer: Normalizer
    """Over what the score is normalised; SGLang knows only `vocab`."""


class Choice(msgspec.Struct, kw_only=True):
    """One beam; index 0 is the best. In a stream `delta` takes the place of `message`."""

    index: int
    finish_reason: Literal["stop", "length"]
    sglext: BeamInfo
    message: AssistantMessage | UnsetType = UNSET
    delta: AssistantMessage | UnsetType = UNSET
    logprobs: Logprobs | None = None


class ChatResponse(msgspec.Struct, kw_only=True):
    """A completion, or one chunk of a stream. `created` is in Unix seconds."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    warnings: list[str] | UnsetType = UNSET
