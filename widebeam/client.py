"""The SDK: `AsyncClient` and its blocking twin `Client`, with typed results and errors by class. Needs no torch.

with Client("http://127.0.0.1:8000") as client:
    for item in client.recommend(history=["item-3", "item-9"], n=5).items:
        print(item.id, item.score)
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import aiohttp
import msgspec

from widebeam import errors
from widebeam.blocking import LoopThread
from widebeam.engine.request import Normalizer
from widebeam.errors import DeadlineExceeded, InvalidRequest, RequestError, ServerUnreachable, WideBeamError
from widebeam.http.protocol import ErrorBody, Health, ModelCard, ModelList, RecommendResponse
from widebeam.policies import PolicySpec

P = ParamSpec("P")
T = TypeVar("T")

RETRIED_STATUSES = frozenset({408, 429, 502, 503, 504})
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0
_LONGEST_TIMEOUT_MS = 3_600_000


class _RetryBudget:
    """At most one retry for ten calls in the long run, so that clients do not multiply an outage; ten in advance."""

    def __init__(self) -> None:
        self._tokens = 10.0

    def earn(self) -> None:
        self._tokens = min(10.0, self._tokens + 0.1)

    def spend(self) -> bool:
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class AsyncClient:
    """Talks to one server over kept connections. Close it, or use it in `async with`.

    `timeout` bounds each call in seconds, retries included; the server is told what remains of it. A call is repeated
    up to `max_retries` times when the connection fails or the answer is 408, 429, 502, 503 or 504, after a random pause
    that is never shorter than the server's Retry-After. Repeating is safe: a search changes nothing on the server.

    Calls raise `RequestError` subclasses that mirror the server's codes (`InvalidRequest`, `Overloaded`, ..),
    `DeadlineExceeded` when the timeout has passed, and `ServerUnreachable`.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        max_retries: int = 2,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout
        self._max_retries = max_retries
        self._budget = _RetryBudget()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def recommend(
        self,
        *,
        history: Sequence[int | str] | None = None,
        prompt: str | None = None,
        messages: Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | None = None,
        n: int = 10,
        beam_width: int | None = None,
        policy: PolicySpec | dict[str, Any] | None = None,
        catalog: str | None = None,
        normalizer: Normalizer | None = None,
        length_penalty: float | None = None,
        fields: Sequence[str] = (),
        unknown_items: Literal["ignore", "refuse"] = "ignore",
        priority: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (a whole call with its retries, not one await)
    ) -> RecommendResponse:
        """The n best items after a history of item ids (oldest first), or after a prompt in one of its other forms.

        `fields` names metadata columns to return; `timeout` (seconds) replaces the client's for this call.
        """
        body = {
            "history": history,
            "prompt": prompt,
            "messages": messages,
            "input_ids": input_ids,
            "n": n,
            "beam_width": beam_width,
            "policy": policy,
            "catalog": catalog,
            "normalizer": normalizer,
            "length_penalty": length_penalty,
            "fields": fields,
            "unknown_items": unknown_items,
            "priority": priority,
            "request_id": request_id,
        }
        return await self._call("POST", "/v1/recommend", RecommendResponse, body, timeout)

    async def generate(
        self,
        text: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (a whole call with its retries, not one await)
        **fields: Any,
    ) -> Any:
        """SGLang's /generate: its answer as a plain dict, or a list of them for a list of prompts.

        `fields` are further top-level keys of the body, such as `return_logprob` or `catalog`.
        """
        body = {"text": text, "input_ids": input_ids, "sampling_params": sampling_params, **fields}
        return await self._call("POST", "/generate", Any, body, timeout)

    async def models(self) -> list[ModelCard]:
        """The models that the server has."""
        return (await self._call("GET", "/v1/models", ModelList)).data

    async def health(self) -> Health:
        """The engine's state, whatever it is. Raises ServerUnreachable when nobody answers; never retried."""
        _, _, content = await self._exchange("GET", "/health", None, self._timeout_s)
        return msgspec.json.decode(content, type=Health)

    async def _call(
        self, method: str, path: str, kind: Any, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        self._budget.earn()
        attempt = 0
        while True:
            try:
                return msgspec.json.decode(await self._try(method, path, body, deadline), type=kind)
            except (RequestError, ServerUnreachable) as error:
                pause_s = _pause(error, attempt)
                in_time = time.monotonic() + pause_s < deadline
                if not (_retryable(error) and attempt < self._max_retries and in_time and self._budget.spend()):
                    raise
            await asyncio.sleep(pause_s)
            attempt += 1

    async def _try(self, method: str, path: str, body: dict[str, Any] | None, deadline: float) -> bytes:
        """One attempt: the content of a 200, or the error that the answer stands for."""
        remaining_s = deadline - time.monotonic()
        data = None if body is None else _encode(body, remaining_s)
        status, headers, content = await self._exchange(method, path, data, remaining_s)
        if status == 200:
            return content
        raise _error_of(status, headers, content)

    async def _exchange(self, method: str, path: str, data: bytes | None, timeout_s: float) -> tuple[int, Any, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None))
        headers = None if data is None else {"Content-Type": "application/json"}
        url = self._base_url + path
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, url, data=data, headers=headers) as response,
            ):
                return response.status, response.headers, await response.read()
        except TimeoutError:
            raise DeadlineExceeded(f"no answer from {url} within the timeout", code="client_timeout") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            whole = not isinstance(error, aiohttp.ClientPayloadError)
            raise ServerUnreachable(f"no answer from {url}: {error}", retryable=whole) from error


def _encode(body: dict[str, Any], remaining_s: float) -> bytes:
    """JSON of the fields that are given, with the time that remains. Arrays and their scalars become plain numbers."""
    timeout_ms = min(body.get("timeout_ms") or _LONGEST_TIMEOUT_MS, max(1, int(remaining_s * 1000)))
    given = {key: value for key, value in body.items() if value is not None} | {"timeout_ms": timeout_ms}
    try:
        return json.dumps(given, default=_plain, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise InvalidRequest(f"a number is not finite: {error}") from None


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else msgspec.to_builtins(value)


def _retryable(error: RequestError | ServerUnreachable) -> bool:
    return error.retryable if isinstance(error, ServerUnreachable) else error.status in RETRIED_STATUSES


def _pause(error: WideBeamError, attempt: int) -> float:
    """Seconds before the next try: full jitter over an exponential backoff, on top of Retry-After."""
    backoff_s = random.uniform(0.0, min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2**attempt))
    return backoff_s + (getattr(error, "retry_after_s", None) or 0.0)


_KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)]
_BY_CODE = {kind.code: kind for kind in _KINDS}
_BY_STATUS = {kind.status: kind for kind in _KINDS} | {500: RequestError, 503: errors.NotReady}


def _error_of(status: int, headers: Any, content: bytes) -> RequestError:
    """The exception that the server raised; by status alone if something between us and it answered."""
    retry_after = headers.get("Retry-After", "")
    retry_after_s = float(retry_after) if retry_after.isdigit() else None
    try:
        told = msgspec.json.decode(content, type=ErrorBody).error
    except msgspec.DecodeError:
        kind = _BY_STATUS.get(status, RequestError)
        error = kind(f"HTTP status {status}: {content[:200]!r}", retry_after_s=retry_after_s)
    else:
        kind = _BY_CODE.get(told.type) or _BY_CODE.get(told.code) or _BY_STATUS.get(status, RequestError)
        error = kind(told.message, code=told.code, param=told.param, retry_after_s=retry_after_s)
        error.add_note(f"request id {headers.get('x-request-id', told.request_id)}")
    error.status = status
    return error


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(method(self._client, *args, **kwargs))

    return call


class Client:
    """`AsyncClient` for code without an event loop, and for notebooks. Safe to share between threads."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        max_retries: int = 2,
    ) -> None:
        self._client = AsyncClient(base_url, api_key=api_key, timeout=timeout, max_retries=max_retries)
        self._loop = LoopThread("widebeam-client")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the client's thread. Closing twice is fine."""
        if not self._loop.closed:
            self._loop.run(self._client.close())
            self._loop.close()

    recommend = _blocking(AsyncClient.recommend)
    generate = _blocking(AsyncClient.generate)
    models = _blocking(AsyncClient.models)
    health = _blocking(AsyncClient.health)
