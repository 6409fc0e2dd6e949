"""POST /v1/recommend: a user's history in, ranked items of the catalog out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from widebeam.engine.request import SearchParams
from widebeam.errors import InvalidRequest
from widebeam.http.auth import tenant_salt
from widebeam.http.body import decode, json_response, read_body
from widebeam.http.keys import FACTS, METRICS, adopt_id, limit_time, served_name, working_engine
from widebeam.http.protocol import CatalogRef, RecommendRequest, RecommendResponse
from widebeam.http.sequences import usage

if TYPE_CHECKING:
    from widebeam.constraints.catalog import Catalog
    from widebeam.engine.engine import Engine
    from widebeam.engine.results import Recommendation

_DECODER = msgspec.json.Decoder(RecommendRequest)
_INPUTS = ("history", "prompt", "messages", "input_ids")


async def recommend(request: web.Request) -> web.Response:
    """See `RecommendRequest` and `RecommendResponse`."""
    engine = working_engine(request)
    body = decode(_DECODER, await read_body(request))
    given = [name for name in _INPUTS if getattr(body, name) is not None]
    if len(given) != 1:
        found = f"; found {' and '.join(given)}" if given else ""
        raise InvalidRequest(
            f"give exactly one of {', '.join(_INPUTS)}{found}", param=given[-1] if given else "history"
        )
    request_id = adopt_id(request, body.request_id)
    limit_time(request, body.timeout_ms)
    catalog = _catalog(engine, body)
    recommendation = await engine.recommend(
        history=body.history,
        prompt=body.prompt,
        messages=None if body.messages is None else [message.plain() for message in body.messages],
        input_ids=body.input_ids,
        n=body.n,
        fields=body.fields,
        unknown_items=body.unknown_items,
        exclude_history=body.exclude_history,
        params=_params(body, request_id, tenant_salt(request, body.cache_salt)),
    )
    result = recommendation.result
    request.app[METRICS].observe_search(result)
    request[FACTS].add(result)
    return json_response(
        RecommendResponse(
            id=request_id,
            model=served_name(request),
            catalog=CatalogRef(name=catalog.name, version=result.catalog_version or catalog.version),
            normalizer=result.normalizer,
            items=recommendation.items,
            usage=usage(result),
            timing_ms=result.timing_ms,
            warnings=result.warnings + _dropped_history(body, recommendation),
        )
    )


def _catalog(engine: Engine, body: RecommendRequest) -> Catalog:
    catalog = engine.catalogs.get(body.catalog)
    if catalog is None:
        raise InvalidRequest(
            "there is no catalog to recommend from: start the server with --catalog FILE, or use /generate",
            code="no_catalog",
            param="catalog",
        )
    return catalog


def _params(body: RecommendRequest, request_id: str, cache_salt: str | None) -> SearchParams:
    return SearchParams(
        beam_width=body.beam_width,
        policy=body.policy,
        catalog=body.catalog,
        filters=body.filters,
        normalizer=body.normalizer,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        timeout_ms=body.timeout_ms,
        cache_salt=cache_salt,
        priority=body.priority or 0,
        request_id=request_id,
    )


def _dropped_history(body: RecommendRequest, recommendation: Recommendation) -> list[str]:
    """A warning if there was no room for all known items of the history."""
    if body.history is None:
        return []
    known, used = len(body.history) - len(recommendation.unknown_items), recommendation.num_history
    return [f"history: only the newest {used} of {known} known items fit the prompt"] if used < known else []
