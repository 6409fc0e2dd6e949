"""Texts that are sent while they grow: the parts add up to the answer in one piece."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from aiohttp import web

from tests.faulty import served
from tests.http.service import MODEL_NAME, Service, wait_until
from tests.http.test_generate import IDS, events, without_times
from widebeam.config import ServerConfig
from widebeam.engine import search as search_module
from widebeam.engine.request import SearchResult
from widebeam.http.app import build_app
from widebeam.http.keys import ENGINE, FACTS, LEAVING, REQUEST_ID, limit_time
from widebeam.http.logs import RequestFacts
from widebeam.http.streaming import EventStream

LENGTH = 100
TIMEOUT_MS = 100
LARGE = 32 << 20
"""More than sockets hold."""
MESSAGES: Any = [{"role": "user", "content": "watched a"}]
DRAWN: dict[str, Any] = {"n": 2, "max_new_tokens": LENGTH, "sampling_seed": 5, "ignore_eos": True}
TEXT_OF: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": LENGTH, "extra_body": {"ignore_eos": True}},
    "drawn": {"n": 2, "seed": 4, "max_tokens": LENGTH, "extra_body": {"ignore_eos": True}},
    "ends by itself": {"n": 3, "seed": 1, "max_tokens": LENGTH, "logit_bias": {"1": 1.5}},
    "stop string": {"seed": 4, "max_tokens": LENGTH, "stop": ["b a", "c c c"], "extra_body": {"ignore_eos": True}},
}


@pytest.fixture(scope="module")
def sdk(shared_bare_service: Service) -> Iterator[openai.OpenAI]:
    url = shared_bare_service.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as sdk:
        yield sdk


@pytest.mark.parametrize("kind", TEXT_OF)
def test_chunks_of_a_chat_add_up(bare_service: Service, sdk: openai.OpenAI, kind: str) -> None:
    asked: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES, "logprobs": True} | TEXT_OF[kind]
    plain = sdk.chat.completions.create(**asked)
    *chunks, last = sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert len(chunks) > 1 or max(len(choice.logprobs.content) for choice in plain.choices) <= 8  # type: ignore
    for choice in plain.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        tokens = [token for part in parts for token in (part.logprobs and part.logprobs.content) or ()]
        assert choice.logprobs is not None and tokens == choice.logprobs.content
    assert (last.choices, last.usage) == ([], plain.usage)
    assert {(chunk.id, chunk.created) for chunk in chunks} == {(last.id, last.created)}


@pytest.mark.parametrize("kind", TEXT_OF)
def test_chunks_of_completions_add_up(bare_service: Service, sdk: openai.OpenAI, kind: str) -> None:
    asked: dict[str, Any] = {"model": MODEL_NAME, "prompt": [IDS, [8]], "logprobs": 0} | TEXT_OF[kind]
    plain = sdk.completions.create(**asked)
    chunks = list(sdk.completions.create(**asked, stream=True))
    for choice in plain.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert choice.logprobs is not None
        for name, column in vars(choice.logprobs).items():
            pieces = [piece for part in parts if part.logprobs for piece in getattr(part.logprobs, name)]
            if name == "token_logprobs":
                assert pieces == pytest.approx(column, abs=1e-5)
            elif name != "top_logprobs":
                assert pieces == column, name


def test_usage_grows(bare_service: Service, sdk: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES} | TEXT_OF["drawn"]
    told = [chunk.usage for chunk in sdk.chat.completions.create(**asked, stream=True, stream_options=options)]
    check_usage(told, 2)
    asked = {"model": MODEL_NAME, "prompt": [IDS, [8]]} | TEXT_OF["drawn"]
    check_usage([chunk.usage for chunk in sdk.completions.create(**asked, stream=True, stream_options=options)], 4)


def check_usage(told: list[Any], texts: int) -> None:
    counts = [usage.completion_tokens for usage in told if usage is not None]
    assert len(counts) == len(told) > 2 and counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == texts * LENGTH


def test_events_of_generate_have_all_so_far(bare_service: Service) -> None:
    body = {"input_ids": [IDS, [8]], "sampling_params": DRAWN, "return_logprob": True, "rid": "r"}
    plain = without_times(bare_service.post("/generate", body).json)
    seen = without_times(events(bare_service.post("/generate", body | {"stream": True})))
    assert len(seen) > 4
    for index, answer in enumerate(plain):
        *growing, last = [event for event in seen if event["index"] == index]
        logprobs, whole_logprobs = (found["meta_info"].pop("output_token_logprobs") for found in (last, answer))
        assert last == answer | {"index": index}
        assert [logprob for logprob, *_ in logprobs] == pytest.approx([p for p, *_ in whole_logprobs], abs=1e-5)
        assert growing, "at least one before the last"
        for event in growing:
            length = len(event["output_ids"])
            assert 0 < length < LENGTH and length == event["meta_info"]["completion_tokens"]
            assert event["output_ids"] == answer["output_ids"][:length]
            assert answer["text"].startswith(event["text"])
            assert event["meta_info"]["finish_reason"] is None
            seen_logprobs = [logprob for logprob, *_ in event["meta_info"]["output_token_logprobs"]]
            assert seen_logprobs == pytest.approx([p for p, *_ in whole_logprobs[:length]], abs=1e-5)


@pytest.mark.parametrize("api", ["chat", "generate"])
def test_a_stop_string_ends_the_search(bare_service: Service, monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    """Streamed or not: no more is computed than to the piece in which the last text has one."""
    found: list[SearchResult] = []
    submit = bare_service.engine.submit

    async def noted(*args: Any, **kwargs: Any) -> SearchResult:
        found.append(await submit(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(bare_service.engine, "submit", noted)
    biased = {"logit_bias": {"9": 100}, "stop": "a a a", "ignore_eos": True}
    for stream in (False, True):
        if api == "generate":
            sampling = biased | {"max_new_tokens": 500}
            answer = bare_service.post("/generate", {"input_ids": IDS, "sampling_params": sampling, "stream": stream})
            last = events(answer)[-1] if stream else answer.json
            assert (last["text"], last["output_ids"]) == ("", [9, 9, 9])
        else:
            body = {"messages": MESSAGES, "max_tokens": 500, "stream": stream} | biased
            answer = bare_service.post("/v1/chat/completions", body)
            assert answer.status == 200 and b"a a" not in answer.content.replace(b"a a a", b"")
    assert [len(result.sequences[0].token_ids) < 500 for result in found] == [True, True]


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_an_error_in_the_middle_is_the_last_event(
    bare_service: Service, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    growing, looks = search_module.growing, []

    def failing(*args: Any) -> Any:
        looks.append(args)
        if len(looks) == 5:
            raise RuntimeError("of the test")
        return growing(*args)

    monkeypatch.setattr(search_module, "growing", failing)
    texts = {"temperature": 0, "ignore_eos": True}
    body = {
        "/generate": {"input_ids": IDS, "sampling_params": texts | {"max_new_tokens": LENGTH}},
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": LENGTH} | texts,
        "/v1/completions": {"prompt": IDS, "max_tokens": LENGTH} | texts,
    }[path]
    *seen, error = events(bare_service.post(path, body | {"stream": True}))
    assert error["error"]["code"] == "engine_error" and "error" not in seen[0]
    monkeypatch.undo()
    assert bare_service.post(path, body).status == 200


def test_a_connection_without_chunks_ends_with_the_stream(bare_service: Service) -> None:
    """HTTP/1.0: nothing else says that all is there, though the client would keep it."""
    body = json.dumps({"input_ids": IDS, "sampling_params": DRAWN, "stream": True}).encode()
    head = f"POST /generate HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(bare_service.address, timeout=30) as connection, connection.makefile("rb") as answer:
        connection.sendall(head.encode() + body)
        content = answer.read()
    assert content.startswith(b"HTTP/1.0 200") and content.endswith(b"data: [DONE]\n\n")


async def test_who_reads_slowly_has_no_time_limit(shared_bare_service: Service) -> None:
    """It is one of the work: as with any other response, the client may take what is there when it likes."""

    async def large(request: web.Request) -> web.StreamResponse:
        limit_time(request, TIMEOUT_MS)
        events = EventStream(request)
        events.send("x" * LARGE)
        return events.end()

    app = build_app(shared_bare_service.engine, ServerConfig())
    app.add_routes([web.get("/large", large)])
    async with (
        served(app, handler_cancellation=True) as url,
        aiohttp.ClientSession() as session,
        session.get(url + "/large") as response,
    ):
        await asyncio.sleep(3 * TIMEOUT_MS / 1e3)
        assert (await response.text()) == f'data: "{"x" * LARGE}"\n\ndata: [DONE]\n\n'


def test_who_goes_away_in_the_middle_is_forgotten(bare_service: Service) -> None:
    body = {"input_ids": IDS, "sampling_params": DRAWN | {"max_new_tokens": 500}, "stream": True}
    cancelled = ended(bare_service)
    connection = http.client.HTTPConnection(*bare_service.address, timeout=30)
    connection.request("POST", "/generate", json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    connection.sock.shutdown(socket.SHUT_RDWR) if connection.sock else None
    response.close()
    connection.close()
    wait_until(lambda: bare_service.engine.stats().requests_in_flight == 0)
    wait_until(lambda: ended(bare_service) == cancelled + 1)


def ended(service: Service) -> float:
    """Requests that nobody waited for."""
    lines = service.get("/metrics").content.decode().splitlines()
    found = [line for line in lines if line.startswith("widebeam_requests_total{") and 'outcome="cancelled"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_what_is_known_late_comes_in_one_event(bare_service: Service) -> None:
    """Likely tokens and beams by level are read when a search is over."""
    late: list[dict[str, Any]] = [{"return_logprob": True, "top_logprobs_num": 2}, {"return_beam_details": True}]
    for more in late:
        sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
        body = {"input_ids": IDS, "sampling_params": sampling, "rid": "l"} | more
        (event,) = events(bare_service.post("/generate", body | {"stream": True}))
        assert without_times(event) == without_times(bare_service.post("/generate", body).json)


def test_who_does_not_read_holds_up_nobody(bare_service: Service) -> None:
    """The search ends and its place is free, while its events wait for the client."""
    sampling = DRAWN | {"n": 16, "max_new_tokens": 200}
    body = json.dumps({"input_ids": IDS, "sampling_params": sampling, "stream": True, "return_logprob": True}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(bare_service.address)
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_until(lambda: bare_service.engine.stats().requests_in_flight == 1)
        wait_until(lambda: bare_service.engine.stats().requests_in_flight == 0, seconds=60)
        assert bare_service.post("/generate", {"input_ids": IDS, "sampling_params": {"n": 2}}).status == 200
        received = b"".join(iter(lambda: client.recv(1 << 20), b""))
    assert len(re.findall(rb'"finish_reason":\{', received)) == 16
    assert b"data: [DONE]\n\n" in received[-64:]


async def test_a_client_that_lags_is_known() -> None:
    """So that what later events repeat is not kept for it; what was sent arrives in the end."""
    lagged = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        request[REQUEST_ID], request[FACTS] = "r", RequestFacts()
        events = EventStream(request)
        sent = 0
        while not events.lags:
            events.send("x" * 65_536)
            sent += 1
            await asyncio.sleep(0)
        lagged.set()
        events.send(sent)
        response = events.end()
        await events.written()
        return response

    app = web.Application()
    app[ENGINE], app[LEAVING] = SimpleNamespace(state="ready"), asyncio.Event()  # type: ignore[misc]
    app.router.add_get("/", handler)
    async with served(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await asyncio.wait_for(lagged.wait(), 30)
        received = await asyncio.wait_for(reader.read(), 30)
        writer.close()
    *_, sent, done, _ = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", received).split(b"\n\n")
    assert done.endswith(b"data: [DONE]")
    assert received.count(b'data: "x') == int(sent.rpartition(b" ")[2]) > 4
