"""The load generator against a real server, and against servers that are slow or refuse on purpose."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import loadgen
import numpy as np
import online
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from loadgen import Load, Request, Sample, Shape

from tests.http.service import Service, running_service

SMALL = ["--vocab", "60", "--context", "20", "--width", "4", "--prompts", "8", "--duration", "1", "--warm-up", "0.2"]
SEARCH = Request("/generate", b"{}")
BENCH = Path(online.__file__).parent


@pytest.fixture(scope="module")
def service(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    with running_service(checkpoint, catalog_file) as service:
        yield service
        service.check()


async def measure(url: str, *flags: str) -> dict[str, Any]:
    return await online.measure(online.parse(["--url", url, *SMALL, *flags]))


@asynccontextmanager
async def fake(answer: Callable[[int, bytes], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The URL of a server whose k-th answer is what a coroutine makes of k and the body. It has no metrics."""
    count = itertools.count()

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(next(count), await request.read())

    app = web.Application()
    app.router.add_post("/generate", handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def good() -> web.Response:
    return web.json_response({"text": "", "output_ids": [1], "meta_info": {"e2e_latency": 0.5, "beam_results": []}})


def consistent(level: dict[str, Any]) -> bool:
    return level["sent"] == level["ok"] + level["refused"] + sum(level["failed"].values()) > 0


async def test_loops_over_a_real_server_count_every_request(service: Service) -> None:
    done = service.engine.stats().requests_done
    report = await measure(service.url, "--concurrency", "3", "--rate", "20", "--warm-up", "0")
    levels = report["levels"]
    assert [(level["load"], level["kind"]) for level in levels] == [("closed 3", "closed"), ("open 20/s", "open")]
    assert all(consistent(level) and level["ok"] == level["sent"] for level in levels)
    checks = 1  # before the first level
    assert sum(level["sent"] for level in levels) + checks == service.engine.stats().requests_done - done
    assert levels[1]["sent"] == len(loadgen.poisson(20.0, 1.0, seed=0))
    for level in levels:
        assert level["latency_p50_ms"] <= level["latency_p90_ms"] <= level["latency_p99_ms"]
        assert level["handler_ms"] < level["latency_p99_ms"]
        assert level["prefill_ms"] > 0 and level["wave_host_ms"] > 0  # from /metrics
    assert "| closed 3" in online.markdown(report)


async def test_the_engines_own_times_are_taken_from_the_native_answer(service: Service) -> None:
    flags = ["--concurrency", "2", "--http-overhead", "--health-rate", "100", "--duration", "0.4", "--warm-up", "0"]
    report = await measure(service.url, "--route", "recommend", *flags)
    (level,), overhead, health = report["levels"], report["http_overhead"], report["health"]
    assert consistent(level) and not level["failed"]
    assert level["total_ms"] > level["prefill_ms"] > 0
    assert overhead["overhead_ms"] == overhead["client_p50_ms"] - overhead["engine_p50_ms"]
    assert overhead["overhead_p50_ms"] > 0 and overhead["idle_health_p50_ms"] > 0
    assert health["ok"] == health["sent"] > 0 and not health["failed_beside"]
    assert {"from_sending_p99_ms", "overhead_ms"} <= set(online.markdown(report).split())


def test_both_routes_ask_for_the_same_search() -> None:
    bodies = {}
    for route in loadgen.PATHS:
        (request,) = loadgen.make_requests([Shape(context=6, width=3, tokens=2)], route, "sglang", 50, seed=1)
        assert request.path == loadgen.PATHS[route] and request.body is not None
        bodies[route] = json.loads(request.body)
    ids = bodies["generate"]["input_ids"]
    assert len(ids) == 6 and all(0 <= token < 50 for token in ids)
    params = {"beam_width": 3, "n": 3, "max_new_tokens": 2, "ignore_eos": True}
    assert bodies["generate"] == {"input_ids": ids, "sampling_params": params}
    assert bodies["recommend"] == {"input_ids": ids, "n": 3, "beam_width": 3}


async def test_outcomes_are_counted_by_what_they_were() -> None:
    async def answer(k: int, body: bytes) -> web.StreamResponse:
        match k % 6:
            case 0 | 1:
                return good()
            case 2:
                return web.Response(status=429, headers={"Retry-After": "0"})
            case 3:
                return web.Response(status=503)
            case 4:
                return web.Response(body=b"{")
            case _:
                return await asyncio.sleep(30, good())

    async with fake(answer) as url, Load([url], timeout_s=0.3) as load:
        samples = await load.open_loop([SEARCH], [0.01 * k for k in range(12)])
    found = loadgen.summary(samples, 0.0, 1.0, None)
    assert consistent(found)
    assert (found["sent"], found["ok"], found["refused"]) == (12, 4, 2)
    assert found["failed"] == {"503": 2, "DecodeError": 2, "TimeoutError": 2}
    assert found["handler_ms"] == 500.0


async def test_a_server_that_is_gone_is_a_failure_of_each_request() -> None:
    async with Load(["http://127.0.0.1:9"], timeout_s=1) as load:
        samples = await load.open_loop([SEARCH], [0.0, 0.01])
        assert [sample.outcome for sample in samples] == ["ClientConnectorError"] * 2
        assert await load.get("/metrics") == b""
        with pytest.raises(SystemExit, match="no answer from the server"):
            await measure("http://127.0.0.1:9")


async def test_what_is_wrong_with_every_request_is_said_once(service: Service) -> None:
    with pytest.raises(SystemExit, match=r"first request failed: 400: .*token_out_of_vocabulary"):
        await measure(service.url, "--vocab", "50000")


async def test_a_closed_loop_holds_its_concurrency_and_no_more() -> None:
    now, most = 0, 0

    async def answer(k: int, body: bytes) -> web.StreamResponse:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return good()

    async with fake(answer) as url, Load([url], timeout_s=5) as load:
        samples = await load.closed_loop([SEARCH], 5, 0.3)
    assert most == 5
    assert len(samples) >= 5 and {sample.outcome for sample in samples} == {"ok"}
    assert all(sample.due == sample.sent < 0.3 for sample in samples)


async def test_several_servers_share_the_load_evenly() -> None:
    """In a closed loop each has as many in flight; in an open one they take turns."""
    asked, now, most = [0, 0], [0, 0], [0, 0]

    def one(server: int) -> Callable[[int, bytes], Awaitable[web.StreamResponse]]:
        async def answer(k: int, body: bytes) -> web.StreamResponse:
            asked[server] += 1
            now[server] += 1
            most[server] = max(most[server], now[server])
            await asyncio.sleep(0.01 if server else 0.03)
            now[server] -= 1
            return good()

        return answer

    async with fake(one(0)) as first, fake(one(1)) as second, Load([first, second], timeout_s=5) as load:
        await load.closed_loop([SEARCH], 6, 0.3)
        assert most == [3, 3] and asked[1] > asked[0] >= 3
        asked[:] = [0, 0]
        samples = await load.open_loop([SEARCH], [0.002 * k for k in range(21)])
    assert asked == [11, 10] and len(samples) == 21


def test_each_replica_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(online.one_gpu_each(1)) == [None]

    def visible(replicas: int) -> list[str]:
        return [(environment or {})["CUDA_VISIBLE_DEVICES"] for environment in online.one_gpu_each(replicas)]

    assert visible(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    assert visible(2) == ["3", "5"]
    with pytest.raises(SystemExit, match="names 3"):
        visible(4)


async def test_overload_is_measured_against_the_peak() -> None:
    places = 4

    async def answer(k: int, body: bytes) -> web.StreamResponse:
        nonlocal places
        if not places:
            return web.Response(status=429, headers={"Retry-After": "0"})
        places -= 1
        await asyncio.sleep(0.05)
        places += 1
        return good()

    async with fake(answer) as url:
        report = await measure(url, "--concurrency", "4", "--overload", "--duration", "0.6")
    peak, over = report["levels"]
    assert (peak["load"], over["load"]) == ("closed 4", "2 x peak")
    assert consistent(peak) and consistent(over)
    warm_up, duration = 0.2, 0.6
    due = loadgen.poisson(2 * peak["requests_per_s"], warm_up + duration, seed=0)
    assert over["sent"] == sum(moment >= warm_up for moment in due)
    assert over["goodput_of_peak"] == over["goodput_per_s"] / peak["goodput_per_s"]
    assert over["refused_share"] == over["refused"] / over["sent"] > 0
    assert peak["queue_ms"] is None  # a server without our metrics


def test_arrivals_are_poisson_and_repeat_with_their_seed() -> None:
    moments = loadgen.poisson(100.0, 100.0, seed=3)
    assert moments == loadgen.poisson(100.0, 100.0, seed=3) != loadgen.poisson(100.0, 100.0, seed=4)
    assert moments == sorted(moments) and moments[0] >= 0 and moments[-1] < 100
    assert abs(len(moments) - 10_000) < 5 * 100  # five standard deviations
    gaps = np.diff(moments)
    assert abs(gaps.mean() - 0.01) < 5e-4
    assert abs(gaps.std() / gaps.mean() - 1) < 0.05  # as exponential gaps have it
    counts = np.histogram(moments, bins=1000, range=(0, 100))[0]
    assert abs(counts.var() / counts.mean() - 1) < 0.25  # and independent


def test_bursts_keep_the_rate_and_leave_the_pauses_free() -> None:
    moments = loadgen.poisson(50.0, 100.0, seed=0, burst=(0.5, 1.5))
    assert abs(len(moments) - 5000) < 5 * 71
    assert all(moment % 2.0 < 0.5 for moment in moments)
    assert len({moment // 2.0 for moment in moments}) == 50  # every burst has some
    assert moments == sorted(moments)


async def test_whole_bursts_count() -> None:
    async def answer(k: int, body: bytes) -> web.StreamResponse:
        return good()

    async with fake(answer) as url:
        report = await measure(url, "--rate", "50", "--burst", "0.1", "0.2", "--duration", "0.5", "--warm-up", "0.1")
    (level,) = report["levels"]
    due = [moment for moment in loadgen.poisson(50.0, 0.6, seed=0, burst=(0.1, 0.2)) if moment >= 0.3]
    assert (level["load"], level["sent"]) == ("bursts 50/s", len(due)) and due
    assert level["offered_per_s"] == pytest.approx(len(due) / 0.3)


def test_mixed_shapes_are_log_uniform_and_repeat_with_their_seed() -> None:
    shapes = loadgen.mixed_shapes(4000, (500, 8000), (32, 512), 3, seed=0)
    assert shapes == loadgen.mixed_shapes(4000, (500, 8000), (32, 512), 3, seed=0)
    contexts, widths, tokens = np.array(shapes).T
    assert contexts.min() >= 500 and contexts.max() <= 8000 and widths.min() == 32 and widths.max() == 512
    assert set(tokens) == {3}
    assert abs((contexts < 2000).mean() - 0.5) < 0.04 and abs((widths < 128).mean() - 0.5) < 0.04
    assert abs(np.corrcoef(contexts, widths)[0, 1]) < 0.1


async def test_a_trace_is_replayed_at_its_offsets(tmp_path: Path) -> None:
    arrivals = [(10.6, 7, 2, 3), (10.0, 5, 4, 1), (10.2, 6, 3, 2)]
    lines = [dict(zip(("at_s", "context", "width", "tokens"), arrival, strict=True)) for arrival in arrivals]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    moments, shapes = loadgen.read_trace(path)
    assert moments == pytest.approx([0.0, 0.2, 0.6])
    assert shapes == [(5, 4, 1), (6, 3, 2), (7, 2, 3)]

    seen: list[tuple[float, int, int, int]] = []

    async def answer(k: int, body: bytes) -> web.StreamResponse:
        asked = json.loads(body)
        params = asked["sampling_params"]
        seen.append((time.perf_counter(), len(asked["input_ids"]), params["beam_width"], params["max_new_tokens"]))
        return good()

    async with fake(answer) as url:
        report = await measure(url, "--trace", str(path), "--warm-up", "0.1")
    (level,) = report["levels"]
    assert consistent(level) and level["sent"] == 3 and level["load"] == "trace.jsonl"
    replayed = seen[-3:]  # behind the first check and the warm-up
    assert [shape for _, *shape in replayed] == [list(shape) for shape in shapes]
    assert replayed[-1][0] - replayed[0][0] >= 0.3  # 0.6, less what the first one was late

    path.write_text('{"at_s": 0, "context": 5}')
    with pytest.raises(SystemExit, match=r"trace\.jsonl, line 1"):
        loadgen.read_trace(path)


async def test_no_request_is_sent_before_it_is_due() -> None:
    async def answer(k: int, body: bytes) -> web.StreamResponse:
        return good()

    due = loadgen.poisson(200.0, 0.5, seed=0)
    async with fake(answer) as url, Load([url], timeout_s=5) as load:
        samples = await load.open_loop([SEARCH], due)
    assert [sample.due for sample in samples] == due
    assert all(sample.due <= sample.sent <= sample.ended for sample in samples)


async def test_latency_counts_from_the_scheduled_arrival() -> None:
    """A client that stands still for a while sends late what was due meanwhile; that is waiting, too."""

    async def answer(k: int, body: bytes) -> web.StreamResponse:
        return good()

    stall: list[float] = []

    def stand_still() -> None:
        stall.append(time.perf_counter())
        time.sleep(0.3)
        stall.append(time.perf_counter())

    async with fake(answer) as url, Load([url], timeout_s=5) as load:
        asyncio.get_running_loop().call_later(0.1, stand_still)
        started = time.perf_counter()
        samples = await load.open_loop([SEARCH], [0.02 * k for k in range(30)])
    begun, ended = (moment - started for moment in stall)
    stalled = [sample for sample in samples if begun + 0.02 < sample.due < ended - 0.05]
    assert len(stalled) >= 8
    for sample in stalled:
        assert sample.latency_ms > (sample.ended - sample.sent) * 1e3
        assert sample.latency_ms > (ended - 0.05 - sample.due) * 1e3 > 0
    assert loadgen.summary(samples, 0.0, 1.0, None)["late_p99_ms"] > 200


async def test_what_waits_for_a_slow_server_is_not_left_out() -> None:
    """It takes one request at a time, 20 ms each, and they come twice as fast."""
    lock = asyncio.Lock()

    async def answer(k: int, body: bytes) -> web.StreamResponse:
        async with lock:
            await asyncio.sleep(0.02)
        return good()

    due = [0.01 * k for k in range(30)]
    async with fake(answer) as url, Load([url], timeout_s=5) as load:
        samples = await load.open_loop([SEARCH], due)
    ends, arrivals = np.mean([20 * (k + 1) for k in range(30)]), np.mean([10 * k for k in range(30)])
    assert np.mean([sample.latency_ms for sample in samples]) >= ends - arrivals - 1  # ms, whatever their order


moments = st.floats(0, 10)
outcomes = st.sampled_from(["ok", "ok", "ok", "429", "503", "TimeoutError"])


@given(
    st.lists(st.builds(lambda due, wait, outcome: Sample(due, due, due + wait, outcome), moments, moments, outcomes))
)
def test_goodput_is_what_came_in_time(samples: list[Sample]) -> None:
    found = {limit: loadgen.summary(samples, 2.0, 6.0, limit) for limit in (-1.0, 1000.0, 5000.0, 1e9, None)}
    rates = [level["goodput_per_s"] for level in found.values()]
    assert rates == sorted(rates) and rates[0] == 0
    assert rates[-1] == rates[-2] == found[None]["requests_per_s"]
    in_time = [s for s in samples if s.outcome == "ok" and 2 <= s.ended < 6 and s.ended - s.due <= 1]
    assert found[1000.0]["goodput_per_s"] == pytest.approx(len(in_time) / 4)
    level = found[None]
    assert level["sent"] == level["ok"] + level["refused"] + sum(level["failed"].values())
    assert level["sent"] == sum(2 <= sample.due < 6 for sample in samples) == level["offered_per_s"] * 4


def test_a_quantile_is_a_value_that_was_measured() -> None:
    values = [float(k) for k in range(1, 101)]
    assert [loadgen.quantile(values, share) for share in (0.5, 0.9, 0.99)] == [50.0, 90.0, 99.0]
    assert loadgen.quantile([3.0], 0.99) == 3.0 and loadgen.quantile([], 0.5) is None


def test_flags_that_would_do_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (
        ["--", "--max-wave-rows", "4"],
        ["--catalog", "x"],
        ["--replicas", "2"],
        ["--burst", "1", "1"],
    ):
        with pytest.raises(SystemExit):
            online.parse(["--url", "http://x", *flags])
    assert online.parse(["--checkpoint", "x", "--", "--port", "1"]).serve == ["--port", "1"]
    assert online.parse(["--url", "http://x", "--url", "http://y", "http://z"]).url == [
        "http://x",
        "http://y",
        "http://z",
    ]
    with pytest.raises(SystemExit):
        online.parse(["--checkpoint", "x", "--replicas", "0"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        online.parse(["--url", "http://x", "--plot", "x.png"])
    assert "--plot needs matplotlib, which is not installed here" in capsys.readouterr().err


def test_servers_of_its_own_are_started_and_stopped(checkpoint: Path, tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    command = [sys.executable, str(BENCH / "online.py"), "--checkpoint", str(checkpoint), *SMALL, "--replicas", "2"]
    command += ["--concurrency", "4", "--save", str(saved), "--", "--device", "cpu"]
    ran = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(saved.read_text())
    assert report["server"]["exit_status"] == 0  # it drained
    assert consistent(report["levels"][0]) and report["date"] and report["machine"]
    assert report["command"].endswith("--device cpu")
    assert saved.with_suffix(".md").read_text().strip() == ran.stdout.strip()
    if importlib.util.find_spec("matplotlib"):
        assert online.main(["--replot", str(saved), "--plot", str(tmp_path / "plot.png")]) == 0
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
