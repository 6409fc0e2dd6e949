"""Thinking before a search: a text is drawn first, and the beams go on behind it.

The two are searches of their own: the second one's prompt holds the text, and finds in the prefix cache, if there is
one, what the first one computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from widebeam.engine.request import NO_CATALOG, Sampling, SearchParams
from widebeam.errors import InvalidRequest
from widebeam.faults import counted
from widebeam.http.keys import FACTS, METRICS
from widebeam.http.openai import ROLE, ChatRequest, ChatResponse, OpenAIResponse
from widebeam.http.protocol import CompletionDetails, PromptDetails, Usage
from widebeam.http.sampling import Thinking
from widebeam.http.stop_strings import settled

if TYPE_CHECKING:
    from widebeam.constraints.catalog import Catalog
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchResult
    from widebeam.http.sequences import Plan

BEGIN, END = "<think>", "</think>"
SUFFIX = "\n\n"
"""What Qwen3's chat template writes behind a thought."""


class ReasoningDelta(msgspec.Struct, kw_only=True):
    reasoning_content: str
    role: str | UnsetType
    """With the first part alone."""


class ReasoningChoice(msgspec.Struct, kw_only=True):
    delta: ReasoningDelta
    index: int = 0
    finish_reason: None = None


class ReasoningChunk(OpenAIResponse, kw_only=True):
    """One of the first chunks of a stream with thinking."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ReasoningChoice]


class Thought(NamedTuple):
    """What was drawn."""

    result: SearchResult
    text: str
    prompt_ids: list[int]
    """The prompt, the text, the token that ends it, and the suffix."""
    kept: int
    """Tokens of `prompt_ids` that were drawn."""

    def usage(self, result: SearchResult) -> Usage:
        """Of thinking and of the search behind it; the prompt counts once, with what was put behind the text.

        Cached is what was there before either: the second search mostly finds what the first one left.
        """
        drawn = self.result.completion_tokens
        prompt, completion = result.prompt_tokens - self.kept, result.completion_tokens + drawn
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=self.result.cached_tokens),
            completion_tokens_details=CompletionDetails(reasoning_tokens=drawn),
        )


def reasoning_chunk(head: ChatResponse, text: str, first: bool) -> ReasoningChunk:
    """What a stream says of a text before the beams behind it."""
    choice = ReasoningChoice(delta=ReasoningDelta(reasoning_content=text, role=ROLE if first else UNSET))
    return ReasoningChunk(id=head.id, created=head.created, model=head.model, choices=[choice])


async def think(
    request: web.Request,
    engine: Engine,
    body: ChatRequest,
    prompt_ids: list[int],
    plan: Plan,
    said: Callable[[SearchResult, str, bool], None] | None,
) -> Thought | None:
    """Draw the text that `body.thinking` asks for. None: it asks for none, or the filters leave nothing to be found
    behind one. Raises RequestError, before anything is drawn also for what is wrong with the search behind it.

    `said` takes what is settled of the text while it grows, and at last all of it, with true.
    """
    asked, catalog = body.thinking, plan.catalog
    if asked is None:
        return None
    if catalog is None:
        raise InvalidRequest("thinking needs a catalog, whose items are searched behind it", param="thinking")
    if body.chat_template_kwargs is not None and body.chat_template_kwargs.enable_thinking is False:
        raise InvalidRequest("thinking contradicts chat_template_kwargs.enable_thinking", param="thinking")
    end = _end_token(engine, asked)
    closing = [end, *await _suffix(engine, asked)]
    max_tokens = _max_tokens(engine, asked, catalog, len(prompt_ids) + len(closing))
    if not await engine.check([*prompt_ids, *closing], plan.params, catalog=catalog):
        return None
    params = SearchParams(
        max_new_tokens=max_tokens,
        catalog=NO_CATALOG,
        stop_token_ids=(end,),
        sampling=Sampling(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=asked.top_p or 1.0,
            seed=asked.seed,
        ),
        timeout_ms=plan.params.timeout_ms,
        cache_salt=plan.params.cache_salt,
        priority=plan.params.priority,
        request_id=plan.params.request_id,
    )
    skip = plan.fields.skip_special_tokens is not False

    async def spelt(token_ids: list[int]) -> str:
        return await asyncio.to_thread(engine.decode, token_ids, skip_special_tokens=skip)

    async def follow(so_far: SearchResult) -> bool:
        text = _bare(settled(await spelt(so_far.sequences[0].token_ids), [BEGIN]))
        if said is not None and text:
            said(so_far, text, False)
        return False

    request[FACTS].version = catalog.version  # of the answer, whose head is sent before the search behind
    result = await engine.submit(prompt_ids, params, follow=None if said is None else follow)
    request.app[METRICS].observe_search(result)
    (sequence,) = result.sequences
    drawn = sequence.token_ids
    kept = drawn[:-1] if sequence.finish_reason == "stop" else drawn  # without a stop token, which may be another
    text = _bare(await spelt(kept))
    if said is not None:
        said(result, text, True)
    return Thought(
        result=result,
        text=text,
        prompt_ids=[*prompt_ids, *kept, *closing],
        kept=len(kept) + (drawn[len(kept) :] == [end]),
    )


def _bare(text: str) -> str:
    return text.strip().removeprefix(BEGIN).strip()


def _end_token(engine: Engine, asked: Thinking) -> int:
    if isinstance(asked.stop, int):
        if asked.stop >= (size := engine.model_config.vocab_size):
            raise InvalidRequest(
                f"thinking.stop: token {asked.stop} is outside the vocabulary of {size}",
                code="token_out_of_vocabulary",
                param="thinking.stop",
            )
        return asked.stop
    if engine.tokenizer is None:
        raise InvalidRequest(
            "thinking.stop: the model has no tokenizer; name a token id", code="no_tokenizer", param="thinking.stop"
        )
    token = END if asked.stop is None else asked.stop
    token_id = engine.tokenizer.token_id(token)
    if token_id is None:
        raise InvalidRequest(f"thinking.stop: {token!r} is not one token of the tokenizer", param="thinking.stop")
    return token_id


async def _suffix(engine: Engine, asked: Thinking) -> list[int]:
    """Without a tokenizer there is none, unless it is asked for, which cannot be had."""
    if asked.suffix is None and engine.tokenizer is None:
        return []
    text = SUFFIX if asked.suffix is None else asked.suffix
    return await engine.encode(text) if text else []


def _max_tokens(engine: Engine, asked: Thinking, catalog: Catalog, taken: int) -> int:
    """As many as asked for, or as there is room for beside `taken` tokens and the search."""
    room = engine.max_context_len - taken - catalog.depth - (catalog.markers.begin is not None)
    wanted, most = asked.max_tokens, engine.config.max_levels
    if wanted is not None and wanted > most:
        raise InvalidRequest(
            f"thinking.max_tokens is {wanted}, over the limit of {most} (--max-levels)", param="thinking.max_tokens"
        )
    if room < (wanted or 1):
        raise InvalidRequest(
            f"behind this prompt, the context of {engine.max_context_len} tokens has room for "
            f"{counted(max(0, room), 'token')} of thinking",
            code="context_too_long",
            param="thinking.max_tokens",
        )
    return wanted or min(room, most)
