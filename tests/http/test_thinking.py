"""Thinking on the chat route, with the real OpenAI SDK: the engine's own two searches, one behind the other, are the
judge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import tiny
from tests.http.service import MODEL_NAME, Answer, Service, running_service, wait_until
from widebeam.engine.request import Sampling, SearchParams

MESSAGES: list[Any] = [{"role": "user", "content": "watched <a_0> <b_1> <c_2>"}]
STOP, EOS = 9, 2
"""`a`, `<|im_end|>`"""


@pytest.fixture
def sdk(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def draw(service: Service, seeds: Iterable[int], max_tokens: int) -> tuple[list[int], list[Any]]:
    """The prompt, and what is drawn behind it with each seed."""
    engine = service.engine

    def params(seed: int) -> SearchParams:
        sampling = Sampling(temperature=0.8, seed=seed)
        return SearchParams(max_new_tokens=max_tokens, catalog="none", stop_token_ids=(STOP,), sampling=sampling)

    async def all_of_them() -> tuple[list[int], list[Any]]:
        prompt = await engine.render_chat(MESSAGES)
        found = await asyncio.gather(*(engine.submit(prompt, params(seed)) for seed in seeds))
        return prompt, [result.sequences[0] for result in found]

    return service.thread.run(all_of_them())


@pytest.fixture(scope="module")
def texts(shared_service: Service) -> list[list[int]]:
    """What the seeds 0, 1, .. draw within 40 tokens: the tiny model draws any token."""
    return [drawn.token_ids for drawn in draw(shared_service, range(60), 40)[1]]


def expected(service: Service, seed: int, max_tokens: int, suffix: list[int], n: int) -> Any:
    """(prompt, drawn tokens, those that are kept, the search behind them)."""
    engine, run = service.engine, service.thread.run
    prompt, (drawn,) = draw(service, [seed], max_tokens)
    said = drawn.token_ids[: -1 if drawn.token_ids[-1] in (STOP, EOS) else None]
    found = run(engine.submit([*prompt, *said, STOP, *suffix], SearchParams(n=n, beam_width=n)))
    return prompt, drawn, said, found


@pytest.mark.parametrize("room", [5, 0])
@pytest.mark.parametrize("end", [STOP, EOS, None])
def test_beams_go_on_behind_the_text(
    end: int | None, room: int, service: Service, sdk: openai.OpenAI, texts: list[list[int]]
) -> None:
    """`room`: tokens that could still be drawn where a text ends by itself."""
    if end is None:
        seed, most = next(seed for seed, text in enumerate(texts) if len(text) > 3 + room), 3 + room
    else:
        length, seed = min((len(text), seed) for seed, text in enumerate(texts) if text[-1] == end)
        most = length + room
    prompt, drawn, said, found = expected(service, seed, most, [8], 4)
    thinking = {"max_tokens": most, "temperature": 0.8, "seed": seed, "stop": "a", "suffix": "next"}
    completion = sdk.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, n=4, extra_body={"thinking": thinking, "rid": "deep"}
    )
    texts = [service.engine.decode(sequence.token_ids) for sequence in found.sequences]
    assert [choice.message.content for choice in completion.choices] == texts
    scores = [choice.sglext["sequence_score"] for choice in completion.choices]  # type: ignore[attr-defined]
    assert scores == pytest.approx([sequence.score for sequence in found.sequences], abs=1e-5)
    first, *rest = completion.choices
    assert first.message.reasoning_content == service.engine.decode(said)  # type: ignore[attr-defined]
    assert not any(hasattr(choice.message, "reasoning_content") for choice in rest)
    used = completion.usage
    assert used is not None and used.completion_tokens_details is not None
    assert used.completion_tokens_details.reasoning_tokens == len(drawn.token_ids)
    assert used.completion_tokens == len(drawn.token_ids) + 4 * 3
    closing = 1 if end == STOP else 2  # the suffix, and the end token where it was not drawn
    assert used.prompt_tokens == len(prompt) + closing
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens


def test_a_stream_says_what_was_thought_first(service: Service, sdk: openai.OpenAI) -> None:
    thinking = {"max_tokens": 6, "temperature": 0.8, "seed": 3, "stop": STOP, "suffix": ""}
    _, drawn, said, found = expected(service, 3, 6, [], 2)
    stream = sdk.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True},
        extra_body={"thinking": thinking},
    )  # fmt: skip
    thought, beams, last = list(stream)
    assert thought.choices[0].delta.reasoning_content == service.engine.decode(said)  # type: ignore[attr-defined]
    assert (thought.choices[0].delta.role, thought.choices[0].finish_reason) == ("assistant", None)
    texts = [service.engine.decode(sequence.token_ids) for sequence in found.sequences]
    assert [choice.delta.content for choice in beams.choices] == texts
    assert len({thought.id, beams.id, last.id}) == 1
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens_details is not None
    assert last.usage.completion_tokens_details.reasoning_tokens == len(drawn.token_ids)


def test_a_long_thought_comes_in_parts(service: Service, sdk: openai.OpenAI) -> None:
    thinking = {"max_tokens": 100, "temperature": 0.8, "seed": 3, "stop": 40, "suffix": ""}
    asked: dict[str, Any] = {
        "model": MODEL_NAME, "messages": MESSAGES, "n": 2, "logprobs": True, "extra_body": {"thinking": thinking},
    }  # fmt: skip
    plain = sdk.chat.completions.create(**asked)
    with sdk.chat.completions.with_streaming_response.create(**asked, stream=True) as raw:
        assert raw.headers["x-catalog-version"] == str(service.engine.catalogs.get(None).version)  # type: ignore
        *thoughts, beams = raw.parse()
    said = [chunk.choices[0].delta for chunk in thoughts]
    assert len(said) > 1
    assert "".join(delta.reasoning_content for delta in said) == plain.choices[0].message.reasoning_content  # type: ignore
    assert [delta.role for delta in said] == ["assistant"] + [None] * (len(said) - 1)
    assert [choice.delta.content for choice in beams.choices] == [choice.message.content for choice in plain.choices]


def test_by_default_there_is_as_much_as_there_is_room_for(service: Service) -> None:
    """Of a context of 512 tokens; without a seed each time another."""
    ids = [7] * 500
    body = {"input_ids": ids, "n": 2, "thinking": {"stop": "a", "suffix": ""}}
    answers = [service.post("/v1/chat/completions", body).json for _ in range(4)]
    for answer in answers:
        drawn = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 1 <= drawn <= 512 - 500 - 1 - 3
    assert len({answer["choices"][0]["message"]["reasoning_content"] for answer in answers}) > 1


def test_greedy_thinking_repeats(service: Service) -> None:
    thinking = {"max_tokens": 4, "temperature": 0, "stop": "a"}
    body = {"messages": MESSAGES, "beam_width": 4, "thinking": thinking}
    one, two = (service.post("/v1/chat/completions", body).json["choices"] for _ in range(2))
    assert one == two and one[0]["message"]["reasoning_content"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"thinking": {}}, "thinking.stop", "invalid_request"),  # no `</think>` in this tokenizer
        ({"thinking": {"stop": "a b"}}, "thinking.stop", "invalid_request"),
        ({"thinking": {"stop": ""}}, "thinking.stop", "invalid_request"),
        ({"thinking": {"stop": 10**6}}, "thinking.stop", "token_out_of_vocabulary"),
        ({"thinking": {"stop": "a", "max_tokens": 0}}, "thinking.max_tokens", "invalid_request"),
        ({"thinking": {"stop": "a", "max_tokens": 513}}, "thinking.max_tokens", "invalid_request"),
        ({"thinking": {"stop": "a", "max_tokens": 510}}, "thinking.max_tokens", "context_too_long"),
        ({"thinking": {"stop": "a", "temperature": -1}}, "thinking.temperature", "invalid_request"),
        ({"thinking": {"stop": "a", "top_k": 3}}, "thinking.top_k", "unknown_field"),
        ({"thinking": {"stop": "a"}, "catalog": "none"}, "thinking", "invalid_request"),
        (
            {"thinking": {"stop": "a"}, "chat_template_kwargs": {"enable_thinking": False}},
            "thinking",
            "invalid_request",
        ),
        ({"thinking": True}, "thinking", "invalid_request"),
    ],
)
def test_what_cannot_be_had_is_refused(service: Service, fields: Any, param: str, code: str) -> None:
    answer = service.post("/v1/chat/completions", {"messages": MESSAGES, "n": 2} | fields)
    assert answer.status == 400, answer.json
    error = answer.json["error"]
    assert (error["param"], error["code"]) == (param, code), error


IMPOSSIBLE: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 65}, "n", "beam_too_wide"),
    ({"max_tokens": 2}, "max_tokens", "depth_mismatch"),
    ({"policy": {"name": "none"}}, "policy.name", "unknown_policy"),
    ({"policy": {"name": "scheduled", "widths": [4, 4, 1]}}, "n", "invalid_request"),
    ({"normalizer": "legal", "logprobs": True, "top_logprobs": 2}, "top_logprobs", "invalid_request"),
    ({"filters": {"where": [{"column": "none", "op": "==", "value": 1}]}}, "filters.where[0].column", "unknown_field"),
    ({"filters": {"where": [{"column": "title", "op": "==", "value": 1}]}}, "filters.where[0].value", "type_mismatch"),
    ({"filters": {"named": ["none"]}}, "filters.named[0]", "unknown_filter"),
]


@pytest.fixture(scope="module")
def narrow(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    with running_service(checkpoint, catalog_file, max_beam_width=64) as service:
        yield service
        service.check()


@pytest.mark.parametrize(("fields", "param", "code"), IMPOSSIBLE)
def test_nothing_is_drawn_for_a_search_that_is_refused(narrow: Service, fields: Any, param: str, code: str) -> None:
    before = narrow.engine.stats().waves
    body = {"messages": MESSAGES, "n": 2, "thinking": {"stop": "a"}} | fields
    answer = narrow.post("/v1/chat/completions", body)
    assert answer.status == 400, answer.json
    error = answer.json["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert narrow.engine.stats().waves == before


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_drawn_where_nothing_may_be_found(stream: bool, service: Service, sdk: openai.OpenAI) -> None:
    before = service.engine.stats().waves
    extra = {"thinking": {"stop": "a"}, "filters": {"where": [{"column": "popularity", "op": "<", "value": -1}]}}
    asked: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES, "n": 2, "extra_body": extra}
    if stream:
        (answer,) = sdk.chat.completions.create(stream=True, **asked)
    else:
        answer = sdk.chat.completions.create(**asked)
        assert answer.usage.completion_tokens == 0
    assert answer.choices == [] and answer.warnings == ["the filters leave no item"]
    assert service.engine.stats().waves == before


def test_both_searches_are_of_one_catalog_version(checkpoint: Path, tmp_path: Path) -> None:
    """A version that comes while the text is drawn is for other requests."""
    path = tiny.save_catalog(tmp_path / "items.jsonl")
    every = [json.loads(row)["item_id"] for row in path.read_text().splitlines()]
    body = {"messages": MESSAGES, "n": 2, "thinking": {"max_tokens": 40, "seed": 1, "stop": "a"}}

    def items(answer: Answer) -> list[list[str]]:
        return [choice["sglext"]["items"] for choice in answer.json["choices"]]

    with running_service(checkpoint, path) as service, ThreadPoolExecutor() as pool:
        catalogs = service.engine.catalogs
        before, first = items(service.post("/v1/chat/completions", body)), catalogs.get("items")
        kept = next(item for item in every if [item] not in before)
        removed = [item for item in every if item != kept]
        assert service.post("/v1/catalogs/items/items", {"remove": removed}).status == 200
        second = catalogs.get("items")  # both are on the device from now on
        assert first is not None and second is not None
        catalogs.add(first)
        with service.held():
            answering = pool.submit(service.post, "/v1/chat/completions", body)
            wait_until(lambda: len(service.engine._waiting) == 1)
            catalogs.add(second)
        assert items(answering.result()) == before
        assert items(service.post("/v1/chat/completions", body)) == [[kept]]
        service.check()


def test_one_time_limit_holds_for_both(service: Service) -> None:
    body = {"messages": MESSAGES, "n": 2, "timeout_ms": 100, "thinking": {"stop": "a"}}
    with service.held():
        answer = service.post("/v1/chat/completions", body)
    assert answer.status == 504
    assert "100 ms" in json.dumps(answer.json)


def test_the_metrics_count_both_searches(service: Service) -> None:
    def generated() -> float:
        lines = service.get("/metrics").content.decode().splitlines()
        return float(next(line for line in lines if line.startswith("widebeam_generated_tokens_total")).split()[-1])

    before = generated()
    thinking = {"max_tokens": 5, "seed": 1, "stop": "a"}
    used = service.post("/v1/chat/completions", {"messages": MESSAGES, "n": 2, "thinking": thinking}).json["usage"]
    assert generated() - before == used["completion_tokens"]
