"""bench/online.py against real servers, and against one that refuses on purpose."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loadgen
import loadreport
import online
import pytest
from aiohttp import web
from loadgen import Load

from tests.bench.fake_server import SEARCH, consistent, fake, good
from tests.http.service import Service, running_service

SMALL = ["--vocab", "60", "--context", "20", "--width", "4", "--prompts", "8", "--duration", "1", "--warm-up", "0.2"]
BENCH = Path(online.__file__).parent


@pytest.fixture(scope="module")
def service(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    with running_service(checkpoint, catalog_file) as service:
        yield service
        service.check()


async def measure(url: str, *flags: str) -> dict[str, Any]:
    return await online.measure(online.parse(["--url", url, *SMALL, *flags]))


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


def test_the_title_says_what_was_asked_of_which_machine() -> None:
    given = {"context": "500", "width": "64", "mixed": "False", "mixed_context": "[5, 8]", "mixed_width": "[3, 5]"}
    report = {"arguments": given | {"url": "['http://x', 'http://y']"}, "server": {}, "machine": "m", "date": "d"}
    assert loadreport.title(report) == "context 500, width 64; 2 servers, m, d"
    report |= {"arguments": given | {"url": "None", "mixed": "True"}, "server": {"machine": "a GPU"}}
    assert loadreport.title(report) == "mixed contexts [5, 8] and widths [3, 5]; a GPU, d"


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


async def test_whole_bursts_count() -> None:
    async def answer(k: int, body: bytes) -> web.StreamResponse:
        return good()

    async with fake(answer) as url:
        report = await measure(url, "--rate", "50", "--burst", "0.1", "0.2", "--duration", "0.5", "--warm-up", "0.1")
    (level,) = report["levels"]
    due = [moment for moment in loadgen.poisson(50.0, 0.6, seed=0, burst=(0.1, 0.2)) if moment >= 0.3]
    assert (level["load"], level["sent"]) == ("bursts 50/s", len(due)) and due
    assert level["offered_per_s"] == pytest.approx(len(due) / 0.3)


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
    for flags in (["--replicas", "0"], ["--machine", "a GPU"]):
        with pytest.raises(SystemExit):
            online.parse(["--checkpoint", "x", *flags])
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
        report["levels"].append(report["levels"][0] | {"kind": "open", "latency_p99_ms": 1e5})  # over decades
        (tmp_path / "wide.json").write_text(json.dumps(report))
        for path in (saved, tmp_path / "wide.json"):
            plot = path.with_suffix(".png")
            assert online.main(["--replot", str(path), "--plot", str(plot), "--machine", "a CPU"]) == 0
            assert plot.read_bytes().startswith(b"\x89PNG")
