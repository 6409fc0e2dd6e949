"""Texts that are sent while they grow: the parts add up to the answer in one piece."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.http.service import MODEL_NAME, Service, wait_until
from tests.http.test_generate import IDS, events, without_times
from widebeam.engine import search as search_module
from widebeam.engine.request import SearchResult

LENGTH = 100
MESSAGES: Any = [{"role": "user", "content": "watched a"}]
DRAWN: dict[str, Any] = {"n": 2, "max_new_tokens": LENGTH, "sampling_seed": 5, "ignore_eos": True}
TEXT_OF: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": LENGTH, "extra_body": {"ignore_eos": True}},
    "drawn": {"n": 2, "seed": 4, "max_tokens": LENGTH, "extra_body": {"ignore_eos": True}},
    "ends by itself": {"n": 3, "seed": 1, "max_tokens": LENGTH, "logit_bias": {"1": 1.5}},
    "stop string": {"seed": 4, "max_tokens": LENGTH, "stop": ["b a", "c c c"], "extra_body": {"ignore_eos": True}},
}


@pytest.fixture(scope="module")
def sdk(shared_bare_service: Service) -> Iterator[openai.OpenAI]:
    url = shared_bare_service.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as sdk:
        yield sdk


@pytest.mark.parametrize("kind", TEXT_OF)
def test_chunks_of_a_chat_add_up(bare_service: Service, sdk: openai.OpenAI, kind: str) -> None:
    asked: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES, "logprobs": True} | TEXT_OF[kind]
    plain = sdk.chat.completions.create(**asked)
    *chunks, last = sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert len(chunks) > 1 or max(len(choice.logprobs.content) for choice in plain.choices) <= 8  # type: ignore
    for choice in plain.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        tokens = [token for part in parts for token in (part.logprobs and part.logprobs.content) or ()]
        assert choice.logprobs is not None and tokens == choice.logprobs.content
    assert (last.choices, last.usage) == ([], plain.usage)
    assert {(chunk.id, chunk.created) for chunk in chunks} == {(last.id, last.created)}


@pytest.mark.parametrize("kind", TEXT_OF)
def test_chunks_of_completions_add_up(bare_service: Service, sdk: openai.OpenAI, kind: str) -> None:
    asked: dict[str, Any] = {"model": MODEL_NAME, "prompt": [IDS, [8]], "logprobs": 0} | TEXT_OF[kind]
    plain = sdk.completions.create(**asked)
    chunks = list(sdk.completions.create(**asked, stream=True))
    for choice in plain.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert choice.logprobs is not None
        for name, column in vars(choice.logprobs).items():
            pieces = [piece for part in parts if part.logprobs for piece in getattr(part.logprobs, name)]
            if name == "token_logprobs":
                assert pieces == pytest.approx(column, abs=1e-5)
            elif name != "top_logprobs":
                assert pieces == column, name


def test_usage_grows(bare_service: Service, sdk: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES} | TEXT_OF["drawn"]
    told = [chunk.usage for chunk in sdk.chat.completions.create(**asked, stream=True, stream_options=options)]
    counts = [usage.completion_tokens for usage in told if usage is not None]
    assert len(counts) == len(told) > 2 and counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 2 * LENGTH


def test_events_of_generate_have_all_so_far(bare_service: Service) -> None:
    body = {"input_ids": [IDS, [8]], "sampling_params": DRAWN, "return_logprob": True, "rid": "r"}
    plain = without_times(bare_service.post("/generate", body).json)
    seen = without_times(events(bare_service.post("/generate", body | {"stream": True})))
    assert len(seen) > 4
    for index, answer in enumerate(plain):
        *growing, last = [event for event in seen if event["index"] == index]
        assert last == answer | {"index": index}
        assert growing, "at least one before the last"
        for event in growing:
            length = len(event["output_ids"])
            assert 0 < length < LENGTH and length == event["meta_info"]["completion_tokens"]
            assert event["output_ids"] == answer["output_ids"][:length]
            assert answer["text"].startswith(event["text"])
            assert event["meta_info"]["finish_reason"] is None
            pairs = zip(
                event["meta_info"]["output_token_logprobs"], answer["meta_info"]["output_token_logprobs"], strict=False
            )
            assert all(logprob == pytest.approx(whole, abs=1e-5) for (logprob, *_), (whole, *_) in pairs)


@pytest.mark.parametrize("api", ["chat", "generate"])
def test_a_stop_string_ends_the_search(bare_service: Service, monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    """Streamed or not: no more is computed than to the piece in which the last text has one."""
    found: list[SearchResult] = []
    submit = bare_service.engine.submit

    async def noted(*args: Any, **kwargs: Any) -> SearchResult:
        found.append(await submit(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(bare_service.engine, "submit", noted)
    biased = {"logit_bias": {"9": 100}, "stop": "a a a", "ignore_eos": True}
    for stream in (False, True):
        if api == "generate":
            sampling = biased | {"max_new_tokens": 500}
            answer = bare_service.post("/generate", {"input_ids": IDS, "sampling_params": sampling, "stream": stream})
            last = events(answer)[-1] if stream else answer.json
            assert (last["text"], last["output_ids"]) == ("", [9, 9, 9])
        else:
            body = {"messages": MESSAGES, "max_tokens": 500, "stream": stream} | biased
            answer = bare_service.post("/v1/chat/completions", body)
            assert answer.status == 200 and b"a a" not in answer.content.replace(b"a a a", b"")
    assert [len(result.sequences[0].token_ids) < 500 for result in found] == [True, True]


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_an_error_in_the_middle_is_the_last_event(
    bare_service: Service, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    growing, looks = search_module.growing, []

    def failing(*args: Any) -> Any:
        looks.append(args)
        if len(looks) == 5:
            raise RuntimeError("of the test")
        return growing(*args)

    monkeypatch.setattr(search_module, "growing", failing)
    texts = {"temperature": 0, "ignore_eos": True}
    body = {
        "/generate": {"input_ids": IDS, "sampling_params": texts | {"max_new_tokens": LENGTH}},
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": LENGTH} | texts,
        "/v1/completions": {"prompt": IDS, "max_tokens": LENGTH} | texts,
    }[path]
    *seen, error = events(bare_service.post(path, body | {"stream": True}))
    assert error["error"]["code"] == "engine_error" and "error" not in seen[0]
    monkeypatch.undo()
    assert bare_service.post(path, body).status == 200


def test_who_goes_away_in_the_middle_is_forgotten(bare_service: Service) -> None:
    body = {"input_ids": IDS, "sampling_params": DRAWN | {"max_new_tokens": 500}, "stream": True}
    cancelled = ended(bare_service)
    connection = http.client.HTTPConnection(*bare_service.address, timeout=30)
    connection.request("POST", "/generate", json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    connection.sock.shutdown(socket.SHUT_RDWR) if connection.sock else None
    response.close()
    connection.close()
    wait_until(lambda: bare_service.engine.stats().requests_in_flight == 0)
    wait_until(lambda: ended(bare_service) == cancelled + 1)


def ended(service: Service) -> float:
    """Requests that nobody waited for."""
    lines = service.get("/metrics").content.decode().splitlines()
    found = [line for line in lines if line.startswith("widebeam_requests_total{") and 'outcome="cancelled"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_what_is_known_late_comes_in_one_event(bare_service: Service) -> None:
    """Likely tokens and beams by level are read when a search is over."""
    late: list[dict[str, Any]] = [{"return_logprob": True, "top_logprobs_num": 2}, {"return_beam_details": True}]
    for more in late:
        sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
        body = {"input_ids": IDS, "sampling_params": sampling, "rid": "l"} | more
        (event,) = events(bare_service.post("/generate", body | {"stream": True}))
        assert without_times(event) == without_times(bare_service.post("/generate", body).json)
