"""deploy/haproxy/haproxy.cfg in the real HAProxy, before three real servers: who gets which request, and how often."""

from __future__ import annotations

import http.client
import http.server
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.deploy.proxy import CONFIG, Proxy, environment, free_address, running_proxy
from tests.deploy.tools import needs
from tests.http.hostile import GOOD
from tests.http.load import Load
from tests.http.process import LONG, Process, starter
from tests.http.service import Answer, wait_until
from widebeam import Client, session_key
from widebeam.errors import Aborted
from widebeam.retries import error_of

pytestmark = needs("haproxy")
KEY = {"Authorization": "Bearer a-key-of-the-deployment-tests"}
SESSIONS = [f"session-{number}" for number in range(60)]


def longer(levels: int) -> dict[str, Any]:
    return LONG | {"sampling_params": LONG["sampling_params"] | {"max_new_tokens": levels}}


ENDLESS, OUTLASTS_PROBES = longer(480), longer(160)


@dataclass
class Fleet:
    """Servers by the model name that they report, which is also their name in the proxy."""

    servers: dict[str, Process]
    proxy: Proxy

    def by_session(self, sessions: list[str]) -> dict[str, str]:
        """Who answers each session. The server says so itself."""
        found = {}
        for session in sessions:
            answer = self.proxy.call("GET", "/v1/models", session=session)
            assert answer.status == 200, answer.content
            found[session] = answer.json["data"][0]["id"]
            assert answer.headers["x-served-by"] == found[session]
        return found

    def searches(self, name: str) -> dict[str, int]:
        """Of one server: how many searches ended in which way."""
        answer = self.servers[name].call("GET", "/metrics")
        assert answer is not None
        lines = [line for line in answer.content.decode().splitlines() if line.startswith("widebeam_searches_total{")]
        return {line.split('"')[1]: int(float(line.split()[-1])) for line in lines}


@pytest.fixture(scope="module")
def fleet(checkpoint: Path, catalog_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    keys = folder / "keys"
    keys.write_text(KEY["Authorization"].split()[1] + "\n")
    with starter(checkpoint, catalog_file, folder) as begin:
        names = ("w1", "w2", "w3")
        flags = ("--port", "0", "--api-key-file", str(keys), "--drain-delay-s", "3", "--drain-timeout-s", "120")
        begun = [begin(*flags, "--served-model-name", name) for name in names]
        servers = {name: process.ready() for name, process in zip(names, begun, strict=True)}
        for server in servers.values():
            server.headers = KEY
        with running_proxy(folder, [server.address for server in servers.values()], KEY) as proxy:
            yield Fleet(servers, proxy)


def test_the_file_has_no_warnings(tmp_path: Path) -> None:
    command = ["haproxy", "-c", "-f", str(CONFIG)]
    env = environment(tmp_path, free_address(), [])
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line and "no nameservers" not in line]
    assert done.returncode == 0 and not warnings, done.stderr


def test_a_session_always_meets_one_server(fleet: Fleet) -> None:
    first = fleet.by_session(SESSIONS)
    assert set(first.values()) == set(fleet.servers)
    assert fleet.by_session(SESSIONS[::-1]) == first
    answer = fleet.proxy.call("POST", "/v1/recommend", GOOD, session=SESSIONS[0])
    assert answer.json["model"] == first[SESSIONS[0]] and len(answer.json["items"]) == 2


def test_the_clients_sessions_are_the_proxys(fleet: Fleet) -> None:
    """All calls of a user reach the server by which the key of that user is hashed."""
    sessions = [session_key(user, "the secret of these tests") for user in range(12)]
    expected = fleet.by_session(sessions)
    assert len(set(expected.values())) > 1
    url = "http://{}:{}".format(*fleet.proxy.address)
    with Client(url, api_key=KEY["Authorization"].split()[1]) as client:
        for session, name in expected.items():
            chat = client.chat(input_ids=[7, 11], n=2, session_id=session)
            assert client.recommend(history=["item-1"], n=2, session_id=session).model == chat.model == name
        session, name = next(iter(expected.items()))
        with ThreadPoolExecutor(1) as pool:
            body = ENDLESS | {"rid": "to-be-ended", "session_id": session}
            begun = pool.submit(client.generate, **body)
            wait_until(fleet.servers[name].works_on_long)
            assert client.abort("to-be-ended", session_id=session) == 1
            with pytest.raises(Aborted):
                begun.result(60)


def test_without_a_session_requests_are_spread(fleet: Fleet) -> None:
    answers = [fleet.proxy.call("GET", "/v1/models", session=session) for session in (None, "") for _ in range(6)]
    assert {answer.json["data"][0]["id"] for answer in answers} == set(fleet.servers)


def test_keys_pass_and_are_still_asked_for(fleet: Fleet) -> None:
    for key, status in ((KEY["Authorization"], 200), ("Bearer another-key-of-this-length", 401)):
        assert fleet.proxy.call("POST", "/v1/recommend", GOOD, headers={"Authorization": key}).status == status


@pytest.mark.parametrize("path", ["/metrics", "/server_info", "/flush_cache", "/v1/catalogs/items", "//metrics",
                                  "/%6detrics", "/v1/models/../../metrics", "/stats", "/?stats"])  # fmt: skip
def test_what_is_of_one_server_is_not_offered(fleet: Fleet, path: str) -> None:
    """However it is spelt, and whatever the key."""
    for method in ("GET", "POST", "PUT"):
        answer = fleet.proxy.call(method, path, {})
        assert answer.status == 403
        assert error_of(answer.status, answer.headers, answer.content).code == "not_at_the_proxy"


def test_what_users_may_do_is_offered(fleet: Fleet) -> None:
    """Everything for users but what is of one server. Routes are those of the server itself."""
    document = fleet.proxy.call("GET", "/openapi.json").json
    answers = {
        path: fleet.proxy.call(method.upper(), path.replace("{id}", "w1"), {}).status
        for path, methods in document["paths"].items()
        for method in methods
    }
    refused = {path for path, status in answers.items() if status == 403}
    of_servers = {"/metrics", "/health_generate", "/server_info", "/get_server_info", "/flush_cache"}
    assert refused == of_servers | {path for path in answers if path.startswith("/v1/catalogs")}


def test_large_bodies_are_refused_before_they_travel(fleet: Fleet) -> None:
    with closing(socket.create_connection(fleet.proxy.address, timeout=30)) as line:
        line.sendall(b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Length: 4194305\r\n\r\n")
        head = line.makefile("rb").readline()
    assert b" 413 " in head
    body = json.dumps(GOOD | {"history": ["x" * 100] * 30_000}).encode()
    assert (
        fleet.proxy.call("POST", "/v1/recommend", body).json["error"]["code"] == "invalid_request"
    )  # 3 MB went through


def test_a_client_that_leaves_ends_its_search(fleet: Fleet) -> None:
    name = fleet.by_session(["leaving"])["leaving"]
    body = json.dumps(ENDLESS).encode()
    with closing(socket.create_connection(fleet.proxy.address, timeout=30)) as line:
        head = (
            f"POST /generate HTTP/1.1\r\nHost: x\r\nx-session-id: leaving\r\nAuthorization: {KEY['Authorization']}\r\n"
        )
        line.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(fleet.servers[name].works_on_long)
    wait_until(lambda: fleet.servers[name].in_flight() == 0)
    assert fleet.searches(name)["cancelled"] == 1


class Upstream(http.server.BaseHTTPRequestHandler):
    """Ready, and ends every other connection without an answer; remembers what it was sent."""

    seen: list[dict[str, str]]

    def do_GET(self) -> None:
        if self.path == "/ready":
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.seen.append({name.lower(): value for name, value in self.headers.items()})

    def log_message(self, *_: object) -> None:
        pass


def test_a_begun_request_is_sent_once_and_says_who_sent_it(tmp_path: Path) -> None:
    """Against three servers that break over it, which real ones cannot be made to do at will. On a connection that has
    had an answer before there is none."""
    Upstream.seen = []
    upstreams = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream) for _ in range(3)]
    threads = [threading.Thread(target=upstream.serve_forever, args=(0.05,)) for upstream in upstreams]
    for thread in threads:
        thread.start()
    try:
        with running_proxy(tmp_path, [("127.0.0.1", upstream.server_port) for upstream in upstreams]) as proxy:
            answer = proxy.call("GET", "/v1/models", session="s", headers={"X-Forwarded-For": "203.0.113.9"} | KEY)
            with closing(http.client.HTTPConnection(*proxy.address, timeout=30)) as kept:
                kept.request("GET", "/metrics")
                assert kept.getresponse().read()
                kept.request("GET", "/v1/models", headers={"x-session-id": "kept"})
                with pytest.raises(http.client.RemoteDisconnected):
                    kept.getresponse()
    finally:
        for upstream, thread in zip(upstreams, threads, strict=True):
            upstream.shutdown()
            thread.join(30)
            upstream.server_close()
    assert error_of(answer.status, answer.headers, answer.content).code == "bad_gateway"
    seen, on_kept = Upstream.seen
    assert on_kept["x-session-id"] == "kept"
    assert seen["x-forwarded-for"] == "127.0.0.1" and seen["authorization"] == KEY["Authorization"]


def test_without_a_server_the_answer_says_so(tmp_path: Path) -> None:
    with running_proxy(tmp_path, [free_address() for _ in range(3)]) as proxy:
        answer = proxy.call("GET", "/v1/models", session="s")
    assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
    assert error_of(answer.status, answer.headers, answer.content).code == "no_server"


# From here on servers go, and stay away


def test_the_sessions_of_a_killed_server_move_and_no_other(fleet: Fleet) -> None:
    before = fleet.by_session(SESSIONS)
    name = before[SESSIONS[0]]
    others = {other: fleet.searches(other) for other in fleet.servers if other != name}
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(fleet.proxy.call, "POST", "/generate", ENDLESS, SESSIONS[0])
        wait_until(fleet.servers[name].works_on_long)
        fleet.servers[name].popen.kill()
        fleet.servers.pop(name).popen.wait()
        after = fleet.by_session(SESSIONS)  # at once: nobody may notice before the probes do
        lost = begun.result(60)
    assert error_of(lost.status, lost.headers, lost.content).code == "bad_gateway"
    assert {other: fleet.searches(other) for other in others} == others, "the lost request was sent again"
    assert name not in after.values()
    moved = {session for session in SESSIONS if after[session] != before[session]}
    assert moved == {session for session in SESSIONS if before[session] == name}


Asked = tuple[float, Answer]
"""When, and what came."""


def users(proxy: Proxy) -> Load[Asked]:
    """With sessions and without."""

    def ask(client: int, turn: int) -> Asked:
        session = None if turn % 4 == 3 else f"{client}-{turn}"
        asked = monotonic()
        return asked, proxy.call("POST", "/v1/recommend", GOOD, session)

    return Load(ask)


def served(load: Load[Asked], since: float) -> set[str]:
    """Who was sent what was asked since then."""
    return {answer.headers["x-served-by"] for asked, answer in load.answers if asked > since}


def test_a_server_taken_out_finishes_and_comes_back(fleet: Fleet) -> None:
    """As docs/operations.md says: nobody gets anything but an answer."""
    session = SESSIONS[1]
    name = fleet.by_session([session])[session]
    with ThreadPoolExecutor(1) as pool, users(fleet.proxy).running(2) as load:
        load.grows(20)
        begun = pool.submit(fleet.proxy.call, "POST", "/generate", LONG, session)
        wait_until(fleet.servers[name].works_on_long)
        assert fleet.proxy.admin(f"set server by_session/{name} state drain") == ""
        out = monotonic()
        load.grows(30)
        assert begun.result(60).headers["x-served-by"] == name
        assert fleet.servers[name].in_flight() == 0
        assert served(load, since=out) == set(fleet.servers) - {name}
        fleet.proxy.admin(f"set server by_session/{name} state ready")
        back = monotonic()
        load.grows(30)
        assert served(load, since=back) == set(fleet.servers)
    assert begun.result().status == 200
    assert {answer.status for _, answer in load.answers} == {200}
    assert fleet.by_session([session]) == {session: name}


def test_a_server_that_is_told_to_stop_fails_no_request(fleet: Fleet) -> None:
    """Its requests finish, and it takes new ones until the probes have seen that it goes."""
    session = SESSIONS[1]
    name = fleet.by_session([session])[session]
    with ThreadPoolExecutor(1) as pool, users(fleet.proxy).running(2) as load:
        load.grows(20)
        begun = pool.submit(fleet.proxy.call, "POST", "/generate", OUTLASTS_PROBES, session)
        wait_until(fleet.servers[name].works_on_long)
        fleet.servers[name].popen.send_signal(signal.SIGTERM)
        wait_until(lambda: states(fleet)[name] == "DOWN")
        gone = monotonic()
        load.grows(20)
        assert begun.result(60).status == 200
        assert fleet.servers.pop(name).popen.wait(30) == 0
    assert served(load, since=gone) == set(fleet.servers)
    assert {answer.status for _, answer in load.answers} == {200}
    assert fleet.by_session([session])[session] in fleet.servers


def states(fleet: Fleet) -> dict[str, str]:
    """Of each server, as HAProxy sees it: UP, DOWN, DRAIN, or MAINT; with what it is about to become left out."""
    rows = [line.split(",") for line in fleet.proxy.admin("show stat").splitlines() if line.startswith("by_session,w")]
    return {row[1]: row[17].split()[0] for row in rows}
