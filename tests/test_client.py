"""The SDK against the real server, and its retries against a peer that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.http.service import MODEL_NAME, Service, running_service, until, wait_until
from widebeam import AsyncClient, Client, errors
from widebeam.blocking import LoopThread
from widebeam.errors import ServerUnreachable
from widebeam.http.protocol import RecommendResponse
from widebeam.policies import PolicySpec

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def service(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    with running_service(checkpoint, catalog_file) as running:
        yield running
        running.check()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.url) as blocking:
        yield blocking


def ids_of(found: RecommendResponse) -> list[int | str]:
    """Without the scores, which may differ in the last digit between waves of different make-up."""
    return [item.id for item in found.items]


def test_recommend_is_typed(service: Service, client: Client) -> None:
    found = client.recommend(history=["item-1", "item-2"], n=3, fields=["title"], request_id="r-1")
    assert isinstance(found, RecommendResponse)
    raw = service.post("/v1/recommend", {"history": ["item-1", "item-2"], "n": 3, "fields": ["title"]}).json
    assert [(i.id, i.sid, i.metadata) for i in found.items] == [
        (i["id"], i["sid"], i["metadata"]) for i in raw["items"]
    ]
    assert found.items[0].score == pytest.approx(raw["items"][0]["score"], abs=1e-5)
    assert (found.id, found.model, found.catalog.name, found.normalizer) == ("r-1", MODEL_NAME, "items", "level")
    assert found.timing_ms.total > 0


def test_every_option_reaches_the_server(client: Client) -> None:
    by_spec = client.recommend(
        input_ids=np.array([7, 11, 30]),
        n=np.int64(2),
        policy=PolicySpec(name="scheduled", widths=(4, 8, 4)),
        catalog="items",
        normalizer="legal",
        length_penalty=0.0,
    )
    by_dict = client.recommend(
        input_ids=(7, 11, 30),
        n=2,
        policy={"name": "scheduled", "widths": [4, 8, 4]},
        normalizer="legal",
        length_penalty=0.0,
    )
    assert by_spec.items == by_dict.items
    assert by_spec.normalizer == "legal"
    assert all(item.score == pytest.approx(item.cum_logprob) for item in by_spec.items)
    with pytest.raises(errors.InvalidRequest) as caught:
        client.recommend(history=["ghost"], unknown_items="refuse")
    assert caught.value.code == "unknown_item"
    assert client.recommend(messages=[{"role": "user", "content": "a"}], n=1, beam_width=4).items


def test_generate_is_the_raw_form(client: Client) -> None:
    found = client.generate("watched a", sampling_params={"beam_width": 4, "n": 2})
    assert len(found["meta_info"]["beam_results"]) == 2
    batch = client.generate(input_ids=[[7], [8]], sampling_params={"n": 2}, return_logprob=True)
    assert [len(answer["meta_info"]["output_token_logprobs"]) for answer in batch] == [3, 3]


def test_models_and_health(client: Client) -> None:
    (card,) = client.models()
    assert (card.id, card.max_model_len) == (MODEL_NAME, 512)
    assert client.health().status == "ready"


def test_errors_have_the_servers_class_code_and_param(client: Client) -> None:
    with pytest.raises(errors.InvalidRequest) as bad:
        client.recommend(input_ids=[7], n=2, beam_width=1)
    assert (bad.value.status, bad.value.code, bad.value.param) == (400, "invalid_request", "n")
    assert "request id" in bad.value.__notes__[0]
    with pytest.raises(errors.NotFound) as missing:
        client.recommend(input_ids=[7], catalog="ghost")
    assert missing.value.code == "unknown_catalog"
    with pytest.raises(errors.InvalidRequest) as generate:
        client.generate("a", stop_me=True)
    assert (generate.value.code, generate.value.param) == ("unknown_field", "stop_me")
    with pytest.raises(errors.InvalidRequest, match="finite"):
        client.recommend(input_ids=[7], length_penalty=float("nan"))


def test_the_timeout_bounds_the_call_and_reaches_the_engine(service: Service, client: Client) -> None:
    with service.held():
        with pytest.raises(errors.DeadlineExceeded):
            client.recommend(input_ids=[7], timeout=0.1)
        wait_until(lambda: service.engine.stats().requests_in_flight == 0)  # the client may be the first to give up


async def test_many_calls_at_once(service: Service) -> None:
    async with AsyncClient(service.url) as client:
        prompts = [[7, 11 + index % 16] for index in range(40)]
        together = await asyncio.gather(*(client.recommend(input_ids=ids, n=2) for ids in prompts))
        alone = [await client.recommend(input_ids=ids, n=2) for ids in prompts]
    assert [ids_of(found) for found in together] == [ids_of(found) for found in alone]


async def test_cancelling_a_call_frees_the_request(service: Service) -> None:
    async with AsyncClient(service.url) as client:
        with service.held():
            call = asyncio.create_task(client.recommend(input_ids=[7]))
            await until(lambda: service.engine.stats().requests_in_flight == 1)
            call.cancel()
            await until(lambda: service.engine.stats().requests_in_flight == 0)
            with pytest.raises(asyncio.CancelledError):
                await call


def test_the_twins_have_the_same_methods() -> None:
    def public(kind: type) -> dict[str, inspect.Signature]:
        members = inspect.getmembers(kind, inspect.isfunction)
        return {name: inspect.signature(member) for name, member in members if not name.startswith("_")}

    def parameters(kind: type) -> dict[str, list[inspect.Parameter]]:
        return {name: list(signature.parameters.values())[1:] for name, signature in public(kind).items()}

    assert parameters(Client) == parameters(AsyncClient)
    assert inspect.signature(Client.__init__) == inspect.signature(AsyncClient.__init__)


def test_a_client_works_from_many_threads_and_inside_a_loop(service: Service, client: Client) -> None:
    results: list[list[int | str]] = []

    def call() -> list[int | str]:
        return ids_of(client.recommend(input_ids=[7, 8], n=2))

    threads = [threading.Thread(target=lambda: results.append(call())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def notebook() -> list[int | str]:
        return call()

    results.append(asyncio.run(notebook()))
    assert len(results) == 9 and all(ids == results[0] for ids in results)


def test_closing_twice_is_fine(service: Service) -> None:
    client = Client(service.url)
    assert client.health().status == "ready"
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.health()


# Retries


class Peer:
    """Answers with a script: (status, headers) for each request in turn, then 200."""

    def __init__(self) -> None:
        self.script: list[tuple[int, dict[str, str]]] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        status, headers = self.script.pop(0) if self.script else (200, {})
        return web.json_response({"text": "ok"}, status=status, headers=headers)


@asynccontextmanager
async def listening(answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """URL of a server whose /generate is the given handler."""
    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    async with listening(peer.answer) as peer.url:
        yield peer


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
async def test_passing_troubles_are_retried(peer: Peer, status: int) -> None:
    peer.script = [(status, {}), (status, {})]
    async with AsyncClient(peer.url, api_key="k-1") as client:
        assert await client.generate("a") == {"text": "ok"}
    assert len(peer.bodies) == 3
    assert {headers["Authorization"] for headers in peer.headers} == {"Bearer k-1"}
    remaining = [body["timeout_ms"] for body in peer.bodies]
    assert remaining == sorted(remaining, reverse=True) and 0 < remaining[-1] < remaining[0] <= 30_000


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, errors.InvalidRequest), (401, errors.Unauthorized), (404, errors.NotFound), (500, errors.RequestError)],
)
async def test_other_errors_are_not_retried(peer: Peer, status: int, kind: type[errors.RequestError]) -> None:
    peer.script = [(status, {})]
    async with AsyncClient(peer.url) as client:
        with pytest.raises(kind) as caught:
            await client.generate("a")
    assert type(caught.value) is kind and caught.value.status == status
    assert len(peer.bodies) == 1


async def test_retries_end(peer: Peer) -> None:
    peer.script = [(503, {})] * 9
    async with AsyncClient(peer.url, max_retries=2) as client:
        with pytest.raises(errors.NotReady) as caught:
            await client.generate("a")
    assert caught.value.status == 503
    assert len(peer.bodies) == 3


async def test_retry_after_is_honoured_within_the_deadline(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    real_sleep = asyncio.sleep

    async def quick(seconds: float) -> None:
        pauses.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr("widebeam.client.asyncio.sleep", quick)
    async with AsyncClient(peer.url, timeout=60) as client:
        peer.script = [(429, {"Retry-After": "7"})]
        assert await client.generate("a") == {"text": "ok"}
        assert 7.0 <= pauses[0] <= 7.1
        peer.script = [(429, {"Retry-After": "7"})]
        with pytest.raises(errors.Overloaded) as caught:  # there is no time left for a pause of 7 s
            await client.generate("a", timeout=5)
    assert caught.value.retry_after_s == 7.0
    assert len(peer.bodies) == 3


async def test_the_retry_budget_protects_a_server_that_is_down(peer: Peer) -> None:
    peer.script = [(502, {})] * 1000
    async with AsyncClient(peer.url, max_retries=1) as client:
        for _ in range(40):
            with pytest.raises(errors.RequestError):
                await client.generate("a")
    assert 40 < len(peer.bodies) <= 40 + 10 + 4 + 1  # ten in advance, then one for ten calls


async def test_a_dead_address_is_unreachable_after_its_retries() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        async with AsyncClient(f"http://127.0.0.1:{taken.getsockname()[1]}", max_retries=1) as client:
            with pytest.raises(ServerUnreachable):
                await client.models()
            with pytest.raises(ServerUnreachable):
                await client.health()


async def test_an_answer_cut_off_in_the_middle_is_not_repeated() -> None:
    connections = 0

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    async with server, AsyncClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(ServerUnreachable) as caught:
            await client.models()
    assert caught.value.retryable is False
    assert connections == 1


async def test_an_answer_of_ten_megabytes_on_one_line() -> None:
    long = "x" * 10_000_000

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"text": long})

    async with listening(answer) as url, AsyncClient(url) as client:
        assert (await client.generate("a"))["text"] == long


# The loop thread


def test_loop_thread_returns_raises_and_closes() -> None:
    thread = LoopThread()

    async def fail() -> None:
        raise KeyError("inner")

    assert thread.run(asyncio.sleep(0, "value")) == "value"
    with pytest.raises(KeyError, match="inner"):
        thread.run(fail())
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        thread.run(asyncio.sleep(0))


def test_loop_thread_refuses_to_wait_for_itself() -> None:
    thread = LoopThread()

    async def inner() -> None:
        thread.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="itself"):
        thread.run(inner())
    thread.close()


def test_closing_a_loop_thread_cancels_what_runs() -> None:
    thread = LoopThread()
    outcome: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            outcome.append("cancelled")
            raise

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        return task

    thread.run(start())
    thread.close()
    assert outcome == ["cancelled"]


# Weight


def test_client_and_http_need_no_torch() -> None:
    modules = [
        "widebeam.client",
        *(f"widebeam.http.{path.stem}" for path in (ROOT / "widebeam/http").glob("[a-z]*.py")),
    ]
    program = (
        "import sys, importlib, json\n"
        "sys.modules.update(torch=None, transformers=None)\n"  # importing them raises
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "import widebeam; widebeam.Client, widebeam.AsyncClient, widebeam.EngineConfig\n"
        "print(json.dumps(len(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) > 0
