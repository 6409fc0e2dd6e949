"""POST /v1/chat/completions: beams as choices, best first; or texts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from msgspec import UNSET

from widebeam.errors import InvalidRequest
from widebeam.http.batches import told_as
from widebeam.http.body import decode, json_response, read_body, refuse_unsupported
from widebeam.http.chat_stream import ChatStream
from widebeam.http.choices import check_fields, choice_fields, plan_choices, search_names
from widebeam.http.keys import FACTS, adopt_id, limit_time, served_name, working_engine
from widebeam.http.openai import (
    CHAT_NEUTRAL,
    MESSAGE_NEUTRAL,
    AssistantMessage,
    ChatChoice,
    ChatRequest,
    ChatResponse,
    Logprobs,
    OpenAIMessage,
    TemplateOptions,
    TokenLogprob,
    TopLogprob,
)
from widebeam.http.sequences import Spelling, Text, run_plan, usage
from widebeam.http.stop_strings import UNFINISHED
from widebeam.http.thinking import Thought, think

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchResult, Sequence

_DECODER = msgspec.json.Decoder(ChatRequest)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """One completion object, or with `stream` chunks: of texts as they grow, of beams one that holds all choices."""
    engine = working_engine(request)
    body = decode(_DECODER, await read_body(request))
    _check(body)
    request_id = adopt_id(request, body.rid)
    limit_time(request, body.timeout_ms)
    head = ChatResponse(
        id=request_id,
        object="chat.completion.chunk" if body.stream else "chat.completion",
        created=int(time.time()),
        model=body.model or served_name(request),
        choices=[],
    )
    stream = ChatStream(request, head, body.stream_options) if body.stream else None
    with told_as(_names(body)):
        thought, result, choices = await _run(request, engine, body, request_id, stream)
    used = usage(result)
    if thought is not None:
        used = thought.usage(result)
        request[FACTS].add_earlier(thought.result)
    answer = msgspec.structs.replace(
        head,
        choices=choices,
        usage=used,
        warnings=result.warnings or UNSET,
        beam_details=UNSET if result.levels is None else result.levels,
    )
    if stream is not None:
        return stream.end(answer, used)
    if thought is not None and choices and choices[0].message:
        choices[0].message.reasoning_content = thought.text
    return json_response(answer)


def _names(body: ChatRequest) -> dict[str, str]:
    return search_names(
        body,
        input_ids="messages" if body.input_ids is None else "input_ids",
        max_new_tokens="max_tokens" if body.max_tokens and not body.max_completion_tokens else "max_completion_tokens",
    )


async def _run(
    request: web.Request, engine: Engine, body: ChatRequest, request_id: str, stream: ChatStream | None
) -> tuple[Thought | None, SearchResult, list[ChatChoice]]:
    max_tokens = body.max_completion_tokens or body.max_tokens
    plan = plan_choices(
        request, engine, body, max_new_tokens=max_tokens, top_logprobs=body.top_logprobs or 0, request_id=request_id
    )
    plan.fill_context = max_tokens is None and not plan.beams
    prompt_ids = await _prompt_ids(engine, body)
    thought = await think(request, engine, body, prompt_ids, plan, None if stream is None else stream.said)
    if thought is not None:
        prompt_ids = thought.prompt_ids
    grown = None if stream is None else stream.grown
    result, choices = await run_plan(request, engine, prompt_ids, plan, lambda *found: _choices(body, *found), grown)
    return thought, result, choices


def _check(body: ChatRequest) -> None:
    check_fields(body, CHAT_NEUTRAL)
    check_messages(body.messages or [])
    if bool(body.messages) == (body.input_ids is not None):
        raise InvalidRequest("give exactly one of messages, at least one, and input_ids", param="messages")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs = true", param="top_logprobs")


def check_messages(messages: list[OpenAIMessage]) -> None:
    """Refuse what is not text in a turn, as tool calls."""
    for index, message in enumerate(messages):
        refuse_unsupported(message, MESSAGE_NEUTRAL, f"messages[{index}].")


async def _prompt_ids(engine: Engine, body: ChatRequest) -> list[int]:
    if body.input_ids is not None:
        return body.input_ids
    options = msgspec.to_builtins(body.chat_template_kwargs or TemplateOptions())
    return await engine.render_chat([message.plain() for message in body.messages or []], **options)


def _choices(body: ChatRequest, result: SearchResult, texts: list[Text], spelling: Spelling) -> list[ChatChoice]:
    return [
        ChatChoice(
            message=AssistantMessage(content=text.text),
            logprobs=_logprobs(text.sequence, spelling) if body.logprobs else None,
            **choice_fields(index, text, result),
        )
        for index, text in enumerate(texts)
    ]


def _logprobs(sequence: Sequence, spelling: Spelling) -> Logprobs:
    def entry(token: int, logprob: float) -> TopLogprob:
        text = spelling.token(token)
        return TopLogprob(token=text, logprob=logprob, bytes=None if UNFINISHED in text else list(text.encode()))

    top = sequence.top_logprobs or [[]] * len(sequence.token_ids)
    return Logprobs(
        content=[
            TokenLogprob(
                **msgspec.structs.asdict(entry(token, logprob)), top_logprobs=[entry(*each) for each in others]
            )
            for token, logprob, others in zip(sequence.token_ids, sequence.logprobs, top, strict=True)
        ]
    )
