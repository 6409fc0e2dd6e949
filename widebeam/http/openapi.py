"""GET /openapi.json: every route, described from the structs that are its wire format."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args

import msgspec
from aiohttp import hdrs, web
from msgspec import UnsetType

import widebeam
from widebeam import errors
from widebeam.http.admin import AbortRequest, AbortResponse, Version
from widebeam.http.auth import ACCESS, Access, Keyring
from widebeam.http.body import json_response
from widebeam.http.catalog_protocol import (
    CatalogInfo,
    CatalogList,
    PutCatalog,
    RemoveQuery,
    RollBack,
    UpdateItems,
    UploadQuery,
)
from widebeam.http.failures import ERROR_BODIES
from widebeam.http.headers import ID_HEADER, TIMEOUT_HEADER, VERSION_HEADER
from widebeam.http.keys import KEYRING
from widebeam.http.middleware import dialect_of
from widebeam.http.openai import ChatRequest, ChatResponse, CompletionRequest, CompletionResponse
from widebeam.http.openapi_fields import describe_fields
from widebeam.http.protocol import (
    Health,
    ModelCard,
    ModelList,
    PrefillRequest,
    PrefillResponse,
    RecommendRequest,
    RecommendResponse,
    RequestId,
    TimeoutMs,
)
from widebeam.http.sglang import GenerateRequest, GenerateResponse
from widebeam.http.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from widebeam.sessions import SESSION_HEADER

JSON, EVENTS, TEXT, BYTES = "application/json", "text/event-stream", "text/plain", "application/octet-stream"
_FACTS = dict[str, Any]
_ALWAYS = (400, 500)
_BODY = (408, 413)
_SEARCH = (404, 429, 499, 503)
_CHANGE = (404, 409, 429, 503)


@dataclass(frozen=True)
class Operation:
    """What a method of a route takes and answers."""

    summary: str
    answer: Any
    """A type whose JSON is the body of a 200; str: plain text."""
    body: Any = None
    failures: tuple[int, ...] = ()
    """Statuses of errors beside those that every route has."""
    other_media: tuple[str, ...] = ()
    """Further media types of a 200."""
    query: Any = None
    """A struct of the query's parameters; with one the body may also be a file."""

    @property
    def searches(self) -> bool:
        """A catalog, or the model alone, is searched."""
        return set(_SEARCH) <= set(self.failures)


_GENERATE = Operation(
    "SGLang's form: text, batches, beams",
    GenerateResponse | list[GenerateResponse],
    GenerateRequest,
    _BODY + _SEARCH,
    (EVENTS,),
)
_HEALTH = Operation("200 while the engine is alive", Health, failures=(503,))
_MODEL_INFO = Operation("Facts about the model", _FACTS, failures=(503,))
_SERVER_INFO = Operation("Effective settings and statistics", _FACTS, failures=(503,))
_FLUSH_CACHE = Operation("Empties the prefix cache", str, failures=(503,))

OPERATIONS = {
    ("POST", "/v1/recommend"): Operation(
        "A history in, ranked items out", RecommendResponse, RecommendRequest, _BODY + _SEARCH
    ),
    ("POST", "/v1/prefill"): Operation(
        "Computes the prompt of a request ahead of it", PrefillResponse, PrefillRequest, _BODY + _SEARCH
    ),
    ("POST", "/generate"): _GENERATE,
    ("PUT", "/generate"): _GENERATE,
    ("POST", "/v1/completions"): Operation(
        "OpenAI's older form: a prompt or several", CompletionResponse, CompletionRequest, _BODY + _SEARCH, (EVENTS,)
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "OpenAI's form: beams as choices", ChatResponse, ChatRequest, _BODY + _SEARCH, (EVENTS,)
    ),
    ("POST", "/tokenize"): Operation(
        "vLLM's form: a text or a chat to token ids", TokenizeResponse, TokenizeRequest, (*_BODY, 503)
    ),
    ("POST", "/detokenize"): Operation(
        "vLLM's form: token ids to a text", DetokenizeResponse, DetokenizeRequest, (*_BODY, 503)
    ),
    ("GET", "/v1/models"): Operation("The one model", ModelList, failures=(503,)),
    ("GET", "/v1/models/{id}"): Operation("The model by its name", ModelCard, failures=(404, 503)),
    ("GET", "/v1/catalogs"): Operation("All catalogs", CatalogList, failures=(503,)),
    ("GET", "/v1/catalogs/{name}"): Operation("A catalog by its name", CatalogInfo, failures=(404, 503)),
    ("PUT", "/v1/catalogs/{name}"): Operation(
        "Loads a catalog file", CatalogInfo, PutCatalog, _BODY + _CHANGE, query=UploadQuery
    ),
    ("DELETE", "/v1/catalogs/{name}"): Operation("Removes a catalog", CatalogInfo, failures=_CHANGE, query=RemoveQuery),
    ("POST", "/v1/catalogs/{name}/items"): Operation(
        "Adds, replaces and removes items", CatalogInfo, UpdateItems, _BODY + _CHANGE
    ),
    ("POST", "/v1/catalogs/{name}/rollback"): Operation(
        "Goes back to an earlier version", CatalogInfo, RollBack, _BODY + _CHANGE
    ),
    ("GET", "/health"): _HEALTH,
    ("GET", "/ping"): _HEALTH,
    ("POST", "/ping"): _HEALTH,
    ("GET", "/ready"): Operation("200 while new work is accepted", Health, failures=(503,)),
    ("GET", "/health_generate"): Operation("Generates one token", Health, failures=(429, 499, 503)),
    ("GET", "/model_info"): _MODEL_INFO,
    ("GET", "/get_model_info"): _MODEL_INFO,
    ("GET", "/server_info"): _SERVER_INFO,
    ("GET", "/get_server_info"): _SERVER_INFO,
    ("GET", "/version"): Operation("The server's version", Version),
    ("GET", "/metrics"): Operation("Prometheus' text form", str, other_media=("application/openmetrics-text",)),
    ("POST", "/abort_request"): Operation("Ends searches", AbortResponse, AbortRequest, _BODY),
    ("GET", "/flush_cache"): _FLUSH_CACHE,
    ("POST", "/flush_cache"): _FLUSH_CACHE,
    ("GET", "/openapi.json"): Operation("This document", _FACTS),
}


async def document(request: web.Request) -> web.Response:
    """OpenAPI 3.1, with the keys that this server asks for."""
    return json_response(await asyncio.to_thread(describe, request.app[KEYRING]))  # the first time it reads files


@functools.lru_cache(maxsize=1)
def describe(keyring: Keyring) -> dict[str, Any]:
    kinds: list[Any] = list(ERROR_BODIES.values())
    for operation in OPERATIONS.values():
        kinds += [kind for kind in (operation.body, operation.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = {id(kind): _portable(schema) for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, schema_of, keyring)
    describe_fields(components, kinds)
    shared = {
        "schemas": _portable(components),
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": _KEY}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "WideBeam", "version": widebeam.__version__},
        "paths": paths,
        "components": shared,
    }


def _operation(
    method: str, path: str, operation: Operation, schema_of: Mapping[int, Any], keyring: Keyring
) -> dict[str, Any]:
    public = ACCESS[path] is Access.PUBLIC
    parameters = [_parameter(name, "path", str) for name in ("id", "name") if f"{{{name}}}" in path]
    fields = () if operation.query is None else msgspec.structs.fields(operation.query)
    parameters += [_parameter(field.name, "query", _given(field.type)) for field in fields]
    parameters.append(_parameter(ID_HEADER, "header", RequestId))
    if not public:
        parameters.append(_parameter(TIMEOUT_HEADER, "header", TimeoutMs))
    if operation.searches:
        parameters.append(
            _parameter(SESSION_HEADER, "header", str, "For proxies in front: keeps a user on one server.")
        )
    statuses = (*_ALWAYS, *operation.failures, *(() if public else (401, 403, 504)))
    told: dict[str, Any] = {
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": operation.summary,
        "parameters": parameters,
        "responses": {"200": _answer(operation, schema_of)}
        | {str(status): _failure(status, path, operation, schema_of) for status in sorted(statuses)},
    }
    if operation.body is not None:
        content = {JSON: {"schema": schema_of[id(operation.body)]}, **({BYTES: {}} if operation.query else {})}
        told["requestBody"] = {"required": True, "content": content}
    if not public:
        needed = ACCESS[path] > keyring.anonymous
        told["security"] = [{"key": []}] if needed else [{}, {"key": []}]
    return told


def _parameter(name: str, place: str, kind: Any, description: str = "") -> dict[str, Any]:
    told = {"name": name, "in": place, "required": place == "path", "schema": _portable(msgspec.json.schema(kind))}
    return told | ({"description": description} if description else {})


def _given(kind: Any) -> Any:
    """The type of a field that may be left out, when it is not."""
    return Union[tuple(one for one in get_args(kind) if one is not UnsetType)]  # noqa: UP007 (of a tuple)


def _answer(operation: Operation, schema_of: Mapping[int, Any]) -> dict[str, Any]:
    media = TEXT if operation.answer is str else JSON
    content = {media: {"schema": schema_of[id(operation.answer)]}, **{other: {} for other in operation.other_media}}
    headers = {ID_HEADER: _text("The id of the request, in the log too.")}
    if operation.searches:
        headers[VERSION_HEADER] = _text("Version of the catalog that was searched; absent without one.")
    return {"description": "OK", "content": content, "headers": headers}


def _text(description: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}}


def _failure(status: int, path: str, operation: Operation, schema_of: Mapping[int, Any]) -> dict[str, Any]:
    body = operation.answer if operation.answer is Health and status == 503 else ERROR_BODIES[dialect_of(path)]
    told = {"description": ", ".join(_CODES[status]), "content": {JSON: {"schema": schema_of[id(body)]}}}
    if status in _HEADERS:
        told["headers"] = {_HEADERS[status]: {"schema": {"type": "string"}}}
    return told


_KEY = "A line of --api-key-file, or of --admin-api-key-file. Servers without such files ask for none."
_HEADERS = {401: hdrs.WWW_AUTHENTICATE, 429: hdrs.RETRY_AFTER, 503: hdrs.RETRY_AFTER}


def _codes() -> dict[int, list[str]]:
    """The kinds of errors by status."""
    found: dict[int, list[str]] = {errors.RequestError.status: [errors.RequestError.code]}
    for kind in errors.RequestError.__subclasses__():
        if kind is not errors.Cancelled:  # nobody is there to read it
            found.setdefault(kind.status, []).append(kind.code)
    return found


_CODES = _codes()


def _portable(schema: Any) -> Any:
    r"""Python's `\A` and `\Z` are unknown to JSON Schema, whose `$` is already the very end."""
    if isinstance(schema, dict):
        return {
            key: _portable_pattern(value) if key == "pattern" else _portable(value) for key, value in schema.items()
        }
    return [_portable(item) for item in schema] if isinstance(schema, list) else schema


def _portable_pattern(value: Any) -> Any:
    return value.replace(r"\A", "^").replace(r"\Z", "$") if isinstance(value, str) else _portable(value)
