"""The wire formats of OpenAI's chat completions and completions, extended. All fields of OpenAI's bodies are known."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from widebeam.constraints.filter_spec import Filters
from widebeam.engine.request import LevelBeams, Normalizer, TokenId
from widebeam.http.body import Neutral, known_fields
from widebeam.http.protocol import (
    MAX_PROMPT_IDS,
    BeamWidth,
    CacheSalt,
    ChatMessage,
    LengthPenalty,
    ModelName,
    Name,
    Priority,
    PromptIds,
    RequestId,
    SearchOptions,
    TimeoutMs,
    Usage,
    Version,
)
from widebeam.http.sampling import Levels, SamplingFields, StopString, Thinking
from widebeam.policies import PolicySpec

LABELS = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
)  # fmt: skip
"""There is one prefix cache, to which nobody has to be routed, and which evicts by itself."""

_MESSAGE_OFF = "name refusal annotations audio function_call tool_calls reasoning_content"
MESSAGE_NEUTRAL: Neutral = dict.fromkeys(_MESSAGE_OFF.split(), ())
_OFF = """
    store early_stopping allowed_token_ids return_meta_info return_token_ids lora_path json_schema regex ebnf
    stop_regex structured_outputs return_hidden_states
"""
_NEUTRAL: Neutral = {
    **dict.fromkeys(_OFF.split(), ()),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
}
_CHAT_OFF = "audio functions moderation prediction tools web_search_options continue_final_message"
CHAT_NEUTRAL: Neutral = {
    **_NEUTRAL,
    **dict.fromkeys(_CHAT_OFF.split(), ()),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    "add_generation_prompt": (True,),
}
_COMPLETION_OFF = "echo suffix prompt_logprobs prompt_embeds truncate_prompt_tokens return_tokens_as_token_ids"
COMPLETION_NEUTRAL: Neutral = {**_NEUTRAL, **dict.fromkeys(_COMPLETION_OFF.split(), ())}


@known_fields(MESSAGE_NEUTRAL)
class OpenAIMessage(ChatMessage, kw_only=True, forbid_unknown_fields=True):
    """A turn as the SDK writes it, with the fields that it leaves empty for plain text."""


MAX_MESSAGES = 4096
OpenAIMessages = Annotated[list[OpenAIMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class TemplateOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The variables of a chat template that a request may set. Never the template itself."""

    enable_thinking: bool | None = None
    """Qwen3: false starts the answer behind an empty thought."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Padding of chunks; never sent."""


class OpenAIFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """What both bodies have in common."""

    model: ModelName | None = None
    """Echoed. This server has one model."""
    max_tokens: Levels | None = None
    best_of: BeamWidth | None = None
    """Equal to n, or null."""
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    include_stop_str_in_output: bool | None = None
    """vLLM's name of no_stop_trim."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: RequestId | None = None
    return_beam_details: bool | None = None
    policy: PolicySpec | None = None
    catalog: Name | None = None
    min_catalog_version: Version | None = None
    filters: Filters | None = None
    normalizer: Normalizer | None = None
    length_penalty: LengthPenalty | None = None
    timeout_ms: TimeoutMs | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    extra_key: CacheSalt | None = None
    """SGLang's second salt."""

    @property
    def keeps_stop(self) -> bool:
        return bool(self.no_stop_trim or self.include_stop_str_in_output)

    def options(self) -> SearchOptions:
        """The fields that all dialects share (a struct cannot inherit from two)."""
        return SearchOptions(**{name: getattr(self, name) for name in SearchOptions.__struct_fields__})


TopLogprobs = Annotated[int, Meta(ge=0, le=20)]


@known_fields(CHAT_NEUTRAL, LABELS)
class ChatRequest(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions. Exactly one of `messages` and `input_ids` is given."""

    messages: Annotated[list[OpenAIMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    """Empty is as if not given: OpenAI's SDK sends no body without it."""
    input_ids: PromptIds | None = None
    """The prompt as token ids; no chat template."""
    max_completion_tokens: Levels | None = None
    """None: `max_tokens`; if that is null too, the depth of the catalog, 128 for beams, else the end of the context."""
    chat_template_kwargs: TemplateOptions | None = None
    thinking: Thinking | None = None
    """Needs a catalog."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    """Needs logprobs."""


@known_fields(COMPLETION_NEUTRAL, LABELS)
class CompletionRequest(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions. Without `max_tokens`: 16, or the depth of the catalog."""

    prompt: str | Annotated[list[str | TokenId | PromptIds], Meta(max_length=MAX_PROMPT_IDS)]
    """A text, token ids, or a list of either."""
    logprobs: TopLogprobs | None = None


class TopLogprob(msgspec.Struct, kw_only=True):
    """`bytes` is null for a token that is part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class Logprobs(msgspec.Struct, kw_only=True):
    """Of a chat's choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Of a completion's choice: parallel lists, an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """The most probable tokens and the one that was taken."""
    text_offset: list[int]
    """Where each token begins in the choice's text."""


class ChoiceInfo(msgspec.Struct, kw_only=True):
    """`sglext`: what SGLang adds to a choice, and `items`."""

    sequence_score: float
    normalizer: Normalizer
    """Over what the score is normalised; SGLang knows only `vocab`."""
    items: list[int | str] | UnsetType = UNSET
    """With a catalog: ids of the items that the choice spells."""


class Choice(msgspec.Struct, kw_only=True):
    """One sequence; of beams, index 0 is the best."""

    index: int
    finish_reason: Literal["stop", "length"] | None
    """None in a stream, while a text grows."""
    matched_stop: int | str | None
    """The stop token or string that ended it; null for an item."""
    sglext: ChoiceInfo

    @property
    def score(self) -> float:
        return self.sglext.sequence_score

    @property
    def items(self) -> list[int | str]:
        """Ids of the items that it spells; none without a catalog."""
        return self.sglext.items or []


ROLE = "assistant"


class AssistantMessage(msgspec.Struct, kw_only=True):
    content: str
    role: str | UnsetType = ROLE
    """In a stream with the first part alone."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """In the first choice: what was thought before all of them."""


class ChatChoice(Choice, kw_only=True):
    """In a stream `delta` takes the place of `message`."""

    message: AssistantMessage | UnsetType = UNSET
    delta: AssistantMessage | UnsetType = UNSET
    logprobs: Logprobs | None = None

    @property
    def text(self) -> str:
        said = self.message or self.delta
        return said.content if said else ""


class CompletionChoice(Choice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None = None


class OpenAIResponse(msgspec.Struct, kw_only=True):
    """A completion, or one chunk of a stream. `created` is in Unix seconds."""

    id: str
    created: int
    model: str
    usage: Usage | UnsetType | None = UNSET
    warnings: list[str] | UnsetType = UNSET


class ChatResponse(OpenAIResponse, kw_only=True):
    object: Literal["chat.completion", "chat.completion.chunk"]
    choices: list[ChatChoice]
    beam_details: list[LevelBeams] | UnsetType = UNSET


class CompletionResponse(OpenAIResponse, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    beam_details: list[list[LevelBeams]] | UnsetType = UNSET
    """For each prompt."""
