"""When requests are sent and what counts, against servers that are slow or refuse on purpose."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Awaitable, Callable

import loadgen
import numpy as np
import pytest
import report
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from loadgen import Load, Sample, Shape

from tests.bench.fake_server import SEARCH, consistent, fake, good


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


def test_mixed_shapes_are_log_uniform_and_repeat_with_their_seed() -> None:
    shapes = loadgen.mixed_shapes(4000, (500, 8000), (32, 512), 3, seed=0)
    assert shapes == loadgen.mixed_shapes(4000, (500, 8000), (32, 512), 3, seed=0)
    contexts, widths, tokens = np.array(shapes).T
    assert contexts.min() >= 500 and contexts.max() <= 8000 and widths.min() == 32 and widths.max() == 512
    assert set(tokens) == {3}
    assert abs((contexts < 2000).mean() - 0.5) < 0.04 and abs((widths < 128).mean() - 0.5) < 0.04
    assert abs(np.corrcoef(contexts, widths)[0, 1]) < 0.1


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


def test_how_certain_a_rate_is_follows_from_ten_parts_of_the_time() -> None:
    even = [0.05 + 0.1 * k for k in range(100)]
    assert loadgen.standard_error(even, 0.0, 10.0) == 0.0
    uneven = [moment for moment in even if moment < 5 or round(moment * 10) % 2 == 0]  # 10 a second, then 5
    counts = [sum(k <= moment < k + 1 for moment in uneven) for k in range(10)]
    expected = statistics.stdev(counts) / statistics.mean(counts) / math.sqrt(10)
    assert loadgen.standard_error(uneven, 0.0, 10.0) == pytest.approx(expected) and expected > 0.05
    assert loadgen.standard_error([], 0.0, 10.0) is None
    rng = np.random.default_rng(0)
    many = [loadgen.standard_error(list(rng.uniform(0, 10, rng.poisson(900))), 0.0, 10.0) for _ in range(200)]
    assert np.mean(many) == pytest.approx(1 / math.sqrt(900), rel=0.05)  # what it is at random arrivals


def test_thirty_seconds_of_waves_of_four_are_certain_to_a_hundredth() -> None:
    period = 4 / 30.3
    ended = [period * (1 + wave) + 1e-3 * k for wave in range(250) for k in range(4)]
    samples = [Sample(end - period, end - period, end, "ok") for end in ended]
    found = loadgen.summary(samples, 1.0, 31.0, None)
    assert found["seconds"] == 30.0 and 0 < found["rate_error"] < 0.01
    assert abs(found["requests_per_s"] / 30.3 - 1) < found["rate_error"]


def test_a_quantile_is_a_value_that_was_measured() -> None:
    values = [float(k) for k in range(1, 101)]
    assert [report.quantile(values, share) for share in (0.5, 0.9, 0.99)] == [50.0, 90.0, 99.0]
    assert report.quantile([3.0], 0.99) == 3.0 and report.quantile([], 0.5) is None
