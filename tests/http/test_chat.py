"""POST /v1/chat/completions, tried with the real OpenAI SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http.service import MODEL_NAME, Service
from tests.http.test_stop_strings import save_byte_tokenizer
from widebeam.engine.request import Sampling, SearchParams, Sequence
from widebeam.engine.results import ranked_items
from widebeam.http.chat import _logprobs
from widebeam.http.openai import ChatRequest
from widebeam.http.sequences import Spelling
from widebeam.model.tokenizer import Tokenizer

MESSAGES: list[Any] = [{"role": "system", "content": "a"}, {"role": "user", "content": "watched <a_0> <b_1> <c_2>"}]


@pytest.fixture
def sdk(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def expected(service: Service, **params: Any) -> Any:
    ids = service.thread.run(service.engine.render_chat(MESSAGES))
    return service.thread.run(service.engine.submit(ids, SearchParams(**params)))


def items_of(service: Service, sequence: Any) -> list[Any]:
    catalog = service.engine.catalogs.get(None)
    assert catalog is not None
    return [item.id for item in ranked_items(catalog, [sequence], 99, [])]


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
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert found["choices"] == [
        {
            "index": index,
            "finish_reason": "stop",
            "matched_stop": None,
            "sglext": {
                "sequence_score": pytest.approx(sequence.score, abs=1e-5),
                "normalizer": "level",
                "items": items_of(service, sequence),
            },
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


@pytest.mark.parametrize("n", [1, 3])
def test_sdk_draws_texts(bare_service: Service, n: int) -> None:
    """Without a catalog and a temperature, choices are independent samples."""
    with openai.OpenAI(base_url=bare_service.url + "/v1", api_key="unused", max_retries=0) as sdk:
        request: dict[str, Any] = {"model": "m", "messages": MESSAGES, "n": n, "max_tokens": 5, "seed": 6}
        completion = sdk.chat.completions.create(**request, extra_body={"ignore_eos": True, "rid": "draw"})
        want = expected(bare_service, n=n, max_new_tokens=5, ignore_eos=True, sampling=Sampling(seed=6))
        contents = [bare_service.engine.decode(sequence.token_ids) for sequence in want.sequences]
        assert [choice.message.content for choice in completion.choices] == contents
        assert [choice.finish_reason for choice in completion.choices] == ["length"] * n
        assert completion.usage is not None and completion.usage.completion_tokens == 5 * n
        assert completion.model_extra == {}  # nothing was without effect
        forced = sdk.chat.completions.create(**request, logit_bias={"9": 100}, stop=["a a"])
        assert [choice.message.content for choice in forced.choices] == [""] * n
        assert [choice.finish_reason for choice in forced.choices] == ["stop"] * n
        assert forced.choices[0].matched_stop == "a a"  # type: ignore[attr-defined]
        assert forced.usage is not None and forced.usage.completion_tokens == 2 * n
        body = {**request, "logit_bias": {"9": 100}, "stop": "a a", "include_stop_str_in_output": True}
        kept = bare_service.post("/v1/chat/completions", body).json
        assert [choice["message"]["content"] for choice in kept["choices"]] == ["a a"] * n


def test_sdk_reads_likely_tokens(service: Service, sdk: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 3}
    for catalog in ("items", "none"):
        body = {"catalog": catalog, "beam_width": 4}
        completion = sdk.chat.completions.create(**request, max_tokens=3, extra_body=body)
        want = expected(service, n=2, beam_width=4, max_new_tokens=3, top_logprobs=3, catalog=catalog).sequences
        for choice, sequence in zip(completion.choices, want, strict=True):
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert sequence.top_logprobs is not None
            for entry, likely in zip(choice.logprobs.content, sequence.top_logprobs, strict=True):
                spelt = [service.engine.decode([token], skip_special_tokens=False) for token, _ in likely]
                assert [top.token for top in entry.top_logprobs] == spelt
                assert [top.logprob for top in entry.top_logprobs] == pytest.approx([p for _, p in likely], abs=1e-5)
                assert all(bytes(top.bytes or []).decode() == top.token for top in entry.top_logprobs)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="m", messages=MESSAGES, top_logprobs=3)
    assert caught.value.param == "top_logprobs"


def test_a_part_of_a_character_has_no_bytes(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    halves = Sequence(
        token_ids=["é".encode()[0], ord("a")], logprobs=[-1.0, -2.0], cum_logprob=-3.0, score=-1.5,
        finish_reason="length", top_logprobs=[[(ord("b"), -0.5)], []],
    )  # fmt: skip
    part, whole = _logprobs(halves, Spelling(Tokenizer(tmp_path), ChatRequest())).content
    assert (part.token, part.bytes, part.top_logprobs[0].bytes) == ("\ufffd", None, [98])
    assert (whole.token, whole.bytes, whole.top_logprobs) == ("a", [97], [])


def test_beam_details(service: Service, sdk: openai.OpenAI) -> None:
    body = {"beam_width": 5, "return_beam_details": True}
    completion = sdk.chat.completions.create(model="m", messages=MESSAGES, n=2, extra_body=body)
    want = expected(service, n=2, beam_width=5, return_beam_details=True).levels
    levels = completion.beam_details  # type: ignore[attr-defined]
    assert [(level["parents"], level["token_ids"]) for level in levels] == [(w.parents, w.token_ids) for w in want]
    assert levels[0]["scores"] == pytest.approx(want[0].scores, abs=1e-5)
    plain = sdk.chat.completions.create(model="m", messages=MESSAGES, n=2, extra_body={"beam_width": 5})
    assert plain.model_extra == {}
    assert plain.choices[0].sglext == completion.choices[0].sglext  # type: ignore[attr-defined]


def test_sdk_accumulates_a_stream_of_text(bare_service: Service) -> None:
    """The SDK's own accumulator rebuilds the answer: role, content, finish reason, usage."""
    request: dict[str, Any] = {
        "model": "m", "messages": MESSAGES, "max_tokens": 6, "seed": 2, "logprobs": True, "logit_bias": {"9": 100},
        "stop": "a a", "extra_body": {"no_stop_trim": True},
    }  # fmt: skip
    with openai.OpenAI(base_url=bare_service.url + "/v1", api_key="unused", max_retries=0) as sdk:
        plain = sdk.chat.completions.create(**request)
        with sdk.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= set(kinds)
        (choice,) = final.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "a a")
        assert plain.choices[0].message.content == "a a"
        assert choice.finish_reason == plain.choices[0].finish_reason == "stop"
        assert final.usage == plain.usage
        assert choice.logprobs is not None and choice.logprobs.content == plain.choices[0].logprobs.content  # type: ignore[union-attr]


def test_chunks_as_benchmarks_read_them(bare_service: Service) -> None:
    """Line by line: content from the first choice's delta, usage from a chunk without choices, then the end."""
    body = {"messages": MESSAGES, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    answer = bare_service.post("/v1/chat/completions", body | {"temperature": 0, "ignore_eos": True, "rid": "b"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix(b"data: ") for line in answer.content.splitlines() if line]
    assert lines[-1] == b"[DONE]"
    chunk, last = (json.loads(line) for line in lines[:-1])
    assert set(chunk) == set(last) == {"id", "object", "created", "model", "choices", "usage"}
    assert (chunk["id"], chunk["object"], chunk["usage"]) == ("b", "chat.completion.chunk", None)
    (choice,) = chunk["choices"]
    assert set(choice) == {"index", "finish_reason", "matched_stop", "sglext", "delta", "logprobs"}
    want = expected(bare_service, max_new_tokens=4, ignore_eos=True).sequences[0]
    content = bare_service.engine.decode(want.token_ids)
    assert choice["delta"] == {"role": "assistant", "content": content, "refusal": None}
    assert (choice["finish_reason"], choice["index"]) == ("length", 0)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    first = bare_service.post("/v1/chat/completions", body).content.splitlines()[0]
    assert json.loads(first.removeprefix(b"data: "))["usage"] is not None


def test_an_error_comes_before_the_stream(service: Service) -> None:
    answer = service.post("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "beam_width": 2, "n": 3})
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert answer.json["error"]["param"] == "n"


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
        request: dict[str, Any] = {"model": "m", "messages": MESSAGES, "n": 2, "extra_body": {"beam_width": 4}}
        plain = await sdk.chat.completions.create(**request)
        chunks = [chunk async for chunk in await sdk.chat.completions.create(**request, stream=True)]
        deltas = [choice.delta.content for chunk in chunks for choice in chunk.choices]
        assert deltas == [choice.message.content for choice in plain.choices]
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
    with openai.OpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0) as sdk:
        by_sdk = sdk.chat.completions.create(model="m", messages=[], n=2, extra_body={"input_ids": ids})
    assert [choice.message.content for choice in by_sdk.choices] == [
        choice["message"]["content"] for choice in by_ids["choices"]
    ]
    both = service.post("/v1/chat/completions", {"input_ids": ids, "messages": MESSAGES})
    assert both.status == 400
    assert set(both.json) == {"error"} and set(both.json["error"]) == {"message", "type", "param", "code"}


def test_text_without_a_limit_runs_to_the_end_of_the_context(bare_service: Service) -> None:
    body = {"input_ids": [7] * 480, "temperature": 0, "ignore_eos": True}
    found = bare_service.post("/v1/chat/completions", body).json
    assert found["usage"]["total_tokens"] == bare_service.engine.max_context_len
    assert found["choices"][0]["finish_reason"] == "length"


def test_stream_options_need_a_stream(service: Service) -> None:
    answer = service.post("/v1/chat/completions", {"messages": MESSAGES, "stream_options": {"include_usage": True}})
    assert (answer.status, answer.json["error"]["param"]) == (400, "stream_options")
