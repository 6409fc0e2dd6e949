"""`widebeam serve` as a process of its own: signals under load, and a GPU that hangs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.http.hostile import GOOD
from tests.http.load import Load
from tests.http.process import LEVELS, LONG, Process, starter
from tests.http.service import Answer, wait_until
from widebeam.http.server import BROKEN


@pytest.fixture
def start(checkpoint: Path, catalog_file: Path, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts processes, and ends what is left of them."""
    with starter(checkpoint, catalog_file, tmp_path) as begin:
        yield begin


def recommending(server: Process) -> Load[Answer | None]:
    """Clients that go away when there is nobody to answer them."""

    def ask(client: int, turn: int) -> Answer | None:
        try:
            return server.post("/v1/recommend", GOOD)
        except ConnectionResetError:  # connected as the socket was closed: nobody had accepted it
            return None

    return Load(ask, leaves=lambda answer: answer is None)


def check(load: Load[Answer | None]) -> None:
    """Answered until told to go elsewhere, until there is nobody."""
    for answers in load.by_client:
        kinds = [0 if answer is None else answer.status for answer in answers]
        assert kinds == sorted(kinds, key=[200, 503, 0].index), kinds
        assert kinds[0] == 200
        for answer in answers:
            if answer is not None and answer.status == 503:
                assert_refused(answer)


def assert_refused(answer: Answer | None) -> None:
    assert answer is not None and answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["connection"] == "close"


def is_draining(server: Process) -> bool:
    answer = server.call("GET", "/ready")
    assert answer is not None
    return bool(answer.json["status"] == "draining")


def test_sigterm_under_load_drains(start: Callable[..., Process]) -> None:
    """What was accepted is answered, what comes later is refused, and the exit status is 0."""
    server = start("--port", "0", "--max-wave-requests", "1", "--drain-timeout-s", "120").ready()
    with ThreadPoolExecutor(4) as pool, recommending(server).running(3) as load:
        accepted = [pool.submit(server.post, "/generate", LONG) for _ in range(4)]
        wait_until(lambda: server.in_flight() >= 4 and all(load.by_client), 30)
        server.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: is_draining(server))
        assert_refused(server.post("/v1/recommend", GOOD))
        for long in accepted:
            answer = long.result(120)
            assert answer is not None and answer.status == 200
            beams = answer.json["meta_info"]["beam_results"]
            assert [len(beam["output_ids"]) for beam in beams] == [LEVELS] * 8
        assert server.popen.wait(30) == 0
    check(load)
    assert server.call("GET", "/health") is None


def test_a_second_signal_stops_at_once(start: Callable[..., Process]) -> None:
    """However long it may drain; who waits is told."""
    server = start("--port", "0", "--drain-timeout-s", "600", "--max-wave-requests", "1").ready()
    with ThreadPoolExecutor(20) as pool:
        accepted = [pool.submit(server.post, "/generate", LONG) for _ in range(20)]
        wait_until(lambda: server.in_flight() >= 15, 30)
        server.popen.send_signal(signal.SIGINT)
        wait_until(lambda: is_draining(server))
        server.popen.send_signal(signal.SIGINT)
        answers = [one.result(60) for one in accepted]
        assert server.popen.wait(30) == 128 + signal.SIGINT
    statuses = [answer.status for answer in answers if answer is not None]
    assert len(statuses) == 20 and set(statuses) <= {200, 503} and statuses.count(503) >= 10


HANGING = """
import sys, threading
from widebeam.cli import main
from widebeam.engine import watchdog
from widebeam.engine.runtime import Runtime

launch = Runtime.launch

def hanging(runtime, jobs, *rest):
    if any(job.search.request_id == "poison" for job in jobs):
        threading.Event().wait()
    return launch(runtime, jobs, *rest)

Runtime.launch = hanging
watchdog.LAUNCH_FACTOR = 1
main(["serve", *sys.argv[1:]])
"""


def test_a_gpu_that_hangs_for_ever_ends_the_process(start: Callable[..., Process]) -> None:
    """Everybody is answered, the stacks say where it hangs, and the thread that hangs keeps nothing alive."""
    server = start("--port", "0", "--hang-timeout-s", "3", serve=(sys.executable, "-c", HANGING)).ready()
    answer = server.post("/v1/recommend", GOOD)
    assert answer is not None and answer.status == 200
    with ThreadPoolExecutor(8) as pool:
        poisoned = pool.submit(server.post, "/v1/recommend", GOOD | {"request_id": "poison"})
        wait_until(lambda: server.in_flight() == 1)
        asked = [pool.submit(server.post, "/v1/recommend", GOOD) for _ in range(7)]
        for one in (poisoned, *asked):
            answer = one.result(30)
            assert_refused(answer)
            assert answer is not None and answer.json["error"]["code"] == "engine_dead"
        assert server.popen.wait(30) == BROKEN
    log = server.log.read_text()
    assert "stacks follow" in log and "Thread 0x" in log and "in hanging" in log
