"""What the two OpenAI routes share: the fields of both bodies, choices, and chunks of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from widebeam.errors import InvalidRequest
from widebeam.http.auth import tenant_salt
from widebeam.http.body import Neutral, refuse_unsupported
from widebeam.http.openai import ChoiceInfo, OpenAIFields, OpenAIResponse, StreamOptions
from widebeam.http.protocol import Usage
from widebeam.http.sequences import Plan, Text, plan_search

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchResult

R = TypeVar("R", bound=OpenAIResponse)


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
        "finish_reason": "length" if text.sequence.finish_reason == "length" else "stop",
        "matched_stop": text.matched,
        "sglext": ChoiceInfo(
            sequence_score=text.sequence.score,
            normalizer=result.normalizer,
            items=UNSET if text.items is None else text.items,
        ),
    }


def chunks(parts: list[R], usage: Usage, options: StreamOptions | None) -> list[R]:
    """The parts as chunks, and if asked for one more with the usage and no choices."""
    options = options or StreamOptions()
    if not options.include_usage:
        return parts
    so_far = usage if options.continuous_usage_stats else None
    told = [msgspec.structs.replace(part, usage=so_far) for part in parts]
    last = msgspec.structs.replace(parts[-1], choices=[], usage=usage, warnings=UNSET, beam_details=UNSET)
    return [*told, last]
