"""`widebeam generate`: one request without a server."""

from __future__ import annotations

from typing import Literal

import msgspec

from widebeam.config import EngineConfig
from widebeam.engine.request import SearchParams
from widebeam.errors import ConfigError
from widebeam.policies import PolicySpec


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The request; exactly one of prompt, input_ids and history."""

    prompt: str | None = None
    """Text to go on from."""
    input_ids: tuple[int, ...] | None = None
    """Token ids to go on from."""
    history: tuple[str, ...] | None = None
    """Item ids, oldest first; turned into a prompt by the catalog's template."""
    n: int = 10
    """Items or sequences to return."""
    beam_width: int | None = None
    """Beams kept at each level."""
    widths: tuple[int, ...] | None = None
    """Beams kept at each level, one number a level (policy "scheduled")."""
    max_new_tokens: int | None = None
    """Tokens to generate; by default the catalog's depth."""
    normalizer: Literal["vocab", "level", "legal"] | None = None
    """Over what a token's probability is normalised."""
    fields: tuple[str, ...] = ()
    """Metadata columns to return with items."""


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the command."""

    engine: EngineConfig
    request: Request = Request()


def generate(settings: Generate) -> str:
    """Answer the request and return it as JSON: ranked items with a catalog, ranked sequences without."""
    from widebeam.engine.engine import Engine

    request = settings.request
    given = [name for name in ("prompt", "input_ids", "history") if getattr(request, name) is not None]
    if len(given) != 1:
        raise ConfigError("exactly one of --prompt, --input-ids and --history is needed")
    policy = PolicySpec(name="scheduled", widths=request.widths) if request.widths else None
    width = request.beam_width or (None if policy else max(request.n, settings.engine.default_beam_width))
    params = SearchParams(
        n=request.n,
        beam_width=width,
        policy=policy,
        max_new_tokens=request.max_new_tokens,
        normalizer=request.normalizer,
    )
    engine = Engine(settings.engine)
    try:
        if settings.engine.catalog is not None:
            recommending = engine.recommend(
                prompt=request.prompt,
                input_ids=request.input_ids,
                history=request.history,
                n=request.n,
                fields=request.fields,
                params=params,
            )
            answer: object = engine.run(recommending).items
        else:
            if request.history is not None:
                raise ConfigError("--history needs --catalog")
            prompt = request.prompt if request.prompt is not None else request.input_ids or ()
            result = engine.generate(prompt, **msgspec.to_builtins(params))
            answer = [
                {"text": engine.decode(s.token_ids)} | msgspec.to_builtins(s)
                for s in result.sequences  # type: ignore[union-attr]
            ]
    finally:
        engine.close()
    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
