"""`widebeam serve` as a process of its own: signals under load, and a GPU that hangs."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.http.hostile import GOOD
from tests.http.load import Load
from tests.http.process import LEVELS, LONG, Process, starter
from tests.http.service import Answer, Service, wait_until
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


def test_sigterm_under_load_drains(checkpoint: Path, start: Callable[..., Process]) -> None:
    """What was accepted is answered, what comes later is refused, and the exit status is 0."""
    server = start("--port", "0", "--max-wave-requests", "1", "--drain-timeout-s", "120").ready()
    log = server.log.read_text()
    begun = log.index(f"INFO widebeam.http: listening on http://127.0.0.1:{server.address[1]}; model {checkpoint}")
    assert begun < log.index("settings that are not defaults")  # which is logged when everything is loaded
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
    flags = ("--drain-timeout-s", "600", "--max-wave-requests", "1", "--log-format", "json")
    server = start("--port", "0", *flags).ready()
    begun = json.loads(server.log.read_text().splitlines()[0])
    assert begun["message"].startswith(f"listening on http://127.0.0.1:{server.address[1]}; model ")
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


def test_while_others_notice_that_it_goes_work_is_accepted(start: Callable[..., Process]) -> None:
    """On connections that are there and on new ones, each of which ends behind its answer; until the second signal."""
    server = start("--port", "0", "--drain-delay-s", "600").ready()
    with closing(http.client.HTTPConnection(*server.address, timeout=60)) as kept:
        for expected in ("", "close"):
            kept.request("POST", "/v1/recommend", json.dumps(GOOD))
            answer = kept.getresponse()
            assert (answer.status, answer.getheader("connection", "")) == (200, expected)
            assert len(json.loads(answer.read())["items"]) == 2
            if not expected:
                server.popen.send_signal(signal.SIGTERM)
                wait_until(lambda: is_draining(server))
    ready, alive, asked = (
        server.call("GET", "/ready"),
        server.call("GET", "/health"),
        server.post("/v1/recommend", GOOD),
    )
    assert ready is not None and alive is not None and asked is not None
    assert (ready.status, alive.status, asked.status) == (503, 200, 200)
    assert {one.headers["connection"] for one in (ready, alive, asked)} == {"close"}
    server.popen.send_signal(signal.SIGTERM)
    assert server.popen.wait(30) == 128 + signal.SIGTERM


FAULTY = """
import os, sys, threading, time
import torch
from widebeam.cli import main
from widebeam.engine import watchdog
from widebeam.engine.runtime import Runtime

launch = Runtime.launch

def hanging():
    threading.Event().wait()

def breaking():
    while not os.path.exists(GO):
        time.sleep(0.01)
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

def faulty(runtime, jobs, *rest):
    if any(job.search.request_id == "poison" for job in jobs):
        FAULT()
    return launch(runtime, jobs, *rest)

Runtime.launch = faulty
watchdog.LAUNCH_FACTOR = 1
main(["serve", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("fault", "limit_s", "told"),
    [
        ("hanging", "3", "a launch has not answered for"),
        ("breaking", "600", "AcceleratorError: CUDA error: an illegal memory access"),
    ],
)
def test_a_gpu_that_hangs_for_ever_or_breaks_ends_the_process(
    start: Callable[..., Process], tmp_path: Path, fault: str, limit_s: str, told: str
) -> None:
    """Everybody is answered, the stacks say what every thread does, and a thread that hangs keeps nothing alive."""
    go = tmp_path / "go"
    script = FAULTY.replace("FAULT", fault).replace("GO", repr(str(go)))
    server = start("--port", "0", "--hang-timeout-s", limit_s, serve=(sys.executable, "-c", script)).ready()
    answer = server.post("/v1/recommend", GOOD)
    assert answer is not None and answer.status == 200
    with ThreadPoolExecutor(8) as pool:
        poisoned = pool.submit(server.post, "/v1/recommend", GOOD | {"request_id": "poison"})
        wait_until(lambda: server.in_flight() == 1)
        asked = [pool.submit(server.post, "/v1/recommend", GOOD) for _ in range(7)]
        if fault == "breaking":
            wait_until(lambda: server.in_flight() == 8)
            go.touch()
        for one in (poisoned, *asked):
            answer = one.result(30)
            assert_refused(answer)
            assert answer is not None and answer.json["error"]["code"] == "engine_dead"
        assert server.popen.wait(30) == BROKEN
    log = server.log.read_text()
    assert told in log and f"in {fault}" in log
    assert stacks_in(log) == 1


def stacks_in(log: str) -> int:
    """How often those of all threads were written."""
    _, said, stacks = log.partition("stacks of all threads follow")
    assert said and "\nThread 0x" in stacks
    return stacks.count("\nCurrent thread 0x")


DIVIDED = ("--port", "0", "--tensor-parallel-size", "2", "--hang-timeout-s", "20", "--default-beam-width", "16")


def follower_of(server: Process) -> int:
    """The process of the second rank."""
    (pid,) = (
        int(pid)
        for file in Path(f"/proc/{server.popen.pid}/task").glob("*/children")
        for pid in file.read_text().split()
    )
    return pid


def lives(pid: int) -> bool:
    """Neither gone nor waiting for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_divided_model_answers_and_ends_with_a_rank(
    start: Callable[..., Process], catalog_file: Path, service: Service
) -> None:
    """Catalogs change under load as ever; a rank that is lost takes the whole server along, with an answer for all."""
    server = start(*DIVIDED).ready()
    expected, found = service.post("/v1/recommend", GOOD), server.post("/v1/recommend", GOOD)
    assert found is not None and found.status == 200
    assert [item["id"] for item in found.json["items"]] == [item["id"] for item in expected.json["items"]]
    with ThreadPoolExecutor(1) as pool, recommending(server).running(2) as load:
        for version in (2, 3):
            update = {
                "upsert": [json.loads(catalog_file.read_text().splitlines()[version]) | {"item_id": f"new-{version}"}]
            }
            answer = server.post(f"/v1/catalogs/{catalog_file.stem}/items", update)
            assert answer is not None and (answer.status, answer.json["version"]) == (200, version)
        searching = pool.submit(server.post, "/generate", LONG)
        wait_until(lambda: server.in_flight() > 0 and all(load.by_client), 30)
        os.kill(follower_of(server), signal.SIGKILL)
        answer = searching.result(60)
        assert answer is not None and answer.status in (200, 503)
        assert server.popen.wait(30) == BROKEN
    check(load)
    log = server.log.read_text()
    assert "rank 1 of the model has ended with status -9" in log
    assert stacks_in(log) == 1


def test_a_lost_leader_ends_the_other_ranks(start: Callable[..., Process]) -> None:
    server = start(*DIVIDED).ready()
    follower = follower_of(server)
    assert lives(follower)
    server.popen.kill()
    wait_until(lambda: not lives(follower), 20)


def test_signals_beyond_the_second_leave_no_traceback(start: Callable[..., Process]) -> None:
    """Also one that comes when the drain is over and the rest of the process ends."""
    server = start("--port", "0").ready()
    while server.popen.poll() is None:
        server.popen.send_signal(signal.SIGINT)
    assert server.popen.returncode in (128 + signal.SIGINT, -signal.SIGINT)
    assert "Traceback" not in server.log.read_text()
