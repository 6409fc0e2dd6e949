"""The log: one line a request, in two forms, without secrets and without a way to forge a line."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.http.service import Service, running_service, wait_until
from widebeam.engine.spawn import Line, pass_on
from widebeam.http.logs import JsonFormatter, TextFormatter

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-secret-key-0123456789"
RECOMMEND = "/v1/recommend"
TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO widebeam\.http: (.*)")


class Log:
    """What the server's log would be, in both forms."""

    def __init__(self) -> None:
        self._streams = {"text": io.StringIO(), "json": io.StringIO()}
        self.handlers = []
        for form, formatter in (("text", TextFormatter()), ("json", JsonFormatter())):
            handler = logging.StreamHandler(self._streams[form])
            handler.setFormatter(formatter)
            handler.setLevel(logging.INFO)
            self.handlers.append(handler)

    def text(self) -> list[str]:
        return self._streams["text"].getvalue().splitlines()

    def json(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._streams["json"].getvalue().splitlines()]

    def wait(self, lines: int) -> list[dict[str, Any]]:
        """A line is written after its answer was sent."""
        wait_until(lambda: len(self.json()) >= lines)
        assert len(self.json()) == len(self.text()) == lines
        return self.json()


@pytest.fixture
def log() -> Iterator[Log]:
    root = logging.getLogger()
    before, made = root.level, Log()
    root.setLevel(logging.DEBUG)
    for handler in made.handlers:
        root.addHandler(handler)
    yield made
    for handler in made.handlers:
        root.removeHandler(handler)
    root.setLevel(before)


def test_a_search_is_one_line_with_its_facts(service: Service, log: Log) -> None:
    body = {"history": ["item-3", "item-5"], "n": 2, "beam_width": 16, "request_id": "abc"}
    answer = service.post(RECOMMEND, body).json
    (line,) = log.wait(1)
    assert {key: line[key] for key in line if not key.endswith("_ms")} == {
        "time": line["time"],
        "level": "info",
        "logger": "widebeam.http",
        "method": "POST",
        "route": RECOMMEND,
        "status": 200,
        "outcome": "ok",
        "request_id": "abc",
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "cached_tokens": 0,
        "width": 16,
        "levels": 3,
        "catalog": "items",
        "version": 1,
    }
    told = answer["timing_ms"]
    for phase in ("queue", "prefill", "decode"):
        assert line[f"{phase}_ms"] == pytest.approx(told[phase], abs=1e-3)
    assert line["engine_ms"] == pytest.approx(told["total"], abs=1e-3) and line["total_ms"] >= line["engine_ms"]
    text = TEXT_LINE.fullmatch(log.text()[0])
    assert text is not None
    head, *facts = text[1].split(" ")[3:]
    assert text[1].startswith(f"POST {RECOMMEND} 200 ok ") and head == "ok"
    assert dict(fact.split("=") for fact in facts) == {
        key: str(value)
        for key, value in line.items()
        if key not in ("time", "level", "logger", "method", "route", "status", "outcome")
    }


def test_a_batch_is_one_line_of_sums_and_maxima(service: Service, log: Log) -> None:
    sampling = [{"beam_width": 4, "n": 1}, {"beam_width": 9, "n": 1}, {}]
    answers = service.post("/generate", {"input_ids": [[7], [8, 9], [7]], "sampling_params": sampling, "rid": "b"}).json
    (line,) = log.wait(1)
    assert (line["request_id"], line["prompt_tokens"], line["width"], line["levels"]) == ("b", 4, 9, 3)
    assert sum(answer["meta_info"]["prompt_tokens"] for answer in answers) == 4


def test_a_width_for_each_level_is_told_by_its_largest(service: Service, log: Log) -> None:
    policy = {"name": "scheduled", "widths": [2, 12, 5]}
    assert service.post("/v1/chat/completions", {"input_ids": [7], "policy": policy}).status == 200
    (line,) = log.wait(1)
    assert (line["route"], line["width"], line["levels"]) == ("/v1/chat/completions", 12, 3)


def test_failures_have_a_line_with_their_code(service: Service, log: Log) -> None:
    refused = [
        (("POST", RECOMMEND, {"beamwidth": 3}), (RECOMMEND, 400, "invalid_request", "unknown_field")),
        (("GET", "/nowhere", None), ("unmatched", 404, "not_found", "no_such_route")),
        (("GET", RECOMMEND, None), ("unmatched", 405, "method_not_allowed", "method_not_allowed")),
        (("GET", "/v1/models/other", None), ("/v1/models/{id}", 404, "not_found", "model_not_found")),
    ]
    for count, (call, expected) in enumerate(refused, 1):
        service.call(*call)
        line = log.wait(count)[-1]
        assert (line["route"], line["status"], line["outcome"], line["code"]) == expected


def test_a_client_that_goes_away_has_a_line(service: Service, log: Log) -> None:
    body = json.dumps({"input_ids": [7]}).encode()
    with service.held():
        with socket.create_connection(service.address, timeout=10) as sock:
            sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: service.engine.stats().requests_in_flight == 1)
        (line,) = log.wait(1)
    assert (line["route"], line["status"], line["outcome"]) == ("/generate", 499, "cancelled")


def test_what_is_read_well_is_not_logged_but_at_debug(service: Service, log: Log) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        assert service.get(path).status == 200
    service.get("/nowhere")
    assert [line["route"] for line in log.wait(1)] == ["unmatched"]
    for handler in log.handlers:
        handler.setLevel(logging.DEBUG)
    service.get("/health")
    wait_until(lambda: len(log.json()) >= 2)
    assert [(line["route"], line["level"]) for line in log.json()][1:] == [("/health", "debug")]


def test_parallel_requests_have_a_line_each(service: Service, log: Log) -> None:
    with ThreadPoolExecutor(8) as pool:
        posts = [pool.submit(service.post, RECOMMEND, {"input_ids": [7], "request_id": f"r{i}"}) for i in range(40)]
        assert {post.result(30).status for post in posts} == {200}
    assert sorted(line["request_id"] for line in log.wait(40)) == sorted(f"r{i}" for i in range(40))


SECRETS = ("my-private-prompt", "item-private", KEY)


@pytest.fixture(scope="module")
def closed(checkpoint: Path, catalog_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEY)
    file.chmod(0o600)
    with running_service(checkpoint, catalog_file, api_key_file=str(file)) as service:
        yield service


def test_prompts_items_and_keys_are_never_logged(closed: Service, log: Log) -> None:
    """Neither those that are used nor those that are wrong, whatever is wrong with them."""
    for handler in log.handlers:
        handler.setLevel(logging.DEBUG)
    good, bad = {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"Bearer {KEY}-wrong"}
    bodies: list[tuple[str, Any]] = [
        (RECOMMEND, {"prompt": "my-private-prompt"}),
        (RECOMMEND, {"history": ["item-private", "item-3"]}),
        (RECOMMEND, {"history": ["item-private"], "unknown_items": "refuse"}),
        (RECOMMEND, {"history": ["item-3"], "my-private-prompt": 1}),
        (RECOMMEND, {"history": ["item-3"], "catalog": "my-private-prompt"}),
        (RECOMMEND, b'{"prompt": my-private-prompt}'),
        ("/generate", {"text": "my-private-prompt"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "my-private-prompt"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "my-private-prompt", "content": ""}]}),
        ("/my-private-prompt", {}),
    ]
    for path, body in bodies:
        closed.post(path, body, good)
        closed.post(path, body, bad)
    assert closed.call("GET", "/server_info", headers=good).status == 200
    broken = [
        f"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\0\r\n\r\n",
        f"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization Bearer {KEY}\r\n\r\n",
        f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nAuthorization: Bearer {KEY}\r\n\r\n",
        f"my-private-prompt {KEY}\r\n\r\n",
        f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
        "my-private-prompt\r\n\r\n",
        f"GET /?{KEY} HTTP/9\r\n\r\n",
    ]
    for request in broken:
        with socket.create_connection(closed.address, timeout=10) as sock:
            sock.sendall(request.encode())
            assert sock.recv(4096).split()[1] in (b"400", b"401")
    wait_until(lambda: len(log.json()) >= 2 * len(bodies) + 1 + len(broken))
    assert not [line for line in log.text() if any(secret in line for secret in SECRETS)]
    assert not [line for line in log.json() if any(secret in str(line) for secret in SECRETS)]
    assert any("broken HTTP" in line.get("message", "") for line in log.json())


def test_no_id_can_forge_a_line(service: Service, log: Log) -> None:
    forged = "x\n2026-01-01 00:00:00,000 INFO widebeam.http: POST /v1/recommend 200 ok"
    for rid in (forged, "x\r", "x\x85", "x\u2028y", "x\x1b[31m", "x\0"):
        assert service.post(RECOMMEND, {"input_ids": [7], "request_id": rid}).status == 400
        assert service.post("/generate", {"input_ids": [7], "rid": rid}).status == 400
    lines = log.wait(12)
    assert {line["outcome"] for line in lines} == {"invalid_request"}
    assert all(re.fullmatch("[0-9a-f]{32}", line["request_id"]) for line in lines)
    assert all(TEXT_LINE.fullmatch(line) for line in log.text())


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb\t", "\x1b[2J", "\u2028", "\ud800", "\x00\x7f\x85", "ä 100% {}"])
def test_any_text_is_one_line_in_both_forms(log: Log, text: str) -> None:
    logging.getLogger("widebeam.engine").warning("catalog %s", text)
    (line,) = log.wait(1)
    assert (line["level"], line["logger"]) == ("warning", "widebeam.engine")
    assert log.text()[0].endswith(" WARNING widebeam.engine: " + line["message"])
    if text.isprintable():
        assert line["message"] == f"catalog {text}"


def test_an_exception_is_part_of_the_object(log: Log) -> None:
    try:
        raise ValueError("what \ud800 went wrong")
    except ValueError:
        logging.getLogger("widebeam.engine").exception("it failed")
    (line,) = log.json()
    assert line["message"] == "it failed" and line["level"] == "error"
    assert line["exception"].startswith("Traceback") and "test_logs.py" in line["exception"]
    assert log.text()[0].endswith("it failed") and log.text()[1].startswith("Traceback")


def test_other_ranks_speak_in_the_same_form(log: Log) -> None:
    said = Line("widebeam.engine.follower", logging.ERROR, "out of step", "Traceback (most recent call last):\n  ..")
    pass_on(3, msgspec.json.encode(said) + b"\n")
    pass_on(3, b'{"logger": "widebeam')  # it was killed
    whole, half = log.json()
    assert (whole["logger"], whole["level"], whole["message"]) == (said.logger, "error", "rank 3: out of step")
    assert whole["exception"] == said.exception
    assert (half["level"], half["message"]) == ("warning", 'rank 3: {"logger": "widebeam')
    assert log.text()[1].startswith("Traceback")


PROGRAM = """
import logging, sys, warnings
from widebeam.http.logs import configure
configure("info", sys.argv[1])
logging.getLogger("widebeam.engine").info("one %s", "line")
logging.getLogger("widebeam.engine").debug("too low")
logging.getLogger("somebody.else").warning("two")
warnings.warn("three")
"""


def test_the_whole_process_logs_in_one_form() -> None:
    def lines(form: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, form], capture_output=True, text=True, check=True, cwd=ROOT
        )
        assert done.stdout == ""
        return done.stderr.splitlines()

    found = [json.loads(line) for line in lines("json")]
    assert [(line["level"], line["logger"]) for line in found] == [
        ("info", "widebeam.engine"), ("warning", "somebody.else"), ("warning", "py.warnings"),
    ]  # fmt: skip
    assert found[0]["message"] == "one line" and "three" in found[2]["message"]
    assert all(datetime.fromisoformat(line["time"]).tzinfo is not None for line in found)
    assert [line.split(" ", 2)[2] for line in lines("text")[:2]] == [
        "INFO widebeam.engine: one line", "WARNING somebody.else: two",
    ]  # fmt: skip
