"""What no client may break: each bad request gets its status and code, and the next request works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.service import Answer, Service

IDS = [7, 11, 30]
LONG = [7] * 600  # the context is 512
RECOMMEND, GENERATE, CHAT = "/v1/recommend", "/generate", "/v1/chat/completions"


@pytest.fixture
def steady(service: Service) -> Iterator[Service]:
    """A service that still gives the same good answer after the test."""
    before = service.post(RECOMMEND, {"input_ids": IDS, "n": 3}).json["items"]
    yield service
    assert service.post(RECOMMEND, {"input_ids": IDS, "n": 3}).json["items"] == before


def sampling(**fields: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "sampling_params": fields}


CASES: list[tuple[str, Any, str, str | None]] = [
    # empty prompt
    (RECOMMEND, {"input_ids": []}, "empty_prompt", "input_ids"),
    (RECOMMEND, {"prompt": ""}, "empty_prompt", "prompt"),
    (RECOMMEND, {"messages": []}, "invalid_request", "messages"),
    (GENERATE, {"text": ""}, "empty_prompt", "text"),
    (GENERATE, {"input_ids": []}, "empty_prompt", "input_ids"),
    (CHAT, {"messages": []}, "invalid_request", "messages"),
    (CHAT, {"input_ids": []}, "empty_prompt", "input_ids"),
    (CHAT, {"input_ids": [], "messages": []}, "empty_prompt", "input_ids"),
    # no prompt, or two
    (RECOMMEND, {}, "invalid_request", "history"),
    (RECOMMEND, {"history": [], "prompt": "a"}, "invalid_request", "prompt"),
    # token ids
    (RECOMMEND, {"input_ids": [7, 64]}, "token_out_of_vocabulary", "input_ids"),
    (GENERATE, {"input_ids": [2**31 - 1]}, "token_out_of_vocabulary", "input_ids"),
    (CHAT, {"input_ids": [7, 9999]}, "token_out_of_vocabulary", "input_ids"),
    (GENERATE, {"input_ids": [-1]}, "invalid_request", "input_ids[0]"),
    (GENERATE, {"input_ids": [2**40]}, "invalid_request", "input_ids[0]"),
    (GENERATE, {"input_ids": [1.5]}, "invalid_request", "input_ids[0]"),
    # context
    (RECOMMEND, {"input_ids": LONG}, "context_too_long", "input_ids"),
    (RECOMMEND, {"input_ids": [7] * 510}, "context_too_long", "input_ids"),
    (GENERATE, {"input_ids": LONG}, "context_too_long", "input_ids"),
    (GENERATE, {"input_ids": LONG, "catalog": "none", "sampling_params": {"max_new_tokens": None, "temperature": 0}},
     "context_too_long", "input_ids"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 600}]}, "context_too_long", "messages"),
    # width
    (RECOMMEND, {"input_ids": IDS, "beam_width": 0}, "invalid_request", "beam_width"),
    (RECOMMEND, {"input_ids": IDS, "beam_width": 5001}, "invalid_request", "beam_width"),
    (RECOMMEND, {"input_ids": IDS, "beam_width": 5}, "invalid_request", "n"),
    (RECOMMEND, {"input_ids": IDS, "n": 0}, "invalid_request", "n"),
    (GENERATE, sampling(beam_width=0), "invalid_request", "sampling_params.beam_width"),
    (GENERATE, sampling(beam_width=4, n=5), "invalid_request", "sampling_params.n"),
    (GENERATE, sampling(beam_width=65) | {"catalog": "none"}, "beam_too_wide", "sampling_params.beam_width"),
    (GENERATE, sampling(n=65, temperature=0) | {"catalog": "none"}, "beam_too_wide", "sampling_params.n"),
    (GENERATE, {"input_ids": IDS, "beam_width": 65, "catalog": "none"}, "beam_too_wide", "beam_width"),
    (CHAT, {"input_ids": IDS, "n": 65, "temperature": 0, "catalog": "none"}, "beam_too_wide", "n"),
    # depth
    (GENERATE, sampling(n=2, max_new_tokens=2), "depth_mismatch", "sampling_params.max_new_tokens"),
    (CHAT, {"input_ids": IDS, "max_tokens": 2}, "depth_mismatch", "max_tokens"),
    (CHAT, {"input_ids": IDS, "max_completion_tokens": 2}, "depth_mismatch", "max_completion_tokens"),
    (RECOMMEND, {"input_ids": IDS, "policy": {"name": "scheduled", "widths": [4] * 4}}, "invalid_request",
     "policy.widths"),
    # names
    (RECOMMEND, {"input_ids": IDS, "catalog": "ghost"}, "unknown_catalog", "catalog"),
    (GENERATE, {"input_ids": IDS, "catalog": "ghost"}, "unknown_catalog", "catalog"),
    (RECOMMEND, {"input_ids": IDS, "policy": {"name": "ghost"}}, "unknown_policy", "policy.name"),
    (CHAT, {"input_ids": IDS, "policy": {"name": "ghost"}}, "unknown_policy", "policy.name"),
    (RECOMMEND, {"input_ids": IDS, "normalizer": "softmax"}, "invalid_request", "normalizer"),
    (RECOMMEND, {"input_ids": IDS, "fields": ["ghost"]}, "unknown_field", "fields"),
    (RECOMMEND, {"input_ids": IDS, "policy": {}}, "invalid_request", "policy.name"),
    # fields that a dialect does not have
    (RECOMMEND, {"input_ids": IDS, "sampling_params": {}}, "unknown_field", "sampling_params"),
    (RECOMMEND, {"input_ids": IDS, "policy": {"name": "fixed", "width": 3}}, "unknown_field", "policy.width"),
    (GENERATE, {"input_ids": IDS, "n": 4}, "unknown_field", "n"),
    (GENERATE, sampling(length_penalty=1.0), "unknown_field", "sampling_params.length_penalty"),
    (CHAT, {"input_ids": IDS, "sampling_params": {}}, "unknown_field", "sampling_params"),
    # ids and times
    (RECOMMEND, {"input_ids": IDS, "request_id": "two\nlines"}, "invalid_request", "request_id"),
    (RECOMMEND, {"input_ids": IDS, "request_id": "id\n"}, "invalid_request", "request_id"),
    (GENERATE, {"input_ids": IDS, "rid": "x" * 129}, "invalid_request", "rid"),
    (RECOMMEND, {"input_ids": IDS, "timeout_ms": 0}, "invalid_request", "timeout_ms"),
    (RECOMMEND, {"input_ids": IDS, "length_penalty": 17}, "invalid_request", "length_penalty"),
    (RECOMMEND, {"history": [{"id": 1}]}, "invalid_request", "history[0]"),
    (RECOMMEND, {"history": [2**64]}, "invalid_request", "history[0]"),
    (RECOMMEND, [], "invalid_request", None),
    # bytes
    (RECOMMEND, b"", "malformed_json", None),
    (GENERATE, b'{"input_ids": [1,', "malformed_json", None),
    (CHAT, b'\xef\xbb\xbf{"input_ids": [1]}', "malformed_json", None),
    (CHAT, b"not json", "malformed_json", None),
    (RECOMMEND, b'{"prompt": "\xff\xfe"}', "malformed_utf8", None),
    (GENERATE, b'{"text": "\\udc00"}', "malformed_json", None),
    (RECOMMEND, b'{"input_ids": [1], "length_penalty": NaN}', "malformed_json", None),
    (RECOMMEND, b'{"input_ids": [1], "length_penalty": 1e999}', "invalid_request", "length_penalty"),
    (GENERATE, b'{"input_ids": [1], "sampling_params": {"temperature": Infinity}}', "malformed_json", None),
    (CHAT, b'{"input_ids": [1], "top_p": -Infinity}', "malformed_json", None),
    (GENERATE, b'{"input_ids": ' + b"[" * 100_000, "invalid_request", "input_ids[0][0]"),
    (CHAT, b'{"tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "malformed_json", None),
]  # fmt: skip


def error_of(answer: Answer, path: str) -> dict[str, Any]:
    """The error, after checking that it has the shape of its dialect."""
    body = answer.json
    if path == CHAT:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    else:
        error = body["error"]
        assert set(error) == {"message", "type", "code", "param", "request_id", "retryable"}
        assert error["request_id"] == answer.headers["x-request-id"]
    if path == GENERATE:  # readable in SGLang's flat form too
        assert (body["object"], body["code"], body["message"]) == ("error", answer.status, body["error"]["message"])
    return body["error"]


@pytest.mark.parametrize(("path", "body", "code", "param"), CASES)
def test_bad_requests(steady: Service, path: str, body: Any, code: str, param: str | None) -> None:
    answer = steady.post(path, body)
    assert answer.status == (404 if code == "unknown_catalog" else 400), answer.content
    error = error_of(answer, path)
    assert (error["code"], error["param"]) == (code, param)
    if code == "depth_mismatch":
        assert error["message"].startswith(f"{param} is 2, but items of catalog")
    assert error["message"] and "Traceback" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (RECOMMEND, {"input_ids": IDS, "request_id": "a b"}, "request_id: expected str of 1 to 128 visible ASCII"),
        (GENERATE, {"input_ids": IDS, "rid": ["a"]}, "rid is a list of 1, where prompts are one, not a list"),
        (GENERATE, {"input_ids": [IDS, IDS], "rid": ["a"]}, "rid is a list of 1, where prompts are a list of 2"),
        (GENERATE, {"input_ids": [IDS], "return_logprob": [True] * 2}, "is a list of 2, where prompts are a list of 1"),
        (CHAT, b"\xef\xbb\xbf{}", "it begins with a byte order mark"),
        (
            GENERATE,
            {
                "input_ids": IDS,
                "catalog": "none",
                "sampling_params": {"max_new_tokens": 1},
                "policy": {"name": "scheduled", "widths": [2, 3]},
            },
            "policy.widths has 2 widths, but the search has 1 level",
        ),
    ],
)
def test_messages_say_it_in_words(steady: Service, path: str, body: Any, words: str) -> None:
    assert words in error_of(steady.post(path, body), path)["message"]


@pytest.mark.parametrize("path", [RECOMMEND, GENERATE, CHAT])
def test_oversized_bodies(steady: Service, path: str) -> None:
    limit = steady.server._config.max_body_bytes
    fitting = json.dumps({"input_ids": IDS, "catalog": "items"}).encode().ljust(limit)
    assert steady.post(path, fitting).status == 200
    answer = steady.post(path, fitting + b" ")
    assert answer.status == 413
    assert error_of(answer, path)["code"] == "payload_too_large"
    assert str(limit) in error_of(answer, path)["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "nonsense"])
def test_compressed_bodies_are_refused_unread(steady: Service, encoding: str) -> None:
    answer = steady.post(RECOMMEND, b"\x1f\x8b\x08\x00", {"Content-Encoding": encoding})
    assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported_content_encoding")


def test_a_deadline_that_passes(steady: Service) -> None:
    with steady.held():
        answer = steady.post(RECOMMEND, {"input_ids": IDS, "timeout_ms": 30})
    assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")


def test_text_that_is_odd_but_legal(steady: Service) -> None:
    for text in ("a \u0000 b", "\ufeffa", "e\u0301 \U0001f600 \u202e a"):
        assert steady.post(GENERATE, {"text": text, "sampling_params": {"n": 2}}).status == 200


def test_unknown_routes_and_methods(steady: Service) -> None:
    missing = steady.get("/v2/recommend")
    assert (missing.status, missing.json["error"]["code"]) == (404, "no_such_route")
    assert missing.json["error"]["message"] == "there is no /v2/recommend; did you mean '/v1/recommend'?"
    wrong = steady.get(RECOMMEND)
    assert (wrong.status, wrong.json["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert error_of(steady.call("DELETE", GENERATE), GENERATE)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/recommend", "'/v1/recommend'"),
        ("/v1/v1/models", "'/v1/models'"),
        ("/v1/recommend/", "'/v1/recommend'"),
        ("/v1/models/", "'/v1/models'"),
        ("/chat/completions", "'/v1/chat/completions'"),
        ("/v1/generate", "'/generate'"),
        ("/v1/catalogs/items/item", "'/v1/catalogs/{name}/items'"),
        ("/model", "'/model_info'"),
        ("/get", "'/get_model_info' or '/get_server_info'"),
    ],
)
def test_a_path_close_to_a_route_leads_there(steady: Service, path: str, meant: str) -> None:
    answer = steady.post(path, {})
    assert (answer.status, answer.json["error"]["code"]) == (404, "no_such_route")
    assert answer.json["error"]["message"] == f"there is no {path}; did you mean {meant}?"


FAR = [
    "/",
    "/v1",
    "/v1/v1/",
    "/v1/embeddings",
    "/v1/responses",
    "/rerank",
    "/score",
    "/docs",
    "/" + "v1/recommend" * 600,
]


@pytest.mark.parametrize("path", FAR)
def test_a_path_far_from_all_routes_leads_nowhere(steady: Service, path: str) -> None:
    assert steady.get(path).json["error"]["message"] == f"there is no {path}"


def test_request_ids_come_back(steady: Service) -> None:
    given = steady.post(RECOMMEND, {"input_ids": IDS}, {"X-Request-Id": "gateway-7"})
    assert given.headers["x-request-id"] == given.json["id"] == "gateway-7"
    both = steady.post(RECOMMEND, {"input_ids": IDS, "request_id": "mine"}, {"X-Request-Id": "gateway-8"})
    assert (both.headers["x-request-id"], both.json["id"]) == ("gateway-8", "mine")
    failed = steady.post(RECOMMEND, {"input_ids": [], "request_id": "mine"})
    assert failed.headers["x-request-id"] == failed.json["error"]["request_id"] == "mine"
    made_up = {steady.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(made_up) == 2
    odd = steady.call("GET", "/health", headers={"X-Request-Id": "x" * 129})
    assert (odd.status, odd.json["error"]["param"]) == (400, "x-request-id")
