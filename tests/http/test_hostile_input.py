"""Bytes that no good client sends: bombs, masses, depths, broken text, broken HTTP. A good client notices nothing."""

from __future__ import annotations

import contextlib
import gzip
import socket

import pytest

from tests.http.hostile import GOOD, read_to_end
from tests.http.service import Service

ROUTES = ("/v1/recommend", "/generate", "/v1/chat/completions")


def test_a_million_element_list_is_refused_by_its_size(impatient: Service) -> None:
    body = b'{"input_ids": [' + b"1," * 1_000_000 + b"1]}"
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server may close while we still send
        assert impatient.post("/v1/recommend", body).status == 413


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "gzip, identity"])
def test_a_compressed_body_is_refused_unopened(impatient: Service, encoding: str) -> None:
    bomb = gzip.compress(b'{"input_ids": [' + b" " * 8_000_000 + b"1]}")
    assert len(bomb) < 10_000
    answer = impatient.call("POST", "/v1/recommend", bomb, {"Content-Encoding": encoding})
    assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported_content_encoding")


MILLION = b"[" + b"1," * 999_999 + b"1]"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/recommend", b'{"input_ids": %s}', "input_ids"),
        ("/v1/recommend", b'{"history": %s}', "history"),
        ("/v1/recommend", b'{"input_ids": [1], "policy": {"name": "scheduled", "widths": %s}}', "policy.widths"),
        ("/generate", b'{"input_ids": %s}', "input_ids"),
        ("/generate", b'{"input_ids": [1], "sampling_params": {"stop_token_ids": %s}}', "sampling_params"),
        ("/generate", b'{"input_ids": [1], "return_logprob": %s}', "return_logprob"),
        ("/v1/chat/completions", b'{"messages": %s}', "messages"),
        ("/v1/chat/completions", b'{"input_ids": [1], "stop_token_ids": %s}', "stop_token_ids"),
    ],
)
def test_a_million_elements_are_refused_by_field(patient: Service, path: str, body: bytes, param: str) -> None:
    """Where the body may be so large."""
    answer = patient.post(path, body % MILLION)
    assert answer.status == 400
    assert (answer.json["error"]["param"] or "").startswith(param)


NESTED = {b"[": b"]", b'{"a":': b"}"}


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("opening", NESTED)
@pytest.mark.parametrize("around", [b"%s", b'{"input_ids": %s}', b'{"messages": [{"content": %s}]}', b'{"user": %s}'])
def test_deep_json_is_refused(patient: Service, around: bytes, opening: bytes, closed: bool) -> None:
    depth = 100_000
    body = around % (opening * depth + (b"1" + NESTED[opening] * depth if closed else b""))
    for path in ROUTES:
        assert patient.post(path, body).status == 400


NO_TEXT = [
    b'"a\x00b"',  # a NUL that is not escaped
    b'"\\ud800"',  # half of a pair
    b'"\\udfff\\ud800"',  # a pair in the wrong order
    b'"\xff\xfe"',
    b'"\xc3"',  # cut short
    b'"\xed\xa0\x80"',  # a surrogate in UTF-8
    b'"\xf8\x88\x80\x80\x80"',  # five bytes for one character
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/recommend", b'{"prompt": %s}'),
        ("/v1/recommend", b'{"history": [%s]}'),
        ("/v1/recommend", b'{"input_ids": [1], "catalog": %s}'),
        ("/generate", b'{"text": %s}'),
        ("/generate", b'{"input_ids": [1], "rid": %s}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": %s}]}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "user": %s}'),
        ("/v1/chat/completions", b"{%s: 1}"),
    ],
)
def test_what_is_no_text_is_refused(impatient: Service, path: str, body: bytes) -> None:
    for text in NO_TEXT:
        assert impatient.post(path, body % text).status == 400, text


def test_an_escaped_nul_is_text(impatient: Service) -> None:
    """It is a character; an unknown word to this tokenizer. In a name that travels in headers it is refused."""
    answer = impatient.post("/v1/recommend", {"prompt": "a \0 b", "n": 2})
    assert answer.status == 200
    assert answer.json["items"] == impatient.post("/v1/recommend", {"prompt": "a ? b", "n": 2}).json["items"]
    assert impatient.post("/v1/recommend", GOOD | {"request_id": "a\0"}).status == 400


@pytest.mark.parametrize("name", ["a\r\nSet-Cookie: b=1", "a\nb", "a\rb", "a\u2028b", "\x1b[2J", "\u00e9", "", " "])
def test_no_request_id_becomes_a_header_of_its_own(impatient: Service, name: str) -> None:
    for path, field in (("/v1/recommend", "request_id"), ("/generate", "rid"), ("/v1/chat/completions", "rid")):
        answer = impatient.post(path, {"input_ids": [7], field: name})
        assert answer.status == 400
        assert "set-cookie" not in answer.headers and answer.headers["x-request-id"].isalnum()


def test_no_path_becomes_a_header(sock: socket.socket) -> None:
    sock.sendall(b"GET /%0d%0aSet-Cookie:%20b=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = read_to_end(sock)
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"set-cookie" not in answer.partition(b"\r\n\r\n")[0].lower()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a plain port
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nabcde",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 5\r\n\r\nabcde",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 0x5\r\n\r\nabcde",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\nabcde",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\nabc",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + bytes(range(256)),
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: a\0b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\rSet-Cookie: b=1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\nSet-Cookie: b=1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\r\n Set-Cookie: b=1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /health\0 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\r\n".join([b"GET /health HTTP/1.1", *(b"x-%d: 1" % index for index in range(500)), b"", b""]),
    ],
)
def test_broken_http_gets_400_without_inner_details(sock: socket.socket, sent: bytes) -> None:
    sock.sendall(sent)
    answer = read_to_end(sock)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    lines, _, text = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(text) in lines.lower(), "something in it was taken for another request"
    assert b"set-cookie" not in lines.lower()
    assert b"Traceback" not in answer and b"site-packages" not in answer
