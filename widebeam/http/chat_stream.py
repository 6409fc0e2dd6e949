"""A chat's answer in chunks: of texts what they have grown by, of beams all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from msgspec import UNSET

from widebeam.http.choices import Chunks, unended
from widebeam.http.openai import ROLE, AssistantMessage, ChatChoice, ChatResponse, Logprobs, StreamOptions
from widebeam.http.sequences import usage
from widebeam.http.thinking import reasoning_chunk

if TYPE_CHECKING:
    from widebeam.engine.request import SearchResult
    from widebeam.http.protocol import Usage

THOUGHT = "thought"
"""Stands beside the indices of choices."""


class ChatStream:
    """Chunks of one chat."""

    def __init__(self, request: web.Request, head: ChatResponse, options: StreamOptions | None) -> None:
        self._chunks, self._head = Chunks(request, options), head

    def said(self, result: SearchResult, text: str, ended: bool) -> None:
        """What is thought before all choices has grown to this."""
        if self._chunks.lags and not ended:
            return
        first = not self._chunks.begun(THOUGHT)
        new, _ = self._chunks.new(THOUGHT, text)
        if new or first:
            self._chunks.send(reasoning_chunk(self._head, new, first), usage(result))

    def grown(self, result: SearchResult, choices: list[ChatChoice]) -> None:
        """The choices have grown to these."""
        if self._chunks.lags:
            return
        deltas = [delta for choice in choices if (delta := self._delta(choice)) is not None]
        if deltas:
            self._chunks.send(msgspec.structs.replace(self._head, choices=list(map(unended, deltas))), usage(result))

    def end(self, answer: ChatResponse, used: Usage) -> web.StreamResponse:
        """The rest of the whole answer, and how all choices ended."""
        deltas = [self._delta(choice, last=True) for choice in answer.choices]
        self._chunks.send(msgspec.structs.replace(answer, choices=deltas, usage=UNSET), used)
        return self._chunks.end(self._head, used)

    def _delta(self, choice: ChatChoice, last: bool = False) -> ChatChoice | None:
        """What a choice has that was not sent; None if there is nothing, unless it is the last."""
        tokens = choice.logprobs.content if choice.logprobs else []
        role = UNSET if self._chunks.begun(choice.index) else ROLE
        text, new = self._chunks.new(choice.index, choice.text, len(tokens))
        if not (text or tokens[new] or last):
            return None
        return msgspec.structs.replace(
            choice,
            message=UNSET,
            delta=AssistantMessage(content=text, role=role),
            logprobs=Logprobs(content=tokens[new]) if choice.logprobs else None,
        )
