"""What the two OpenAI routes share: the fields of both bodies, choices, and chunks of a stream."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from widebeam.errors import InvalidRequest
from widebeam.http.auth import tenant_salt
from widebeam.http.body import Neutral, refuse_unsupported
from widebeam.http.openai import Choice, ChoiceInfo, OpenAIFields, OpenAIResponse, StreamOptions
from widebeam.http.protocol import Usage
from widebeam.http.sequences import Plan, Text, plan_search, usage
from widebeam.http.streaming import EventStream

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchResult


C = TypeVar("C", bound=Choice)


def check_fields(body: OpenAIFields, neutral: Neutral) -> None:
    """Refuse what the body asks for and nobody has, and what contradicts itself."""
    refuse_unsupported(body, neutral)
    if body.best_of not in (None, 1, body.n or 1):  # 1 is its default, which some clients always send
        raise InvalidRequest("best_of must be 1 or n; set beam_width for a beam wider than n", param="best_of")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream = true", param="stream_options")


def plan_choices(
    request: web.Request,
    engine: Engine,
    body: OpenAIFields,
    *,
    max_new_tokens: int | None,
    top_logprobs: int,
    request_id: str,
) -> Plan:
    """The search of one prompt."""
    return plan_search(
        engine,
        body.options(),
        body,
        max_new_tokens=max_new_tokens,
        top_logprobs=top_logprobs,
        beam_details=bool(body.return_beam_details),
        request_id=request_id,
        cache_salt=tenant_salt(request, body.cache_salt, body.extra_key),
    )


def search_names(body: OpenAIFields, **names: str) -> dict[str, str]:
    """The fields of SearchParams as the body has them, for `told_as`; `names`: what differs between the two routes."""
    width = {} if body.beam_width is not None else {"beam_width": "n"}
    return width | {"min_new_tokens": "min_tokens"} | names


def choice_fields(index: int, text: Text, result: SearchResult) -> dict[str, Any]:
    """The fields of `Choice`."""
    return {
        "index": index,
        "finish_reason": "stop" if text.sequence.finish_reason == "item" else text.sequence.finish_reason,
        "matched_stop": text.matched,
        "sglext": ChoiceInfo(
            sequence_score=text.sequence.score,
            normalizer=result.normalizer,
            items=UNSET if text.items is None else text.items,
        ),
    }


def unended(choice: C) -> C:
    """The choice without how it ended, which the last chunk tells of all."""
    return msgspec.structs.replace(choice, finish_reason=None, matched_stop=None)


class Chunks:
    """The answer as chunks, with usage as `stream_options` asks for it."""

    def __init__(self, request: web.Request, options: StreamOptions | None) -> None:
        self._events, self._options = EventStream(request), options or StreamOptions()
        self._sent: dict[Hashable, tuple[int, int]] = {}
        """Characters and tokens of each choice, and of a text before all of them, that were sent."""
        self._seen: dict[int, SearchResult] = {}
        """How far each prompt is."""

    def new(self, index: Hashable, text: str, tokens: int = 0) -> tuple[str, slice]:
        """What a choice of so much text and so many tokens has that was not sent."""
        characters, before = self._sent.get(index, (0, 0))
        if (len(text), tokens) != (characters, before):
            self._sent[index] = len(text), tokens
        return text[characters:], slice(before, tokens)

    @property
    def lags(self) -> bool:
        """See `EventStream`."""
        return self._events.lags

    def begun(self, index: Hashable) -> bool:
        """Whether anything of a choice was sent."""
        return index in self._sent

    def used(self, prompt: int, so_far: SearchResult) -> Usage:
        """By all prompts that have grown, of which one is there now."""
        self._seen[prompt] = so_far
        return usage(*self._seen.values())

    def send(self, chunk: OpenAIResponse, used: Usage) -> None:
        """`used`: so far."""
        if self._options.include_usage:
            told = used if self._options.continuous_usage_stats else None
            chunk = msgspec.structs.replace(chunk, usage=told)
        self._events.send(chunk)

    def end(self, last: OpenAIResponse, used: Usage) -> web.StreamResponse:
        """`last`: a chunk without choices, for the usage of all."""
        if self._options.include_usage:
            self._events.send(msgspec.structs.replace(last, usage=used))
        return self._events.end()
