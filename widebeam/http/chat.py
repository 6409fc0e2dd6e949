"""POST /v1/chat/completions: beams as choices, best first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from msgspec import UNSET

from widebeam.errors import InvalidRequest
from widebeam.http.body import decode, event_stream, json_response, read_body, refuse_unsupported
from widebeam.http.keys import METRICS, adopt_id, served_name, working_engine
from widebeam.http.openai import (
    CHAT_NEUTRAL,
    MESSAGE_NEUTRAL,
    AssistantMessage,
    BeamInfo,
    ChatRequest,
    ChatResponse,
    Choice,
    Logprobs,
    StreamOptions,
    TemplateOptions,
    TokenLogprob,
)
from widebeam.http.sequences import decode_all, room, search_params, texts, usage

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchResult, Sequence

_DECODER = msgspec.json.Decoder(ChatRequest)


async def chat_completions(request: web.Request) -> web.Response:
    """One completion object, or with `stream` one chunk that holds all beams."""
    engine = working_engine(request)
    body = decode(_DECODER, await read_body(request))
    _check(body)
    request_id = adopt_id(request, body.rid)
    params, beams, warnings = search_params(
        engine,
        body.options(),
        body,
        seed=body.seed,
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        request_id=request_id,
    )
    prompt_ids = await _prompt_ids(engine, body)
    if params.max_new_tokens is None and not beams and engine.catalogs.get(body.catalog) is None:
        params = msgspec.structs.replace(params, max_new_tokens=room(engine, len(prompt_ids)))
    result = await engine.submit(prompt_ids, params)
    request.app[METRICS].observe_search(result)
    answer = ChatResponse(
        id=request_id,
        object="chat.completion",
        created=int(time.time()),
        model=body.model or served_name(request),
        choices=await _choices(engine, result, body),
        usage=usage(result),
        warnings=warnings + result.warnings or UNSET,
    )
    return event_stream(_chunks(answer, body)) if body.stream else json_response(answer)


def _check(body: ChatRequest) -> None:
    refuse_unsupported(body, CHAT_NEUTRAL)
    for index, message in enumerate(body.messages or []):
        refuse_unsupported(message, MESSAGE_NEUTRAL, f"messages[{index}].")
    if (body.messages is None) == (body.input_ids is None):
        raise InvalidRequest("give exactly one of messages and input_ids", param="messages")
    if body.best_of not in (None, body.n or 1):
        raise InvalidRequest("best_of must equal n; set beam_width for a beam wider than n", param="best_of")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream = true", param="stream_options")


async def _prompt_ids(engine: Engine, body: ChatRequest) -> list[int]:
    if body.input_ids is not None:
        return body.input_ids
    options = msgspec.to_builtins(body.chat_template_kwargs or TemplateOptions())
    return await engine.render_chat([message.plain() for message in body.messages or []], **options)


async def _choices(engine: Engine, result: SearchResult, body: ChatRequest) -> list[Choice]:
    contents = await texts(engine, result.sequences, body)
    logprobs: list[Logprobs] | list[None] = [None] * len(contents)
    if body.logprobs:
        logprobs = await _logprobs(engine, result.sequences)
    return [
        Choice(
            index=index,
            message=AssistantMessage(content=contents[index]),
            finish_reason="length" if sequence.finish_reason == "length" else "stop",
            logprobs=logprobs[index],
            sglext=BeamInfo(sequence_score=sequence.score, normalizer=result.normalizer),
        )
        for index, sequence in enumerate(result.sequences)
    ]


async def _logprobs(engine: Engine, sequences: list[Sequence]) -> list[Logprobs]:
    distinct = sorted({token for sequence in sequences for token in sequence.token_ids})
    strings = await decode_all(engine, [[token] for token in distinct], skip_special_tokens=False)
    spelt = dict(zip(distinct, strings, strict=True))
    return [
        Logprobs(
            content=[
                TokenLogprob(token=spelt[token], logprob=logprob, bytes=list(spelt[token].encode()))
                for token, logprob in zip(sequence.token_ids, sequence.logprobs, strict=True)
            ]
        )
        for sequence in sequences
    ]


def _chunks(answer: ChatResponse, body: ChatRequest) -> list[ChatResponse]:
    """One chunk with every beam, then, if asked for, one with the usage alone."""
    options = body.stream_options or StreamOptions()
    usage_so_far = answer.usage if options.continuous_usage_stats else None
    choices = [msgspec.structs.replace(c, message=UNSET, delta=c.message) for c in answer.choices]
    chunk = msgspec.structs.replace(
        answer, object="chat.completion.chunk", choices=choices, usage=usage_so_far if options.include_usage else UNSET
    )
    if not options.include_usage:
        return [chunk]
    return [chunk, msgspec.structs.replace(chunk, choices=[], usage=answer.usage, warnings=UNSET)]
