"""POST /abort_request, POST and GET /flush_cache, and time limits by header."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.http.service import Answer, Service, wait_until

SEARCHES = ("/v1/recommend", "/generate", "/v1/chat/completions")
IDS = [7, 11]
HEADER = "x-request-timeout-ms"


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def in_flight(service: Service) -> int:
    return service.engine.stats().requests_in_flight


def send(pool: ThreadPoolExecutor, service: Service, path: str, body: dict[str, Any], **headers: str) -> Future[Answer]:
    """Post on another thread; returns when the engine has accepted its searches."""
    before = in_flight(service)
    answer = pool.submit(service.post, path, {"input_ids": IDS} | body, headers)
    wait_until(lambda: in_flight(service) > before)
    return answer


def abort(service: Service, **body: Any) -> int:
    answer = service.post("/abort_request", body)
    assert answer.status == 200, answer.content
    return int(answer.json["aborted"])


def budgets(service: Service) -> dict[str, int]:
    return dict(service.engine._budgets.in_use)


@pytest.mark.parametrize(("path", "name"), [*zip(SEARCHES, ("request_id", "rid", "rid"), strict=True)])
def test_a_waiting_request_is_ended_at_once(service: Service, pool: ThreadPoolExecutor, path: str, name: str) -> None:
    with service.held():
        kept = send(pool, service, path, {name: "kept"})
        taken = budgets(service)
        ended = send(pool, service, path, {name: "ended"})
        assert abort(service, rid="ended") == 1
        answer = ended.result(10)  # while the device is still busy
        assert (answer.status, answer.json["error"]["code"]) == (499, "aborted")
        assert answer.headers["x-request-id"] == "ended"
        assert budgets(service) == taken
        assert abort(service, rid="ended") == 0
    assert kept.result(10).status == 200
    assert set(budgets(service).values()) == {0}


def test_a_running_request_is_ended_and_its_wave_goes_on(service: Service, pool: ThreadPoolExecutor) -> None:
    """Two requests of one wave: the one that stays gets the answer that it gets alone."""
    alone = service.post("/v1/recommend", {"input_ids": IDS}).json["items"]
    waves = service.engine.stats().waves
    with service.held():
        others = [send(pool, service, "/v1/recommend", {"request_id": name}) for name in ("ended", "kept")]
        jobs = list(service.engine._waiting)
        service.engine._worker.call(lambda runtime: launched_then(runtime, service, jobs))
    ended, kept = (other.result(10) for other in others)
    assert (ended.status, ended.json["error"]["code"]) == (499, "aborted")
    assert kept.status == 200 and [item["id"] for item in kept.json["items"]] == [item["id"] for item in alone]
    assert service.engine.stats().waves == waves + 1
    assert set(budgets(service).values()) == {0}


def launched_then(runtime: Any, service: Service, jobs: list[Any]) -> None:
    """The next wave's requests are ended right after its launch."""
    launch = runtime.launch

    def once(wave: list[Any], *rest: Any) -> Any:
        runtime.launch = launch
        flight = launch(wave, *rest)
        assert set(wave) == set(jobs)
        assert service.thread.run(on_loop(service, "ended")) == 1
        return flight

    runtime.launch = once


async def on_loop(service: Service, rid: str) -> int:
    return service.engine.abort(rid)


def test_ids_are_exact_or_those_of_a_batch(service: Service, pool: ThreadPoolExecutor) -> None:
    with service.held():
        batch = send(pool, service, "/generate", {"rid": "job", "input_ids": [IDS, IDS, IDS]})
        wait_until(lambda: in_flight(service) == 3)
        others = [send(pool, service, "/generate", {"rid": rid}) for rid in ("job1", "job_x", "job_1_2", "jo")]
        for rid in ("j", "job_", "JOB", "job_3", ".*", "job_1_"):
            assert abort(service, rid=rid) == 0, rid
        assert abort(service, rid="job") == 3
        failed = batch.result(10)
        assert (failed.status, failed.json["error"]["code"]) == (499, "aborted")
        assert abort(service, rid="job_1") == 1, "job_1_2 looks like one of its batch"
        assert abort(service, rid="job_x") == 1
    assert [other.result(10).status for other in others] == [200, 499, 499, 200]


def test_one_prompt_of_a_batch_fails_the_batch(service: Service, pool: ThreadPoolExecutor) -> None:
    with service.held():
        batch = send(pool, service, "/generate", {"rid": "job", "input_ids": [IDS, IDS]})
        wait_until(lambda: in_flight(service) == 2)
        assert abort(service, rid="job_1") == 1
        answer = batch.result(10)
        assert answer.status == 499 and "prompt 1 of the batch" in answer.json["message"]
        wait_until(lambda: in_flight(service) == 0)


@pytest.mark.parametrize("body", [{"abort_all": True}, {"abort_all": True, "rid": ""}])
def test_all_are_ended(service: Service, pool: ThreadPoolExecutor, body: dict[str, Any]) -> None:
    with service.held():
        posts = [send(pool, service, path, {}) for path in SEARCHES]
        assert abort(service, **body) == 3
        assert [post.result(10).status for post in posts] == [499] * 3
    assert service.post("/v1/recommend", {"input_ids": IDS}).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "rid"),
        ({"rid": ""}, "rid"),
        ({"rid": None, "abort_all": False}, "rid"),
        ({"rid": "a b"}, "rid"),
        ({"rid": "x" * 129}, "rid"),
        ({"rid": "x\n"}, "rid"),
        ({"rid": ["x"]}, "rid"),
        ({"abort_all": 1}, "abort_all"),
        ({"rids": "x"}, "rids"),
    ],
)
def test_what_names_no_request_is_refused(service: Service, body: dict[str, Any], param: str) -> None:
    answer = service.post("/abort_request", body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_there_is_no_cache_to_flush(service: Service) -> None:
    for method, path in (("POST", "/flush_cache?timeout=60"), ("GET", "/flush_cache"), ("POST", "/flush_cache")):
        answer = service.call(method, path)
        assert answer.status == 200 and b"no prefix cache" in answer.content
        assert answer.headers["content-type"].startswith("text/plain")


# Time limits


@pytest.mark.parametrize("path", SEARCHES)
@pytest.mark.parametrize(
    ("header", "body", "blamed"), [("40", None, HEADER), ("40", 30_000, HEADER), ("30000", 40, "timeout_ms")]
)
def test_the_shorter_limit_holds(service: Service, path: str, header: str, body: int | None, blamed: str) -> None:
    with service.held():
        answer = service.post(path, {"input_ids": IDS, "timeout_ms": body}, {HEADER: header})
        assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")
        assert answer.json["error"]["param"] == blamed and "40 ms" in answer.json["error"]["message"]
        wait_until(lambda: in_flight(service) == 0)
    assert service.post(path, {"input_ids": IDS, "timeout_ms": body and 30_000}, {HEADER: "30000"}).status == 200


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1e3", "", "abc", "3600001", "9" * 30, "５"])
def test_a_bad_header_is_named(service: Service, value: str) -> None:
    for path in SEARCHES:
        answer = service.post(path, {"input_ids": IDS}, {HEADER: value.encode().decode("latin-1")})
        assert (answer.status, answer.json["error"]["param"]) == (400, HEADER)
        assert "3600000" in answer.json["error"]["message"]


def test_probes_do_not_look_at_the_header(service: Service) -> None:
    for path in ("/health", "/ready"):
        assert service.call("GET", path, headers={HEADER: "never"}).status == 200


@pytest.mark.parametrize(("header", "body"), [("50", None), (None, 50)], ids=["header", "body"])
def test_time_passes_while_the_body_is_on_its_way(service: Service, header: str | None, body: int | None) -> None:
    """A limit that is over before the search begins costs the device nothing."""
    waves = service.engine.stats().waves
    content = json.dumps({"input_ids": IDS, "timeout_ms": body}).encode()
    head = f"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    head += f"{HEADER}: {header}\r\n\r\n" if header else "\r\n"
    with socket.create_connection(service.address, timeout=10) as sock:
        sock.sendall(head.encode() + content[:5])
        time.sleep(0.2)
        if header is None:
            sock.sendall(content[5:])
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 504 ") and b"deadline_exceeded" in answer
    assert service.engine.stats().waves == waves


def test_time_passes_while_a_prompt_is_tokenised(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    waves = service.engine.stats().waves
    tokenizer = service.engine._prompts.tokenizer
    assert tokenizer is not None
    encode = tokenizer.encode

    def slow(text: str) -> list[int]:
        time.sleep(0.2)
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", slow)
    for headers, timeout_ms in (({HEADER: "50"}, None), ({}, 50)):
        answer = service.post("/v1/recommend", {"prompt": "watched <a_1>", "timeout_ms": timeout_ms}, headers)
        assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")
    assert service.engine.stats().waves == waves
