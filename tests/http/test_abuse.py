"""Raw sockets: what a hostile or broken client does to a connection, and what a good client still gets meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.http.hostile import GOOD, error_code, head, held, read_answer, read_to_end
from tests.http.service import Service, wait_until


@pytest.fixture
def undisturbed(shared_impatient: Service) -> Iterator[Service]:
    """Without a good client, to count requests."""
    yield shared_impatient
    assert shared_impatient.post("/v1/recommend", GOOD).status == 200
    shared_impatient.check()


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


def test_trickled_headers_do_not_keep_a_connection(sock: socket.socket) -> None:
    """However steadily they come, all of them must have come when an idle connection would be closed."""
    sock.settimeout(0.02)
    sent = 0
    with contextlib.suppress(ConnectionError):
        for byte in head("/v1/recommend", "X-Slow: " + "a" * 5000):
            sock.sendall(bytes([byte]))
            sent += 1
            with contextlib.suppress(TimeoutError):
                assert sock.recv(1) == b""
                break
    assert sent < 1000


def test_a_client_that_never_reads_holds_up_nobody(patient: Service) -> None:
    """Its answers fill the buffers of both sides, and the rest stays unsent until it goes."""
    body = json.dumps({"input_ids": [7], "n": 60, "beam_width": 60, "fields": ["title"]}).encode()
    with socket.create_connection(patient.address, timeout=15) as sock:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(400):
                sock.send(head("/v1/recommend", f"Content-Length: {len(body)}") + body)
        for _ in range(20):
            assert patient.post("/v1/recommend", GOOD).status == 200


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


def test_idle_connections_do_not_keep_a_good_client_out(patient: Service) -> None:
    """Two thousand, or as many as this process may open both ends of."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    allowed = (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd")) - 100) // 2
    assert allowed >= 500
    sent = (b"", b"P", head("/v1/recommend", "Content-Length: 100"))  # the last one is waited for: it has begun
    with contextlib.ExitStack() as stack:
        try:
            for index in range(min(2000, allowed)):
                idle = stack.enter_context(socket.create_connection(patient.address, timeout=20))
                idle.sendall(sent[index % 3 if index < 300 else index % 2])
            for _ in range(20):
                assert patient.post("/v1/recommend", GOOD).status == 200
            assert held(patient)[0] >= min(2000, allowed)
        finally:
            stack.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_disconnect_frees_a_waiting_request(undisturbed: Service) -> None:
    done = undisturbed.engine.stats().requests_done
    body = json.dumps(GOOD).encode()
    with undisturbed.held(), socket.create_connection(undisturbed.address, timeout=15) as sock:
        sock.sendall(head("/v1/recommend", f"Content-Length: {len(body)}") + body)
        wait_until(lambda: undisturbed.engine.stats().requests_in_flight == 1)
        sock.close()
        wait_until(lambda: undisturbed.engine.stats().requests_in_flight == 0)
    assert undisturbed.post("/v1/recommend", GOOD).status == 200
    assert undisturbed.engine.stats().requests_done == done + 1  # only the good one
    text = undisturbed.get("/metrics").content.decode()
    assert 'widebeam_requests_total{outcome="cancelled",route="/v1/recommend"} 1.0' in text


def test_a_disconnect_frees_a_whole_batch(undisturbed: Service) -> None:
    body = json.dumps({"input_ids": [[7], [8], [9]], "sampling_params": {"n": 2}}).encode()
    with undisturbed.held(), socket.create_connection(undisturbed.address, timeout=15) as sock:
        sock.sendall(head("/generate", f"Content-Length: {len(body)}") + body)
        wait_until(lambda: undisturbed.engine.stats().requests_in_flight == 3)
        sock.close()
        wait_until(lambda: undisturbed.engine.stats().requests_in_flight == 0)


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


def test_a_flood_of_pipelined_requests(impatient: Service, sock: socket.socket) -> None:
    """They wait their turn on their own connection, and one that comes behind the last is answered as well."""
    count = 500
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    sender = threading.Thread(
        target=sock.sendall, args=(one * count + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),)
    )
    sender.start()
    assert read_to_end(sock).count(b"HTTP/1.1 200 OK") == count + 1
    sender.join(10)
