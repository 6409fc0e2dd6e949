"""Life cycle: ports, drain, signals, overload, unforeseen errors."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.http.service import Service, running_service, until, wait_until
from widebeam.config import Config, EngineConfig, ServerConfig
from widebeam.engine import budgets
from widebeam.engine import engine as engine_module
from widebeam.engine import job as job_module
from widebeam.errors import CheckpointError, ConfigError
from widebeam.http import failures
from widebeam.http.server import BROKEN, Server, serve

GOOD = {"input_ids": [7, 11, 30], "n": 2}


def test_drain_answers_what_is_in_flight_and_refuses_the_rest(checkpoint: Path, catalog_file: Path) -> None:
    with running_service(checkpoint, catalog_file) as service, ThreadPoolExecutor(2) as pool:
        with service.held():
            accepted = pool.submit(service.post, "/v1/recommend", GOOD)
            wait_until(lambda: service.engine.stats().requests_in_flight == 1)
            drained = pool.submit(lambda: service.thread.run(service.server.drain()))
            wait_until(lambda: service.engine.state == "draining")
            refused = service.post("/v1/recommend", GOOD)
            assert (refused.status, refused.json["error"]["code"]) == (503, "draining")
            assert refused.json["error"]["retryable"] is True
            assert refused.headers["connection"] == "close" and int(refused.headers["retry-after"]) >= 1
            assert service.get("/ready").status == 503
            assert service.get("/health").status == 200
            assert not drained.done()
        assert accepted.result(10).status == 200
        assert drained.result(10) is True


def test_a_drain_may_be_told_before_work_is_refused(checkpoint: Path, catalog_file: Path) -> None:
    with running_service(checkpoint, catalog_file, drain_delay_s=0.2) as service, ThreadPoolExecutor(2) as pool:
        with service.held():
            accepted = pool.submit(service.post, "/v1/recommend", GOOD)
            wait_until(lambda: service.engine.stats().requests_in_flight == 1)
            drained = pool.submit(lambda: service.thread.run(service.server.drain()))
            wait_until(lambda: service.get("/ready").status == 503)
            wait_until(lambda: service.post("/generate", {}).json["error"]["code"] == "draining")
            assert service.engine.state == "draining" and not drained.done()
        assert accepted.result(10).status == 200 and drained.result(10) is True


def test_a_drain_that_takes_too_long_answers_503(
    checkpoint: Path, catalog_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        running_service(checkpoint, catalog_file, drain_timeout_s=0.05) as service,
        ThreadPoolExecutor(2) as pool,
        service.held(),
    ):
        accepted = pool.submit(service.post, "/v1/recommend", GOOD)
        wait_until(lambda: service.engine.stats().requests_in_flight == 1)
        assert service.thread.run(service.server.drain()) is False
        stopped = pool.submit(lambda: service.thread.run(service.engine.stop()))
        wait_until(lambda: service.engine.state == "stopped")
        assert not stopped.done()
    answer = accepted.result(10)
    assert (answer.status, answer.json["error"]["code"]) == (503, "draining")
    assert "drain timeout: 0.05 s have passed, and requests in flight are 1" in caplog.messages
    assert any(line.startswith("searches that end unfinished: 1 (the server was stopped") for line in caplog.messages)
    ended = service.engine.stats().searches
    assert (ended["draining"], ended["engine_dead"]) == (1, 0)


def test_twice_what_the_budgets_allow(checkpoint: Path, catalog_file: Path) -> None:
    """Half of it is accepted and answered as always; the other half is told when to come back, each at its own time."""
    limit, routes = 12, ("/v1/recommend", "/generate", "/v1/chat/completions")
    with (
        running_service(checkpoint, catalog_file, max_waiting_requests=limit) as service,
        ThreadPoolExecutor(2 * limit) as pool,
    ):
        bodies = [{"input_ids": [7, index], "n": 3} for index in range(limit)]
        with service.held():
            accepted = [pool.submit(service.post, "/v1/recommend", body) for body in bodies]
            wait_until(lambda: service.engine.stats().requests_in_flight == limit)
            waits = []
            for index in range(limit):
                refused = service.post(routes[index % 3], {"input_ids": [7]})
                assert (refused.status, refused.json["error"]["code"]) == (429, "overloaded")
                assert "--max-waiting-requests" in refused.json["error"]["message"]
                assert int(refused.headers["retry-after"]) >= 1
                if index % 3 < 2:  # OpenAI's form has no place for it
                    waits.append(refused.json["error"]["retry_after_s"])
                    assert int(refused.headers["retry-after"]) >= waits[-1] >= 0.8
            batch = {"input_ids": [[7]] * (limit + 1), "sampling_params": {"n": 2}}
            assert service.post("/generate", batch).status == 429
            assert len(set(waits)) == len(waits), "they would all come back together"
            assert service.get("/health").status == 200 and service.get("/ready").status == 200
            assert service.engine.stats().requests_in_flight == limit, "who was refused holds nothing"
        for one, body in zip(accepted, bodies, strict=True):
            answer, expected = one.result(60), service.post("/v1/recommend", body).json["items"]
            assert answer.status == 200
            assert [item["id"] for item in answer.json["items"]] == [item["id"] for item in expected]
            assert [i["score"] for i in answer.json["items"]] == pytest.approx([i["score"] for i in expected], abs=1e-4)
        assert all(service.post(route, {"input_ids": [7]}).status == 200 for route in routes)
        service.check()


@pytest.mark.parametrize("wait_s", [0.05, 4.0])
def test_who_is_refused_together_comes_back_in_different_seconds(
    checkpoint: Path, catalog_file: Path, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """Also who looks at the header alone: in the first second that is of use to it, or in the next."""
    monkeypatch.setattr(budgets, "FIRST_WAIT_S", wait_s)
    monkeypatch.setattr(failures, "random", random.Random(5))
    with (
        running_service(checkpoint, catalog_file, max_waiting_requests=1) as service,
        ThreadPoolExecutor(1) as pool,
        service.held(),
    ):
        accepted = pool.submit(service.post, "/v1/recommend", GOOD)
        wait_until(lambda: service.engine.stats().requests_in_flight == 1)
        late: Counter[int] = Counter()
        for _ in range(100):
            refused = service.post("/v1/recommend", GOOD)
            assert refused.status == 429
            told, exact = int(refused.headers["retry-after"]), refused.json["error"]["retry_after_s"]
            assert abs(exact / wait_s - 1) <= budgets.JITTER + 0.01
            late[told - max(1, math.ceil(exact))] += 1
        assert set(late) == {0, 1} and 35 <= late[1] <= 65
    assert accepted.result().status == 200


def test_a_higher_priority_goes_first_in_every_dialect(checkpoint: Path, catalog_file: Path) -> None:
    """One request a wave; what waits is taken by priority, and among equals by age."""
    bodies = {"/v1/recommend": GOOD, "/generate": {"input_ids": [7]}, "/v1/chat/completions": {"input_ids": [7]}}
    with (
        running_service(checkpoint, catalog_file) as service,
        ThreadPoolExecutor(9) as pool,
        pytest.MonkeyPatch.context() as patch,
    ):
        order: list[int] = []
        launch = service.engine._runtime.launch

        def noted(jobs: list[Any], *rest: Any) -> Any:
            order.append(jobs[0].priority)
            return launch(jobs, *rest)

        patch.setattr(service.engine._runtime, "launch", noted)
        scheduler = service.engine._worker.scheduler
        patch.setattr(scheduler, "_limits", replace(scheduler._limits, requests=1))
        patch.setattr(job_module, "LEAST_PATIENCE_S", math.inf)  # first waves are slow: nobody ages meanwhile
        with service.held():
            posts = []
            for priority in (-7, None, 9):
                for path, body in bodies.items():
                    posts.append(pool.submit(service.post, path, body | {"priority": priority}))
                    wait_until(lambda: service.engine.stats().requests_in_flight == len(posts))
        assert [post.result(30).status for post in posts] == [200] * 9
        assert order == [9] * 3 + [0] * 3 + [-7] * 3
        assert service.engine.stats().jobs_overtaken == 6


def test_an_unforeseen_error_is_a_fixed_text(service: Service, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret detail of /srv/path")

    monkeypatch.setattr(service.engine, "submit", broken)
    answer = service.post("/v1/recommend", GOOD)
    assert (answer.status, answer.json["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.content.decode()
    request_id = answer.headers["x-request-id"]
    assert request_id in answer.json["error"]["message"]
    assert any(request_id in record.getMessage() and record.exc_info for record in caplog.records)


def test_a_dead_engine_says_so_everywhere(checkpoint: Path, catalog_file: Path) -> None:
    """For as long as the process lives: who waited is answered, and nothing claims to be well."""
    with running_service(checkpoint, catalog_file) as service, ThreadPoolExecutor(8) as pool:

        def broken(*_: Any) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        with service.held():
            waiting = [pool.submit(service.post, "/v1/recommend", GOOD) for _ in range(8)]
            wait_until(lambda: service.engine.stats().requests_in_flight == 8)
            service.engine._runtime.launch = broken  # type: ignore[method-assign,assignment]
        for answer in [one.result(30) for one in waiting] + [
            service.post(path, {"input_ids": [7]}) for path in ("/v1/recommend", "/generate", "/v1/chat/completions")
        ]:
            assert (answer.status, answer.json["error"]["code"]) == (503, "engine_dead")
            assert int(answer.headers["retry-after"]) >= 1
        for path in ("/health", "/ready"):
            assert (service.get(path).status, service.get(path).json) == (503, {"status": "dead"})
        assert 'widebeam_engine_state{state="dead"} 1.0' in service.get("/metrics").content.decode()
        assert not service.engine._waiting


def test_a_server_that_has_stopped_holds_nothing(checkpoint: Path) -> None:
    """A program that starts another one has the memory of the first again, its KV pools above all."""
    with running_service(checkpoint, None) as service:
        assert service.post("/generate", {"input_ids": [7], "sampling_params": {"n": 2}}).status == 200
        engine = weakref.ref(service.engine)
    del service
    gc.collect()
    assert engine() is None


async def test_a_taken_port_is_a_config_error(service: Service) -> None:
    host, port = service.address
    with pytest.raises(ConfigError, match=f"cannot listen on {host} port {port}: Address already in use$"):
        await Server(service.engine, ServerConfig(host=host, port=port)).start()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs IPv6")
async def test_ipv6_urls_have_brackets(service: Service) -> None:
    server = Server(service.engine, ServerConfig(host="::1", port=0))
    await server.start()
    try:
        assert re.fullmatch(r"http://\[::1\]:\d+", server.url)
    finally:
        await server.stop()


# The whole process, inside this one: signals go to the test's own event loop.


@pytest.fixture
async def serving(
    checkpoint: Path, catalog_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Callable[..., Any]]:
    engines: list[engine_module.Engine] = []

    class Remembered(engine_module.Engine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            engines.append(self)

    monkeypatch.setattr(engine_module, "Engine", Remembered)

    async def start(**server: Any) -> tuple[asyncio.Task[int], str, engine_module.Engine]:
        config = Config(
            engine=EngineConfig(model=str(checkpoint), catalog=str(catalog_file), device="cpu"),
            server=ServerConfig(port=0, **server),
        )
        task = asyncio.create_task(serve(config))
        out = ""
        while "ready on" not in out:
            await asyncio.sleep(0.01)
            out += capsys.readouterr().out
            assert not task.done()
        return task, out.split("ready on ")[1].strip(), engines[0]

    yield start


async def test_sigterm_drains_and_exits_0(serving: Callable[..., Any]) -> None:
    task, url, engine = await serving()
    async with aiohttp.ClientSession(url) as session:
        async with session.post("/v1/recommend", json=GOOD) as response:
            assert response.status == 200
        posts = [asyncio.create_task(_status(session)) for _ in range(8)]
        await until(lambda: engine.stats().requests_in_flight + engine.stats().requests_done == 9)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.gather(*posts) == [200] * 8
        assert await asyncio.wait_for(task, 10) == 0
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get("/health")
    assert engine.state == "stopped"


async def _status(session: aiohttp.ClientSession) -> int:
    async with session.post("/v1/recommend", json=GOOD) as response:
        return response.status


async def test_a_second_signal_stops_at_once(serving: Callable[..., Any]) -> None:
    task, url, engine = await serving(drain_timeout_s=60.0)
    release = threading.Event()
    engine._worker.call(lambda _: release.wait(30))
    async with aiohttp.ClientSession(url) as session:
        post = asyncio.create_task(_status(session))
        await until(lambda: engine.stats().requests_in_flight == 1)
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: engine.state == "draining")
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: engine.state == "stopped")
        release.set()
        assert await post == 503
        assert await asyncio.wait_for(task, 10) == 128 + signal.SIGTERM


async def test_a_dead_engine_answers_and_ends_the_process(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, url, engine = await serving()

    def broken(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine._runtime, "launch", broken)
    async with aiohttp.ClientSession(url) as session:
        assert await asyncio.gather(*(_status(session) for _ in range(8))) == [503] * 8
        assert await asyncio.wait_for(task, 10) == BROKEN


async def test_a_bad_checkpoint_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        await serve(Config(engine=EngineConfig(model=str(tmp_path), device="cpu"), server=ServerConfig(port=0)))


LOADING_FOR_EVER = """
import asyncio, sys, time, types
from widebeam.config import Config, EngineConfig, ServerConfig

class Engine:
    state = "starting"
    def __init__(self, config): self.config = config
    async def start(self):
        print("loading", flush=True)
        await asyncio.to_thread(time.sleep, 60)

sys.modules["widebeam.engine.engine"] = types.SimpleNamespace(Engine=Engine)
from widebeam.http.server import BROKEN, run
run(Config(engine=EngineConfig(model="m"), server=ServerConfig(port=0)))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_is_still_loading(number: signal.Signals) -> None:
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", LOADING_FOR_EVER], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        assert process.wait(20) == -number
