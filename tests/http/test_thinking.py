"""Thinking on the chat route, with the real OpenAI SDK: the engine's own two searches, one behind the other, are the
judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.http.service import MODEL_NAME, Service
from widebeam.engine.request import Sampling, SearchParams

MESSAGES: list[Any] = [{"role": "user", "content": "watched <a_0> <b_1> <c_2>"}]
STOP = 9
"""`a`"""


@pytest.fixture
def sdk(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def draw(service: Service, seed: int, max_tokens: int) -> tuple[list[int], Any]:
    """The prompt, and what is drawn behind it."""
    engine, run = service.engine, service.thread.run
    prompt = run(engine.render_chat(MESSAGES))
    sampling = Sampling(temperature=0.8, seed=seed)
    params = SearchParams(max_new_tokens=max_tokens, catalog="none", stop_token_ids=(STOP,), sampling=sampling)
    return prompt, run(engine.submit(prompt, params)).sequences[0]


def expected(service: Service, seed: int, max_tokens: int, suffix: list[int], n: int) -> Any:
    """(prompt, drawn tokens, those that are kept, the search behind them)."""
    engine, run = service.engine, service.thread.run
    prompt, drawn = draw(service, seed, max_tokens)
    said = drawn.token_ids[: -1 if drawn.finish_reason == "stop" else None]
    found = run(engine.submit([*prompt, *said, STOP, *suffix], SearchParams(n=n, beam_width=n)))
    return prompt, drawn, said, found


def how_it_ends(drawn: Any) -> str:
    return "length" if drawn.finish_reason == "length" else "stop" if drawn.token_ids[-1] == STOP else "eos"


@pytest.mark.parametrize("ending", ["stop", "eos", "length"])
def test_beams_go_on_behind_the_text(ending: str, service: Service, sdk: openai.OpenAI) -> None:
    most = 3 if ending == "length" else 40
    # the tiny model draws any token
    seed = next(seed for seed in range(200) if how_it_ends(draw(service, seed, most)[1]) == ending)
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
    closing = 1 if ending == "stop" else 2  # the suffix, and the end token where it was not drawn
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
