"""POST /v1/chat/completions, tried with the real OpenAI SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.http.service import MODEL_NAME, Service
from widebeam.engine.request import SearchParams

MESSAGES: list[Any] = [{"role": "system", "content": "a"}, {"role": "user", "content": "watched <a_0> <b_1> <c_2>"}]


@pytest.fixture
def sdk(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def expected(service: Service, **params: Any) -> Any:
    ids = service.thread.run(service.engine.render_chat(MESSAGES))
    return service.thread.run(service.engine.submit(ids, SearchParams(**params)))


def test_golden_answer(service: Service) -> None:
    body = {"model": "whatever", "messages": MESSAGES, "n": 3, "beam_width": 8, "rid": "chat-1"}
    answer = service.post("/v1/chat/completions", body)
    assert answer.status == 200
    found = answer.json
    assert set(found) == {"id", "object", "created", "model", "choices", "usage"}
    assert (found["id"], found["object"], found["model"]) == ("chat-1", "chat.completion", "whatever")
    want = expected(service, n=3, beam_width=8)
    assert found["usage"] == {
        "prompt_tokens": want.prompt_tokens,
        "completion_tokens": 9,
        "total_tokens": want.prompt_tokens + 9,
    }
    assert found["choices"] == [
        {
            "index": index,
            "finish_reason": "stop",
            "sglext": {"sequence_score": pytest.approx(sequence.score, abs=1e-5), "normalizer": "level"},
            "message": {"role": "assistant", "content": service.engine.decode(sequence.token_ids), "refusal": None},
            "logprobs": None,
        }
        for index, sequence in enumerate(want.sequences)
    ]


def test_sdk_gets_beams_as_choices(service: Service, sdk: openai.OpenAI) -> None:
    completion = sdk.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, n=4, max_completion_tokens=3, extra_body={"use_beam_search": True}
    )
    want = expected(service, n=4, beam_width=4)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    texts = [service.engine.decode(sequence.token_ids) for sequence in want.sequences]
    assert [choice.message.content for choice in completion.choices] == texts
    scores = [choice.sglext["sequence_score"] for choice in completion.choices]  # type: ignore[attr-defined]
    assert scores == sorted(scores, reverse=True)
    assert completion.usage is not None and completion.usage.completion_tokens == 12


def test_sdk_reads_logprobs(service: Service, sdk: openai.OpenAI) -> None:
    completion = sdk.chat.completions.create(model="m", messages=MESSAGES, n=2, logprobs=True, temperature=0)
    for choice, sequence in zip(completion.choices, expected(service, n=2, beam_width=2).sequences, strict=True):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        content = choice.logprobs.content
        assert [entry.logprob for entry in content] == pytest.approx(sequence.logprobs, abs=1e-5)
        assert " ".join(entry.token for entry in content) == choice.message.content
        assert all(bytes(entry.bytes or []).decode() == entry.token for entry in content)


def test_sdk_streams_all_beams_in_one_chunk(service: Service, sdk: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "messages": MESSAGES, "n": 3, "temperature": 0}
    plain = sdk.chat.completions.create(**request)
    (chunk,) = sdk.chat.completions.create(**request, stream=True)
    assert [choice.delta.content for choice in chunk.choices] == [choice.message.content for choice in plain.choices]
    assert {choice.delta.role for choice in chunk.choices} == {"assistant"}
    assert chunk.usage is None
    first, last = sdk.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    assert len(first.choices) == 3 and last.choices == []
    assert last.usage == plain.usage


async def test_async_sdk(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0) as sdk:
        completion = await sdk.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=5, temperature=0, extra_body={"catalog": "none"}
        )
        assert len(completion.choices) == 1
        assert completion.choices[0].finish_reason in ("stop", "length")
        assert (await sdk.models.list()).data[0].id == MODEL_NAME


def test_sdk_errors_carry_code_and_param(service: Service, sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="m", messages=MESSAGES, n=8, extra_body={"beam_width": 4})
    assert caught.value.param == "n"
    assert caught.value.code == "invalid_request"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.models.retrieve("gpt-unknown")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert sdk.models.retrieve(MODEL_NAME).id == MODEL_NAME


def test_messages_as_the_sdk_returns_them(service: Service, sdk: openai.OpenAI) -> None:
    """An answer can be sent back as a turn, with all the empty fields that the SDK writes."""
    turn = sdk.chat.completions.create(model="m", messages=MESSAGES, temperature=0).choices[0].message
    again = [*MESSAGES, turn.model_dump(), {"role": "user", "content": [{"type": "text", "text": "next"}]}]
    assert sdk.chat.completions.create(model="m", messages=again, temperature=0).choices


def test_input_ids_bypass_the_template(service: Service) -> None:
    ids = service.thread.run(service.engine.render_chat(MESSAGES))
    by_ids = service.post("/v1/chat/completions", {"input_ids": ids, "n": 2}).json
    by_messages = service.post("/v1/chat/completions", {"messages": MESSAGES, "n": 2}).json
    assert by_ids["choices"] == by_messages["choices"]
    both = service.post("/v1/chat/completions", {"input_ids": ids, "messages": MESSAGES})
    assert both.status == 400
    assert set(both.json) == {"error"} and set(both.json["error"]) == {"message", "type", "param", "code"}


def test_text_without_a_limit_runs_to_the_end_of_the_context(bare_service: Service) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True}
    found = bare_service.post("/v1/chat/completions", body).json
    assert found["usage"]["total_tokens"] == bare_service.engine.max_context_len
    assert found["choices"][0]["finish_reason"] == "length"


def test_stream_options_need_a_stream(service: Service) -> None:
    answer = service.post("/v1/chat/completions", {"messages": MESSAGES, "stream_options": {"include_usage": True}})
    assert (answer.status, answer.json["error"]["param"]) == (400, "stream_options")
