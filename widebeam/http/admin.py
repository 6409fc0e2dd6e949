"""Everything beside searches: models, health, facts about the server, metrics, and what administrators do."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta
from prometheus_client.aiohttp import make_aiohttp_handler

import widebeam
from widebeam.engine.request import NO_CATALOG, SearchParams
from widebeam.errors import InvalidRequest, NotFound
from widebeam.faults import REQUEST_IDS
from widebeam.http.auth import Access, require
from widebeam.http.body import decode, json_response, read_body
from widebeam.http.keys import (
    ENGINE,
    METRICS,
    REQUEST_ID,
    SERVER_CONFIG,
    STARTED_AT,
    served_name,
    server_state,
    working_engine,
)
from widebeam.http.protocol import Health, ModelCard, ModelList

_ALIVE = ("ready", "draining")
_PROBE_TIMEOUT_MS = 20_000


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /abort_request. `rid` may be empty where all are meant."""

    rid: Annotated[str, Meta(pattern=REQUEST_IDS)] | None = None
    abort_all: bool | None = None


class AbortResponse(msgspec.Struct, kw_only=True):
    """How many searches were ended; one that has been answered already is not among them."""

    aborted: int


class Version(msgspec.Struct):
    """Answer of GET /version."""

    version: str


_ABORT = msgspec.json.Decoder(AbortRequest)


async def list_models(request: web.Request) -> web.Response:
    """The one model, in OpenAI's form with SGLang's `max_model_len`."""
    return json_response(ModelList(data=[_card(request)]))


async def show_model(request: web.Request) -> web.Response:
    name = request.match_info["id"]
    if name != served_name(request):
        raise NotFound(f"the model {name!r} does not exist", code="model_not_found", param="model")
    return json_response(_card(request))


def _card(request: web.Request) -> ModelCard:
    engine = working_engine(request)
    name = served_name(request)
    created = int(request.app[STARTED_AT])
    return ModelCard(id=name, created=created, max_model_len=engine.max_context_len, root=engine.config.model)


async def health(request: web.Request) -> web.Response:
    """200 while the engine is alive, draining included; 503 while it starts and when it has stopped or failed."""
    return _state(request, _ALIVE)


async def ready(request: web.Request) -> web.Response:
    """200 while new work should come here, else 503."""
    return _state(request, ("ready",))


def _state(request: web.Request, good: tuple[str, ...]) -> web.Response:
    state = server_state(request.app)
    return json_response(Health(status=state), status=200 if state in good else 503)


async def health_generate(request: web.Request) -> web.Response:
    """Generate one token: 200 if the whole path works."""
    engine = working_engine(request)
    params = SearchParams(
        max_new_tokens=1, catalog=NO_CATALOG, timeout_ms=_PROBE_TIMEOUT_MS, request_id=request[REQUEST_ID]
    )
    await engine.submit([0], params)
    return _state(request, ("ready",))


async def model_info(request: web.Request) -> web.Response:
    """SGLang's facts about the model, for clients that look for a tokenizer."""
    engine = working_engine(request)
    model = engine.config.model
    return json_response(
        {
            "model_path": model,
            "served_model_name": served_name(request),
            "tokenizer_path": None if engine.tokenizer is None else model,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "load_format": "safetensors",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": engine.model_config.model_type,
            "architectures": [f"{engine.model_config.model_type.capitalize()}ForCausalLM"],
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """The effective settings and the engine's statistics, flat, as SGLang's clients read them."""
    engine = working_engine(request)
    stats = msgspec.to_builtins(engine.stats())
    facts: dict[str, Any] = {
        **engine.settings,
        **msgspec.to_builtins(request.app[SERVER_CONFIG]),
        "served_model_name": served_name(request),
        "catalogs": engine.catalogs.names(),
        "started_at": request.app[STARTED_AT],
        "version": widebeam.__version__,
        "internal_states": [stats],
    }
    return json_response(facts)


async def version(request: web.Request) -> web.Response:
    """vLLM's form of this server's version."""
    return json_response(Version(version=widebeam.__version__))


async def metrics(request: web.Request) -> web.StreamResponse:
    """Prometheus' text form."""
    return await make_aiohttp_handler(request.app[METRICS].registry, disable_compression=True)(request)


async def abort_request(request: web.Request) -> web.Response:
    """End the searches of an id and of its batch, or all of them; their callers are answered with 499 `aborted`."""
    body = decode(_ABORT, await read_body(request))
    if body.abort_all:
        require(request, Access.ADMIN)
    elif not body.rid:
        raise InvalidRequest("give a rid, or abort_all = true", param="rid")
    return json_response(AbortResponse(aborted=request.app[ENGINE].abort(None if body.abort_all else body.rid)))


async def flush_cache(request: web.Request) -> web.Response:
    """Forget what the prefix cache holds, between two waves; SGLang's clients ask for it before they measure."""
    engine = working_engine(request)
    if engine.config.prefix_cache == "off":
        return web.Response(text="there is no prefix cache: nothing to flush\n")
    await engine.flush_prefixes()
    return web.Response(text="Cache flushed.\n")
