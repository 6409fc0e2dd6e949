"""POST /v1/completions: texts or token ids in, choices out, prompt by prompt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from msgspec import UNSET

from widebeam.http.batches import Prompt, run_all, split_prompts, told_as
from widebeam.http.body import decode, json_response, read_body
from widebeam.http.choices import Chunks, check_fields, choice_fields, plan_choices, search_names, unended
from widebeam.http.keys import adopt_id, limit_time, served_name, working_engine
from widebeam.http.openai import (
    COMPLETION_NEUTRAL,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from widebeam.http.sequences import Plan, Spelling, Text, run_plan, usage
from widebeam.http.stop_strings import text_ends

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchResult

DEFAULT_TOKENS = 16
"""OpenAI's."""
_DECODER = msgspec.json.Decoder(CompletionRequest)


async def completions(request: web.Request) -> web.StreamResponse:
    """One object with the choices of all prompts; with `stream` chunks: of texts as they grow, and when all prompts are
    done one for each."""
    engine = working_engine(request)
    body = decode(_DECODER, await read_body(request))
    check_fields(body, COMPLETION_NEUTRAL)
    prompts, batched = split_prompts(body.prompt, "prompt")
    request_id = adopt_id(request, body.rid)
    limit_time(request, body.timeout_ms)
    head = CompletionResponse(
        id=request_id, created=int(time.time()), model=body.model or served_name(request), choices=[]
    )
    chunks = Chunks(request, body.stream_options) if body.stream else None
    with told_as(search_names(body, input_ids="prompt", max_new_tokens="max_tokens", top_logprobs="logprobs")):
        plan = _plan(request, engine, body, request_id)
        runs = [_run(request, engine, prompt, index, plan, body, chunks, head) for index, prompt in enumerate(prompts)]
        found = await run_all(runs, batched)
    total = usage(*(result for result, _ in found))
    if chunks is None:
        return json_response(msgspec.structs.replace(_filled(head, found), usage=total))
    for result, choices in found:
        chunks.send(_filled(head, [(result, _deltas(chunks, choices, True))]), total)
    return chunks.end(head, total)


def _deltas(chunks: Chunks, choices: list[CompletionChoice], last: bool) -> list[CompletionChoice]:
    """What choices have that was not sent, without those that have nothing new; at last, how all of them ended."""
    deltas = []
    for choice in choices:
        all_of_them = choice.logprobs
        text, new = chunks.new(choice.index, choice.text, len(all_of_them.tokens) if all_of_them else 0)
        logprobs = None
        if all_of_them:
            columns = {name: getattr(all_of_them, name)[new] for name in all_of_them.__struct_fields__}
            logprobs = CompletionLogprobs(**columns)
        if text or last or (logprobs and logprobs.tokens):
            delta = msgspec.structs.replace(choice, text=text, logprobs=logprobs)
            deltas.append(delta if last else unended(delta))
    return deltas


def _plan(request: web.Request, engine: Engine, body: CompletionRequest, request_id: str) -> Plan:
    in_catalog = engine.catalogs.get(body.catalog) is not None
    return plan_choices(
        request,
        engine,
        body,
        max_new_tokens=body.max_tokens or (None if in_catalog else DEFAULT_TOKENS),
        top_logprobs=body.logprobs or 0,
        request_id=request_id,
    )


async def _run(
    request: web.Request,
    engine: Engine,
    prompt: Prompt,
    index: int,
    plan: Plan,
    body: CompletionRequest,
    chunks: Chunks | None,
    head: CompletionResponse,
) -> tuple[SearchResult, list[CompletionChoice]]:
    """The choices of one prompt."""
    first = index * plan.params.n

    def grown(result: SearchResult, choices: list[CompletionChoice]) -> None:
        if chunks is not None and not chunks.lags and (deltas := _deltas(chunks, choices, False)):
            chunks.send(msgspec.structs.replace(head, choices=deltas), chunks.used(index, result))

    prompt_ids = await engine.encode(prompt) if isinstance(prompt, str) else prompt
    return await run_plan(
        request, engine, prompt_ids, plan, lambda *found: _choices(body, first, *found), grown if chunks else None
    )


def _choices(
    body: CompletionRequest, first: int, result: SearchResult, texts: list[Text], spelling: Spelling
) -> list[CompletionChoice]:
    return [
        CompletionChoice(
            text=text.text,
            logprobs=None if body.logprobs is None else _logprobs(text, spelling),
            **choice_fields(first + index, text, result),
        )
        for index, text in enumerate(texts)
    ]


def _logprobs(text: Text, spelling: Spelling) -> CompletionLogprobs:
    sequence = text.sequence
    ends = text_ends(spelling.decode, sequence.token_ids)
    top = []
    for token, logprob, others in zip(
        sequence.token_ids, sequence.logprobs, sequence.top_logprobs or [[]] * len(ends), strict=True
    ):
        spelt: dict[str, float] = {}
        for other, value in [*others, (token, logprob)]:
            spelt.setdefault(spelling.token(other), value)  # of tokens that look the same, the most probable
        top.append(spelt)
    return CompletionLogprobs(
        tokens=[spelling.token(token) for token in sequence.token_ids],
        token_logprobs=sequence.logprobs,
        top_logprobs=top,
        text_offset=[min(end, len(text.text)) for end in [0, *ends[:-1]]],
    )


def _filled(head: CompletionResponse, found: list[tuple[SearchResult, list[CompletionChoice]]]) -> CompletionResponse:
    """An answer for some of the prompts."""
    warnings = list(dict.fromkeys(warning for result, _ in found for warning in result.warnings))
    levels = [result.levels for result, _ in found if result.levels is not None]
    return msgspec.structs.replace(
        head,
        choices=[choice for _, choices in found for choice in choices],
        warnings=warnings or UNSET,
        beam_details=levels or UNSET,
    )
