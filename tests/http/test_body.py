"""Decoding: what is refused, how it is named, and which values ask for nothing."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from widebeam.errors import InvalidRequest
from widebeam.http.body import Neutral, decode, known_fields, refuse_unsupported
from widebeam.http.catalog_protocol import RollBack
from widebeam.http.openai import ChatRequest
from widebeam.http.protocol import RecommendRequest
from widebeam.http.sglang import GenerateRequest

OFF: Neutral = {"grammar": (), "offset": (-1,), "metrics": (True,)}


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    width: int = 1


@known_fields(OFF, labels=("tag",))
class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    n: Annotated[int, Meta(ge=1, le=8)] = 1
    rate: float | None = None
    text: str | None = None
    inner: Inner | None = None
    items: list[Inner] = []


DECODER = msgspec.json.Decoder(Body)


def refusal(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        refuse_unsupported(decode(DECODER, body), OFF)
    return caught.value


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"n": 9}', "invalid_request", "n"),
        (b'{"n": "1"}', "invalid_request", "n"),
        (b'{"n": 1.5}', "invalid_request", "n"),
        (b'{"n": ' + b"9" * 4000 + b"}", "invalid_request", "n"),
        (b'{"rate": 1e999}', "invalid_request", "rate"),
        (b'{"rate": NaN}', "malformed_json", None),
        (b'{"rate": -Infinity}', "malformed_json", None),
        (b'{"items": [{}, {"width": null}]}', "invalid_request", "items[1].width"),
        (b'{"witdh": 1}', "unknown_field", "witdh"),
        (b'{"inner": {"widht": 1}}', "unknown_field", "inner.widht"),
        (b"[]", "invalid_request", None),
        (b"", "malformed_json", None),
        (b'{"n": 1', "malformed_json", None),
        (b'{"n": 1} {}', "malformed_json", None),
        (b'{"text": "\\ud800"}', "malformed_json", None),
        (b'{"text": "\xff"}', "malformed_utf8", None),
        (b'{"tag": "\xc3\x28"}', "malformed_utf8", None),
        (b'{"grammar": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "malformed_json", None),
        (b'{"grammar": ' + b"[" * 200 + b"]" * 200 + b"}", "unsupported_field", "grammar"),
        (b'{"grammar": "\\ud800"}', "malformed_json", None),
        (b'{"grammar": 1e999}', "unsupported_field", "grammar"),
    ],
)
def test_refusals_name_the_field(body: bytes, code: str, param: str | None) -> None:
    error = refusal(body)
    assert (error.code, error.param) == (code, param)


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (Body, {"metric": True}, "unknown field 'metric'; did you mean 'metrics'?"),
        (Body, {"items": [{}, {"widht": 2}]}, "unknown field 'items[1].widht'; did you mean 'width'?"),
        (ChatRequest, {"beam": 3}, "unknown field 'beam'; did you mean 'beam_width'?"),
        (GenerateRequest, {"sampling_params": {"beam": 3}},
         "unknown field 'sampling_params.beam'; did you mean 'beam_width'?"),
        (GenerateRequest, {"n": 3}, "unknown field 'n'; did you mean 'sampling_params.n'?"),
        (GenerateRequest, {"max_tokens": 3},
         "unknown field 'max_tokens'; did you mean 'sampling_params.max_new_tokens'?"),
        (GenerateRequest, {"prompt": "a"}, "unknown field 'prompt'; did you mean 'text'?"),
        (RecommendRequest, {"deny": [3]}, "unknown field 'deny'; did you mean 'filters.deny'?"),
        (RecommendRequest, {"items": [3]}, "unknown field 'items'; did you mean 'history'?"),
        (RecommendRequest, {"beam": 3}, "unknown field 'beam'; did you mean 'beam_width'?"),
        (RecommendRequest, {"k": 3}, "unknown field 'k'; did you mean 'n' or 'beam_width'?"),
        (RecommendRequest, {"top_k": 3}, "unknown field 'top_k'; did you mean 'n' or 'beam_width'?"),
        (RecommendRequest, {"zzz": 3}, "unknown field 'zzz'"),
    ],
)  # fmt: skip
def test_an_unknown_field_gets_a_hint(kind: type[msgspec.Struct], body: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(msgspec.json.Decoder(kind), msgspec.json.encode(body))
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (RecommendRequest, {"normalizer": "softmax"}, "normalizer",
         "normalizer: 'softmax' is none of: legal, level, vocab"),
        (RecommendRequest, {"filters": {"where": [{"column": "a", "op": "~", "value": 1}]}}, "filters.where[0].op",
         "filters.where[0].op: '~' is none of: !=, <, <=, ==, >, >=, contains, in, not_in"),
        (ChatRequest, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role",
         "messages[0].role: 'tool' is none of: assistant, system, user"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]},
         "messages[0].content[0].type", "messages[0].content[0].type: 'image' is none of: text"),
        (RollBack, {}, "version", "version: it must be given"),
        (RecommendRequest, {"n": 0}, "n", "n: expected int >= 1"),
        (RollBack, [], None, "expected object, got array"),
    ],
)  # fmt: skip
def test_refusals_say_what_would_be_right(
    kind: type[msgspec.Struct], body: Any, param: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(msgspec.json.Decoder(kind), msgspec.json.encode(body))
    assert (caught.value.param, caught.value.message) == (param, message)


def test_a_body_that_ends_too_early_is_told_from_none() -> None:
    assert refusal(b" ").message == "the body is not valid JSON: it is empty"
    assert refusal(b'{"n": ').message == "the body is not valid JSON: it ends too early"


@pytest.mark.parametrize("value", ["null", "false", '""', "[]", "{}", "[null, false]"])
@pytest.mark.parametrize("name", ["grammar", "offset"])
def test_values_that_ask_for_nothing(name: str, value: str) -> None:
    refuse_unsupported(decode(DECODER, f'{{"{name}": {value}}}'.encode()), OFF)


@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        ("offset", "-1", True),
        ("offset", "[-1, -1, null]", True),
        ("offset", "0", False),
        ("offset", "[-1, 3]", False),
        ("metrics", "true", True),
        ("metrics", "null", True),
        ("metrics", "1", False),
        ("metrics", "false", False),
        ("grammar", "0", False),
        ("grammar", "true", False),
        ("grammar", '"x"', False),
        ("grammar", '{"x": 1}', False),
    ],
)
def test_values_of_fields_without_effect(name: str, value: str, fine: bool) -> None:
    body = f'{{"{name}": {value}}}'.encode()
    if fine:
        refuse_unsupported(decode(DECODER, body), OFF)
    else:
        error = refusal(body)
        assert (error.code, error.param) == ("unsupported_field", name)


def test_a_label_may_hold_anything() -> None:
    refuse_unsupported(decode(DECODER, b'{"tag": {"team": ["a", 1]}}'), OFF)
