"""POST /tokenize and POST /detokenize, in vLLM's form: texts and chats to token ids as prompts are made, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from widebeam.engine.admission import check_tokens
from widebeam.errors import InvalidRequest
from widebeam.http.batches import told_as
from widebeam.http.body import Neutral, decode, json_response, known_fields, read_body, refuse_unsupported
from widebeam.http.chat import check_messages
from widebeam.http.keys import working_engine
from widebeam.http.openai import OpenAIMessages, TemplateOptions
from widebeam.http.protocol import ModelName, PromptIds

if TYPE_CHECKING:
    from widebeam.model.tokenizer import Tokenizer

TOKENIZE_NEUTRAL: Neutral = dict.fromkeys(
    ("continue_final_message", "chat_template", "mm_processor_kwargs", "media_io_kwargs", "tools"), ()
)


@known_fields(TOKENIZE_NEUTRAL)
class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize. Exactly one of `prompt` and `messages` is given."""

    model: ModelName | None = None
    """Not looked at. This server has one model."""
    prompt: str | None = None
    messages: OpenAIMessages | None = None
    """A chat, which the checkpoint's template makes a text."""
    add_special_tokens: bool | None = None
    """With the tokens that the tokenizer puts around a text. None: false, as other routes make their prompts."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    """Needs messages. None: true, so that the assistant's turn begins."""
    chat_template_kwargs: TemplateOptions | None = None
    """Needs messages."""


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /tokenize; `max_model_len` is in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET
    """If asked for: each token as the vocabulary spells it."""


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    model: ModelName | None = None
    """Not looked at. This server has one model."""
    tokens: PromptIds


class DetokenizeResponse(msgspec.Struct):
    """Answer of POST /detokenize: the text, special tokens included."""

    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or a chat."""
    engine = working_engine(request)
    body = decode(_TOKENIZE, await read_body(request))
    _check(body)
    with told_as({"input_ids": "messages" if body.prompt is None else "prompt"}):
        tokens, strings = await engine.use_tokenizer(lambda tokenizer: _tokens(tokenizer, body))
    return json_response(
        TokenizeResponse(count=len(tokens), max_model_len=engine.max_context_len, tokens=tokens, token_strs=strings)
    )


async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids."""
    engine = working_engine(request)
    body = decode(_DETOKENIZE, await read_body(request))
    with told_as({"input_ids": "tokens"}):
        text = await engine.use_tokenizer(
            lambda tokenizer: _text(tokenizer, body.tokens, engine.model_config.vocab_size)
        )
    return json_response(DetokenizeResponse(text))


def _check(body: TokenizeRequest) -> None:
    refuse_unsupported(body, TOKENIZE_NEUTRAL)
    check_messages(body.messages or [])
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give exactly one of prompt and messages", param="prompt")
    for name in ("add_generation_prompt", "chat_template_kwargs"):
        if body.messages is None and getattr(body, name) is not None:
            raise InvalidRequest(f"{name} needs messages: a prompt has no template", param=name)


def _tokens(tokenizer: Tokenizer, body: TokenizeRequest) -> tuple[list[int], list[str] | UnsetType]:
    """Token ids, and their spelling if it is wanted. On the tokenizer's thread."""
    special = bool(body.add_special_tokens)
    if body.prompt is not None:
        tokens = tokenizer.encode(body.prompt, add_special_tokens=special)
    else:
        tokens = tokenizer.render_chat(
            [message.plain() for message in body.messages or []],
            add_special_tokens=special,
            add_generation_prompt=body.add_generation_prompt is not False,
            **msgspec.to_builtins(body.chat_template_kwargs or TemplateOptions()),
        )
    return tokens, tokenizer.token_strings(tokens) if body.return_token_strs else UNSET


def _text(tokenizer: Tokenizer, tokens: list[int], vocab_size: int) -> str:
    """On the tokenizer's thread. Raises InvalidRequest for a token that the model does not have."""
    if tokens:
        check_tokens(tokens, vocab_size)
    return tokenizer.decode(tokens, skip_special_tokens=False)
