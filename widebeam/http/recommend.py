"""POST /v1/recommend: a user's history in, ranked items of the catalog out; and POST /v1/prefill, ahead of it."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from widebeam.engine.request import SearchParams
from widebeam.errors import InvalidRequest
from widebeam.http.auth import tenant_salt
from widebeam.http.batches import told_as
from widebeam.http.body import decode, json_response, read_body
from widebeam.http.keys import FACTS, METRICS, adopt_id, limit_time, served_name, working_engine
from widebeam.http.protocol import (
    CatalogRef,
    PrefillRequest,
    PrefillResponse,
    RecommendRequest,
    RecommendResponse,
)
from widebeam.http.sequences import usage

_DECODER = msgspec.json.Decoder(RecommendRequest)
_PREFILL_DECODER = msgspec.json.Decoder(PrefillRequest)
_INPUTS = ("history", "prompt", "messages", "input_ids")


async def recommend(request: web.Request) -> web.Response:
    """See `RecommendRequest` and `RecommendResponse`."""
    engine = working_engine(request)
    body = decode(_DECODER, await read_body(request))
    prompt = _prompt(body)
    request_id = adopt_id(request, body.request_id)
    limit_time(request, body.timeout_ms)
    with told_as(_names(body)):
        recommendation = await engine.recommend(
            **prompt,
            n=body.n,
            fields=body.fields,
            unknown_items=body.unknown_items,
            exclude_history=body.exclude_history,
            params=_params(body, request_id, tenant_salt(request, body.cache_salt)),
        )
    result = recommendation.result
    assert result.catalog is not None and result.catalog_version is not None
    request.app[METRICS].observe_search(result)
    request[FACTS].add(result)
    return json_response(
        RecommendResponse(
            id=request_id,
            model=body.model or served_name(request),
            catalog=CatalogRef(name=result.catalog, version=result.catalog_version),
            normalizer=result.normalizer,
            items=recommendation.items,
            usage=usage(result),
            timing_ms=result.timing_ms,
            warnings=result.warnings,
        )
    )


async def prefill(request: web.Request) -> web.Response:
    """Compute the prompt of a request that is to come; see `PrefillRequest` and `PrefillResponse`."""
    engine = working_engine(request)
    body = decode(_PREFILL_DECODER, await read_body(request))
    prompt = _prompt(body)
    request_id = adopt_id(request, body.request_id)
    limit_time(request, body.timeout_ms)
    with told_as(_names(body)):
        prefilled = await engine.prefill(
            **prompt,
            catalog=body.catalog,
            min_catalog_version=body.min_catalog_version,
            cache_salt=tenant_salt(request, body.cache_salt),
            ttl_s=body.ttl_s,
            timeout_ms=body.timeout_ms,
            priority=body.priority or 0,
            request_id=request_id,
        )
    result = prefilled.result
    request.app[METRICS].observe_search(result)
    request[FACTS].add(result)
    return json_response(
        PrefillResponse(
            id=request_id,
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            cacheable_tokens=prefilled.cacheable_tokens,
            warnings=result.warnings,
        )
    )


def _prompt(body: RecommendRequest | PrefillRequest) -> dict[str, Any]:
    """The four forms of a prompt, as the engine takes them. Raises InvalidRequest unless exactly one is given."""
    given = [name for name in _INPUTS if getattr(body, name) is not None]
    if len(given) != 1:
        found = f"; found {' and '.join(given)}" if given else ""
        raise InvalidRequest(
            f"give exactly one of {', '.join(_INPUTS)}{found}", param=given[-1] if given else "history"
        )
    prompt = {name: getattr(body, name) for name in _INPUTS}
    return prompt | {"messages": None if body.messages is None else [message.plain() for message in body.messages]}


def _names(body: RecommendRequest | PrefillRequest) -> dict[str, str]:
    """What stands in the body for what the engine calls otherwise; how many tokens there are is the catalog's."""
    (given,) = (name for name in _INPUTS if getattr(body, name) is not None)
    return {"input_ids": given, "max_new_tokens": "beam_width"}


def _params(body: RecommendRequest, request_id: str, cache_salt: str | None) -> SearchParams:
    return SearchParams(
        beam_width=body.beam_width,
        policy=body.policy,
        catalog=body.catalog,
        min_catalog_version=body.min_catalog_version,
        filters=body.filters,
        normalizer=body.normalizer,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        timeout_ms=body.timeout_ms,
        cache_salt=cache_salt,
        priority=body.priority or 0,
        request_id=request_id,
    )
