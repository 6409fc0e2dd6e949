"""`widebeam generate`: one request without a server."""

from __future__ import annotations

import sys
from typing import Any, Literal, cast

import msgspec

from widebeam.config import EngineConfig, ServerConfig
from widebeam.engine.request import SearchParams, SearchResult
from widebeam.errors import ConfigError
from widebeam.policies import PolicySpec


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    """Beams kept at each level. By default as /v1/recommend has it with a catalog, else as many as are returned."""
    widths: tuple[int, ...] | None = None
    """Beams kept at each level, one number a level (policy "scheduled")."""
    max_new_tokens: int | None = None
    """Tokens to generate; by default the catalog's depth."""
    normalizer: Literal["vocab", "level", "legal"] | None = None
    """Over what a token's probability is normalised."""
    fields: tuple[str, ...] = ()
    """Metadata columns to return with items."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer one request without a server, and print the answer as JSON."""

    request: Request = Request()
    engine: EngineConfig
    server: ServerConfig = ServerConfig()
    """Not used here; one file or environment may hold all settings."""


def generate(settings: Generate) -> str:
    """Answer the request and return it as JSON: ranked items with a catalog, ranked sequences without.

    Its warnings go to stderr.
    """
    from widebeam.engine.engine import Engine

    request = settings.request
    given = [name for name in ("prompt", "input_ids", "history") if getattr(request, name) is not None]
    if len(given) != 1:
        raise ConfigError("exactly one of --prompt, --input-ids and --history is needed")
    catalog = settings.engine.catalog
    if not catalog and (request.history is not None or request.fields):
        raise ConfigError("--history and --fields need --catalog")
    if isinstance(catalog, tuple) and len(catalog) > 1:
        raise ConfigError("one request searches one catalog: give --catalog once")
    params = SearchParams(
        n=request.n,
        beam_width=request.beam_width,
        policy=None if request.widths is None else PolicySpec(name="scheduled", widths=request.widths),
        max_new_tokens=request.max_new_tokens,
        normalizer=request.normalizer,
    )
    engine = Engine(settings.engine)
    try:
        if catalog:
            inputs: dict[str, Any] = {given[0]: getattr(request, given[0])}
            made = engine.run(engine.recommend(**inputs, n=request.n, fields=request.fields, params=params))
            result, answer = made.result, cast("object", made.items)
        else:
            if request.widths is None and request.beam_width is None:
                params = msgspec.structs.replace(params, beam_width=request.n)
            prompt = request.prompt if request.prompt is not None else [*(request.input_ids or ())]
            (result,) = cast("list[SearchResult]", engine.generate([prompt], **msgspec.to_builtins(params)))
            answer = [{"text": engine.decode(s.token_ids)} | msgspec.to_builtins(s) for s in result.sequences]
    finally:
        engine.close()
    for warning in result.warnings:
        print(f"widebeam: {warning}", file=sys.stderr)
    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
