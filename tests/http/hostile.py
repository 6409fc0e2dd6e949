"""Raw sockets, and the good client that must not notice what others do with them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.http.service import Answer, Service, wait_until

GOOD = {"input_ids": [7, 11, 30], "n": 2}


@contextmanager
def unharmed(service: Service) -> Iterator[Service]:
    """Until the end of the block a good client asks again and again. All its answers are right, and nothing is left."""
    before = held(service)
    expected = [item["id"] for item in service.post("/v1/recommend", GOOD).json["items"]]
    over, asked = threading.Event(), threading.Event()
    wrong: list[Answer] = []

    def ask() -> None:
        while not over.wait(0.005):
            answer = service.post("/v1/recommend", GOOD)
            if answer.status != 200 or [item["id"] for item in answer.json["items"]] != expected:
                wrong.append(answer)
            asked.set()

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield service
        asked.clear()
        assert asked.wait(20), "the good client gets no answer any more"
    finally:
        over.set()
        client.join(30)
    assert not client.is_alive() and not wrong
    wait_until(lambda: all(now <= then for now, then in zip(held(service), before, strict=True)))
    assert service.get("/health").status == 200
    service.check()


def held(service: Service) -> tuple[int, ...]:
    """Open connections, tasks of the server's loop, and descriptors of this process."""

    async def count() -> tuple[int, int]:
        runner = service.server._runner.server
        assert runner is not None
        return len(runner.connections), len(asyncio.all_tasks())

    return (*service.thread.run(count()), len(os.listdir("/proc/self/fd")))


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
