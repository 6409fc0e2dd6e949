"""The event loop never waits: what takes long happens on other threads, and meanwhile anybody else is answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from blockbuster import BlockingError

from tests import tiny
from tests.http.hostile import GOOD
from tests.http.service import Service, running_service
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.template import HistoryTemplate
from widebeam.engine.flight import LaunchedWave
from widebeam.engine.runtime import Runtime
from widebeam.model.tokenizer import Tokenizer

SLOW: list[tuple[type, str]] = [
    (Tokenizer, "encode"),
    (Tokenizer, "decode"),
    (Tokenizer, "render_chat"),
    (HistoryTemplate, "render"),
    (Catalog, "load"),
    (Runtime, "add_catalog"),
    (Runtime, "launch"),
    (LaunchedWave, "result"),
]
"""Work that grows with what a client sends, or waits for the device."""


@pytest.fixture(scope="module")
def service(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    with running_service(checkpoint, catalog_file) as service:
        yield service
        service.check()


def replace(patch: pytest.MonkeyPatch, owner: type, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Put a function around a method, a class method included."""
    wrapped = wrap(getattr(owner, name))
    bound = isinstance(vars(owner)[name], (classmethod, staticmethod))
    patch.setattr(owner, name, staticmethod(wrapped) if bound else wrapped)


@pytest.fixture(scope="module", autouse=True)
def slow_work_is_off_the_loop() -> Iterator[None]:
    """Any of SLOW raises on a thread that runs an event loop; so does what blocks in the system's own sense."""

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def guard(*args: Any, **options: Any) -> Any:
            if asyncio._get_running_loop() is not None:
                raise BlockingError(real.__qualname__)
            return real(*args, **options)

        return guard

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in SLOW:
            replace(patch, owner, name, guarded)
        yield


@contextmanager
def paused(owner: type, name: str) -> Iterator[threading.Event]:
    """A call of it waits until the end of the block; the event says that it has begun."""
    begun, go_on = threading.Event(), threading.Event()

    def waiting(real: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **options: Any) -> Any:
            begun.set()
            assert go_on.wait(30), "nothing else was answered meanwhile"
            return real(*args, **options)

        return wait

    with pytest.MonkeyPatch.context() as patch:
        replace(patch, owner, name, waiting)
        try:
            yield begun
        finally:
            go_on.set()


TEXT: dict[str, Any] = {"sampling_params": {"max_new_tokens": 2}, "catalog": "none"}


@pytest.mark.parametrize(
    ("owner", "name", "path", "body"),
    [
        (Tokenizer, "encode", "/generate", TEXT | {"text": "a b"}),
        (Tokenizer, "encode", "/v1/recommend", {"prompt": "watched a"}),
        (Tokenizer, "decode", "/generate", TEXT | {"input_ids": [7]}),
        (Tokenizer, "decode", "/v1/chat/completions", {"input_ids": [7], "n": 4}),
        (Tokenizer, "render_chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        (HistoryTemplate, "render", "/v1/recommend", {"history": ["item-3"]}),
    ],
)
def test_others_are_answered_meanwhile(service: Service, owner: type, name: str, path: str, body: Any) -> None:
    """Others that need a search as well, but not this."""
    with ThreadPoolExecutor(1) as pool, paused(owner, name) as begun:
        asked = pool.submit(service.post, path, body)
        assert begun.wait(20)
        assert service.post("/v1/recommend", GOOD).status == 200
        assert service.get("/health").status == 200
        assert not asked.done()
    assert asked.result(20).status == 200


@pytest.mark.parametrize(("owner", "name"), [(Runtime, "launch"), (LaunchedWave, "result")])
def test_the_loop_is_free_while_the_device_works(service: Service, owner: type, name: str) -> None:
    with ThreadPoolExecutor(1) as pool, paused(owner, name) as begun:
        asked = pool.submit(service.post, "/v1/recommend", GOOD)
        assert begun.wait(20)
        for path in ("/health", "/metrics", "/server_info", "/v1/models"):
            assert service.get(path).status == 200
        assert service.post("/v1/recommend", {"history": [], "n": 0}).status == 400
        assert not asked.done()
    assert asked.result(20).status == 200


@pytest.mark.parametrize(("owner", "name"), [(Catalog, "load"), (Runtime, "add_catalog")])
def test_others_are_answered_while_a_catalog_loads(
    service: Service, owner: type, name: str, catalog_file: Path
) -> None:
    with ThreadPoolExecutor(1) as pool, paused(owner, name) as begun:
        loading = pool.submit(lambda: service.thread.run(service.engine.load_catalog(catalog_file)))
        assert begun.wait(20)
        assert service.get("/health").status == 200
        if name == "load":  # the other one belongs to the device
            assert service.post("/v1/recommend", GOOD).status == 200
        assert not loading.done()
    loading.result(20)


async def test_nothing_blocks_under_load(service: Service, catalog_file: Path, tmp_path: Path) -> None:
    """Long texts, thousands of beams, catalogs and every page that can be read, all at once."""
    large = tiny.save_catalog(tmp_path / "large.jsonl", num_items=3000, first_codes=16)
    pages = {
        route.resource.canonical
        for route in service.server._app.router.routes()
        if route.method == "GET" and route.resource is not None and "{" not in route.resource.canonical
    }
    assert {"/health", "/metrics", "/v1/models", "/server_info"} <= pages
    wide = {"beam_width": 2000, "n": 2000}
    posts: list[tuple[str, Any]] = [
        ("/generate", TEXT | {"text": "a b watched " * 150}),
        ("/generate", {"input_ids": [7], "catalog": "large", "sampling_params": wide, "return_logprob": True}),
        ("/generate", {"input_ids": [[7], [8]], "catalog": "none", "sampling_params": {"n": 20, "beam_width": 20}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 300}], "catalog": "large"} | wide),
        ("/v1/recommend", {"history": ["item-1", "item-2"] * 200, "n": 50, "fields": ["title"], "catalog": "items"}),
        ("/v1/recommend", {"prompt": "watched " * 400, "n": 2000, "fields": ["title"], "catalog": "large"}),
    ]

    async def get(session: aiohttp.ClientSession, path: str) -> int:
        async with session.get(path) as response:
            await response.read()
            return response.status

    async def post(session: aiohttp.ClientSession, path: str, body: Any) -> int:
        async with session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            await response.read()
            return response.status

    async def load(path: Path) -> int:
        loading = service.engine.load_catalog(path)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(loading, service.thread._loop))
        return 200

    await load(large)
    async with aiohttp.ClientSession(service.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        statuses = await asyncio.gather(
            load(large),
            load(catalog_file),
            *(get(session, path) for path in sorted(pages)),
            *(post(session, path, body) for path, body in posts for _ in range(2)),
        )
    assert set(statuses) == {200}
