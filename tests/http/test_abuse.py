"""Raw sockets: what a hostile or broken client does to a connection, and what a good client still gets meanwhile."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.service import Service, running_service, wait_until

GOOD = {"input_ids": [7, 11, 30], "n": 2}


@pytest.fixture(scope="module")
def shared_impatient(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    limits = {"body_timeout_s": 0.3, "keepalive_timeout_s": 0.5, "max_body_bytes": 10_000}
    with running_service(checkpoint, catalog_file, **limits) as service:
        yield service


@pytest.fixture
def impatient(shared_impatient: Service) -> Iterator[Service]:
    yield shared_impatient
    assert shared_impatient.post("/v1/recommend", GOOD).status == 200
    shared_impatient.check()


@pytest.fixture
def sock(impatient: Service) -> Iterator[socket.socket]:
    with socket.create_connection(impatient.address, timeout=15) as connection:
        yield connection


def read_to_end(sock: socket.socket) -> bytes:
    received = b""
    while chunk := sock.recv(65536):
        received += chunk
    return received


def read_answer(sock: socket.socket) -> tuple[int, dict[str, object]]:
    """Status and JSON body of one answer; the connection may stay open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += sock.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    (length,) = (int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
    while len(body) < length:
        body += sock.recv(65536)
    return int(lines[0].split()[1]), json.loads(body)


def head(path: str = "/v1/recommend", *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def error_code(body: dict[str, object]) -> object:
    error = body["error"]
    assert isinstance(error, dict)
    return error["code"]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/rec", b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nConte"])
def test_idle_connections_and_half_headers_are_closed(sock: socket.socket, sent: bytes) -> None:
    sock.sendall(sent)
    assert read_to_end(sock) == b""


def test_half_a_body_gets_408(impatient: Service, sock: socket.socket) -> None:
    sock.sendall(head("/v1/recommend", "Content-Length: 100") + b'{"input_ids"')
    assert impatient.post("/v1/recommend", GOOD).status == 200  # meanwhile
    status, body = read_answer(sock)
    assert (status, error_code(body)) == (408, "request_timeout")


def test_a_trickled_body_gets_408(sock: socket.socket) -> None:
    sock.sendall(head("/generate", "Transfer-Encoding: chunked"))
    sock.settimeout(0.02)
    received = b""
    for _ in range(200):  # a byte every 20 ms would take for ever
        sock.sendall(b"1\r\n \r\n")
        try:
            received = sock.recv(65536)
            break
        except TimeoutError:
            continue
    assert received.startswith(b"HTTP/1.1 408 ")


def test_a_declared_oversize_is_refused_before_it_is_sent(sock: socket.socket) -> None:
    sock.sendall(head("/v1/chat/completions", "Content-Length: 10001"))
    status, body = read_answer(sock)
    assert (status, error_code(body)) == (413, "payload_too_large")


def test_a_chunked_oversize_is_refused(sock: socket.socket) -> None:
    sock.sendall(head("/v1/recommend", "Transfer-Encoding: chunked"))
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    sock.sendall(chunk * 3)
    status, body = read_answer(sock)
    assert (status, error_code(body)) == (413, "payload_too_large")


def test_a_million_element_list_is_refused_by_its_size(impatient: Service) -> None:
    body = b'{"input_ids": [' + b"1," * 1_000_000 + b"1]}"
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server may close while we still send
        assert impatient.post("/v1/recommend", body).status == 413


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a plain port
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\r\n".join([b"GET /health HTTP/1.1", *(b"x-%d: 1" % index for index in range(500)), b"", b""]),
    ],
)
def test_broken_http_gets_400_without_inner_details(sock: socket.socket, sent: bytes) -> None:
    sock.sendall(sent)
    answer = read_to_end(sock)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert b"Traceback" not in answer and b"site-packages" not in answer


def test_many_idle_connections_do_not_keep_a_good_client_out(impatient: Service) -> None:
    idle = [socket.create_connection(impatient.address) for _ in range(300)]
    try:
        assert impatient.post("/v1/recommend", GOOD).status == 200
    finally:
        for connection in idle:
            connection.close()


def test_a_disconnect_frees_a_waiting_request(impatient: Service, sock: socket.socket) -> None:
    done = impatient.engine.stats().requests_done
    body = json.dumps(GOOD).encode()
    with impatient.held():
        sock.sendall(head("/v1/recommend", f"Content-Length: {len(body)}") + body)
        wait_until(lambda: impatient.engine.stats().requests_in_flight == 1)
        sock.close()
        wait_until(lambda: impatient.engine.stats().requests_in_flight == 0)
    assert impatient.post("/v1/recommend", GOOD).status == 200
    assert impatient.engine.stats().requests_done == done + 1  # only the good one
    text = impatient.get("/metrics").content.decode()
    assert 'widebeam_requests_total{outcome="cancelled",route="/v1/recommend"} 1.0' in text


def test_a_disconnect_frees_a_whole_batch(impatient: Service, sock: socket.socket) -> None:
    body = json.dumps({"input_ids": [[7], [8], [9]], "sampling_params": {"n": 2}}).encode()
    with impatient.held():
        sock.sendall(head("/generate", f"Content-Length: {len(body)}") + body)
        wait_until(lambda: impatient.engine.stats().requests_in_flight == 3)
        sock.close()
        wait_until(lambda: impatient.engine.stats().requests_in_flight == 0)


def test_half_a_body_then_gone(impatient: Service, sock: socket.socket) -> None:
    sock.sendall(head("/v1/recommend", "Content-Length: 100") + b'{"input_ids"')
    sock.close()
    assert impatient.get("/health").status == 200


def test_pipelined_requests_are_answered_in_order(sock: socket.socket) -> None:
    body = json.dumps(GOOD).encode()
    one = head("/v1/recommend", f"Content-Length: {len(body)}") + body
    sock.sendall(one + one + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answers = read_to_end(sock)
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    assert answers.index(b'"items"') < answers.index(b'"status"')
