"""The SDK: `AsyncClient` and its blocking twin `Client`, with typed results and errors by class. Needs no torch.

with Client("http://127.0.0.1:8000") as client:
    for item in client.recommend(history=["item-3", "item-9"], n=5).items:
        print(item.id, item.score)
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from widebeam.blocking import LoopThread
from widebeam.catalog_calls import CatalogCalls
from widebeam.config import API_KEY_VARIABLE
from widebeam.http.protocol import Health, ModelCard, ModelList
from widebeam.search_calls import SearchCalls
from widebeam.transport import Transport, check_timeout

P = ParamSpec("P")
T = TypeVar("T")


class AsyncClient(SearchCalls, CatalogCalls):
    """Talks to one server over kept connections. Close it, or use it in `async with`.

    `timeout` bounds each call in seconds, retries included; the server is told what remains of it. A call is repeated
    up to `max_retries` times when no connection could be made, it broke before an answer began, or the answer is 408,
    429, 502 or 503; after a random pause that is never shorter than the server's `retry_after_s`, else Retry-After,
    and in the long run for one call in ten. Repeating is safe: a search changes nothing on the server, and what does is
    never repeated. Cancelling a call ends its search.

    `session_id` of a call keeps a user's requests on one of several servers; make it by `session_key`, never send the
    user's own id. `api_key` is sent as a bearer token; None: the environment's WIDEBEAM_API_KEY, if it is set.
    `max_connections` is how many calls run at once; more wait. Calls may come from many tasks of one event loop, and of
    the next one when that is closed.

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
        max_connections: int = 100,
    ) -> None:
        key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
        self._transport = Transport(base_url, key, max_retries, max_connections)
        check_timeout(timeout)
        self._timeout_s = timeout

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections: calls that still run fail, and there can be no more. Closing twice is fine."""
        await self._transport.close()

    async def models(self) -> list[ModelCard]:
        """The models that the server has."""
        answer: ModelList = await self._transport.call("GET", "/v1/models", ModelList, lambda _: None, self._timeout_s)
        return answer.data

    async def health(self) -> Health:
        """The engine's state, whatever it is. Raises ServerUnreachable when nobody answers; never retried."""
        _, _, content = await self._transport.exchange("GET", "/health", None, self._timeout_s)
        return self._transport.decode(content, Health)


def _close(loop: LoopThread, client: AsyncClient) -> None:
    with contextlib.suppress(RuntimeError):  # the collector may call this on the loop's own thread, which cannot wait
        loop.run(client.close())
        loop.close()


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._loop.closed:
            raise RuntimeError("this client is closed")
        try:
            work = method(self._client, *args, **kwargs)
        except TypeError as error:  # nothing runs yet: the arguments do not fit
            raise TypeError(str(error).replace(method.__qualname__, f"Client.{method.__name__}")) from None
        return self._loop.run(work)

    return call


class Client:
    """`AsyncClient` for code without an event loop, and for notebooks. Safe to share between threads.

    One that nobody closes is closed when it is collected, or when the process ends.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        max_retries: int = 2,
        max_connections: int = 100,
    ) -> None:
        self._client = AsyncClient(
            base_url, api_key=api_key, timeout=timeout, max_retries=max_retries, max_connections=max_connections
        )
        self._loop = LoopThread("widebeam-client")
        self._end = weakref.finalize(self, _close, self._loop, self._client)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the client's thread. Closing twice is fine."""
        self._end()

    recommend = _blocking(AsyncClient.recommend)
    prefill = _blocking(AsyncClient.prefill)
    generate = _blocking(AsyncClient.generate)
    chat = _blocking(AsyncClient.chat)
    completions = _blocking(AsyncClient.completions)
    abort = _blocking(AsyncClient.abort)
    models = _blocking(AsyncClient.models)
    catalogs = _blocking(AsyncClient.catalogs)
    catalog = _blocking(AsyncClient.catalog)
    update_items = _blocking(AsyncClient.update_items)
    rollback = _blocking(AsyncClient.rollback)
    remove_catalog = _blocking(AsyncClient.remove_catalog)
    put_catalog = _blocking(AsyncClient.put_catalog)
    health = _blocking(AsyncClient.health)
