"""POST /v1/completions, tried with the real OpenAI SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.http.service import Service
from widebeam.engine.request import Sampling, SearchParams, SearchResult

IDS = [7, 11, 30]
TEXT = "watched <a_0> next"


@pytest.fixture
def sdk(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def bare_sdk(bare_service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=bare_service.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def search(service: Service, prompt: list[int], **params: Any) -> SearchResult:
    return service.thread.run(service.engine.submit(prompt, SearchParams(**params)))


def post(service: Service, **body: Any) -> Any:
    answer = service.post("/v1/completions", body)
    assert answer.status == 200, answer.content
    return answer.json


def test_golden_answer(service: Service) -> None:
    found = post(service, model="whatever", prompt=IDS, n=3, beam_width=8, rid="cmpl-1")
    want = search(service, IDS, n=3, beam_width=8)
    created = found.pop("created")
    assert isinstance(created, int)
    catalog = service.engine.catalogs.get(None)
    assert catalog is not None
    assert found == {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": "whatever",
        "choices": [
            {
                "index": index,
                "text": service.engine.decode(sequence.token_ids),
                "finish_reason": "stop",
                "matched_stop": None,
                "logprobs": None,
                "sglext": {
                    "sequence_score": pytest.approx(sequence.score, abs=1e-5),
                    "normalizer": "level",
                    "items": [catalog.item_id(row) for row in catalog.items_at(sequence.node)],
                },
            }
            for index, sequence in enumerate(want.sequences)
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 9,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize("prompt", [TEXT, [TEXT, "a b"], IDS, [IDS, [8, 9], [7]]], ids=str)
def test_every_form_of_prompt(service: Service, sdk: openai.OpenAI, prompt: Any) -> None:
    """Choices come prompt by prompt; each prompt is counted once, and all sequences."""
    completion = sdk.completions.create(model="m", prompt=prompt, n=2, extra_body={"use_beam_search": True})
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    encode = service.engine.encode
    ids = [service.thread.run(encode(each)) if isinstance(each, str) else each for each in prompts]
    want = [search(service, each, n=2, beam_width=2) for each in ids]
    texts = [service.engine.decode(sequence.token_ids) for result in want for sequence in result.sequences]
    assert [choice.text for choice in completion.choices] == texts
    assert [choice.index for choice in completion.choices] == list(range(2 * len(prompts)))
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == sum(map(len, ids))
    assert completion.usage.completion_tokens == 6 * len(prompts)


def test_indices_name_the_prompt_where_beams_are_few(service: Service) -> None:
    """A prompt that finds fewer than n leaves its last places empty."""
    catalog = service.engine.catalogs.get(None)
    assert catalog is not None
    n = catalog.num_sids + 5
    found = post(service, prompt=[IDS, [8]], n=n, beam_width=n)
    assert len(found["choices"]) == 2 * catalog.num_sids
    assert [choice["index"] // n for choice in found["choices"]] == [0] * catalog.num_sids + [1] * catalog.num_sids


def test_sixteen_tokens_by_default(bare_service: Service, service: Service) -> None:
    assert post(bare_service, prompt=IDS, ignore_eos=True)["usage"]["completion_tokens"] == 16
    beams = post(bare_service, prompt=IDS, ignore_eos=True, beam_width=4, n=2)
    assert beams["usage"]["completion_tokens"] == 32
    assert post(bare_service, prompt=IDS, ignore_eos=True, max_tokens=3)["usage"]["completion_tokens"] == 3
    assert post(service, prompt=IDS)["usage"]["completion_tokens"] == 3  # the catalog's depth
    assert post(service, prompt=IDS, catalog="none", ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_samples(bare_service: Service, bare_sdk: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "prompt": [IDS, [8, 9]], "n": 3, "best_of": 3, "seed": 4, "max_tokens": 6}
    completion = bare_sdk.completions.create(**request, temperature=0.8, extra_body={"ignore_eos": True})
    drawn = Sampling(temperature=0.8, seed=4)
    want = [search(bare_service, ids, n=3, max_new_tokens=6, ignore_eos=True, sampling=drawn) for ids in (IDS, [8, 9])]
    texts = [bare_service.engine.decode(sequence.token_ids) for result in want for sequence in result.sequences]
    assert [choice.text for choice in completion.choices] == texts
    stopped = bare_sdk.completions.create(**request, logit_bias={"9": 100}, stop=["a a", "b"], user="u")
    assert [(choice.text, choice.finish_reason) for choice in stopped.choices] == [("", "stop")] * 6
    assert stopped.usage is not None and stopped.usage.completion_tokens == 12


def test_fields_that_shape_a_text(bare_service: Service) -> None:
    greedy = {"prompt": IDS, "temperature": 0, "max_tokens": 12}
    free = search(bare_service, IDS, max_new_tokens=12, ignore_eos=True).sequences[0].token_ids
    stops = {**greedy, "stop_token_ids": [free[1]]}
    assert post(bare_service, **stops)["usage"]["completion_tokens"] == free.index(free[1]) + 1
    assert post(bare_service, **stops)["choices"][0]["matched_stop"] == free[1]
    assert post(bare_service, **stops, min_tokens=6)["usage"]["completion_tokens"] > 6
    plain = post(bare_service, **greedy, ignore_eos=True)["choices"][0]["text"]
    assert plain == bare_service.engine.decode(free)
    assert post(bare_service, **greedy, ignore_eos=True, frequency_penalty=2)["choices"][0]["text"] != plain


def test_legacy_logprobs(bare_service: Service, bare_sdk: openai.OpenAI) -> None:
    """Parallel lists; offsets are those of the tokens in the text."""
    completion = bare_sdk.completions.create(
        model="m", prompt=IDS, n=2, max_tokens=4, logprobs=2, extra_body={"beam_width": 3, "ignore_eos": True}
    )
    want = search(bare_service, IDS, n=2, beam_width=3, max_new_tokens=4, ignore_eos=True, top_logprobs=2).sequences
    decode = bare_service.engine.decode
    for choice, sequence in zip(completion.choices, want, strict=True):
        legacy = choice.logprobs
        assert legacy is not None and legacy.tokens and legacy.top_logprobs and legacy.text_offset is not None
        spelt = {token: decode([token], skip_special_tokens=False) for token in range(64)}
        assert legacy.tokens == [spelt[token] for token in sequence.token_ids]
        assert legacy.token_logprobs == pytest.approx(sequence.logprobs, abs=1e-5)
        assert legacy.text_offset == [len(decode(sequence.token_ids[:place])) for place in range(4)]
        assert sequence.top_logprobs is not None
        for place, likely in enumerate(sequence.top_logprobs):
            own = (sequence.token_ids[place], sequence.logprobs[place])
            expected = {spelt[token]: pytest.approx(value, abs=1e-4) for token, value in [*likely, own]}
            assert legacy.top_logprobs[place] == expected
    none_but_own = bare_sdk.completions.create(model="m", prompt=IDS, max_tokens=2, logprobs=0).choices[0].logprobs
    assert none_but_own is not None and none_but_own.tokens is not None
    assert [list(likely) for likely in none_but_own.top_logprobs or []] == [[token] for token in none_but_own.tokens]


def test_offsets_end_with_a_text_that_was_cut(bare_service: Service) -> None:
    found = post(bare_service, prompt=IDS, max_tokens=8, logit_bias={"9": 100}, stop="a a", logprobs=0)
    (choice,) = found["choices"]
    assert (choice["text"], choice["matched_stop"]) == ("", "a a")
    assert choice["logprobs"]["tokens"] == ["a", "a"]
    assert choice["logprobs"]["text_offset"] == [0, 0]


def test_stream_is_a_chunk_for_each_prompt(service: Service, sdk: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "prompt": [IDS, [8]], "n": 2, "temperature": 0}
    plain = sdk.completions.create(**request)
    first, second = sdk.completions.create(**request, stream=True)
    streamed = [*first.choices, *second.choices]
    assert [(c.index, c.text, c.finish_reason) for c in streamed] == [
        (c.index, c.text, c.finish_reason) for c in plain.choices
    ]
    assert first.usage is None
    *chunks, last = sdk.completions.create(**request, stream=True, stream_options={"include_usage": True})
    assert [len(chunk.choices) for chunk in chunks] == [2, 2]
    assert last.choices == [] and last.usage == plain.usage
    lines = service.post("/v1/completions", {"prompt": IDS, "stream": True}).content.split(b"\n\n")
    assert lines[-2:] == [b"data: [DONE]", b""]
    for line in lines[:-2]:  # clients look at choices[0] of every chunk, unless they asked for usage
        assert json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]


async def test_async_sdk(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0) as sdk:
        plain = await sdk.completions.create(model="m", prompt=TEXT, n=2, temperature=0)
        chunks = [
            c async for c in await sdk.completions.create(model="m", prompt=TEXT, n=2, temperature=0, stream=True)
        ]
        assert [choice for chunk in chunks for choice in chunk.choices] == plain.choices


def test_beam_details_of_each_prompt(service: Service) -> None:
    found = post(service, prompt=[IDS, [8]], n=2, beam_width=4, return_beam_details=True)
    for prompt, levels in zip((IDS, [8]), found["beam_details"], strict=True):
        want = search(service, prompt, n=2, beam_width=4, return_beam_details=True).levels
        assert want is not None
        assert [(level["parents"], level["token_ids"]) for level in levels] == [(w.parents, w.token_ids) for w in want]


def test_warnings_are_told_once(service: Service) -> None:
    found = post(service, prompt=[IDS, [8]], n=2, top_p=0.5, seed=1)
    assert found["warnings"] == ["no effect on a beam search: top_p, seed"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_request", "prompt"),
        ({"prompt": None}, "invalid_request", "prompt"),
        ({"prompt": ""}, "empty_prompt", "prompt"),
        ({"prompt": []}, "empty_prompt", "prompt"),
        ({"prompt": [[]]}, "empty_prompt", "prompt"),
        ({"prompt": ["a", 1]}, "invalid_request", "prompt"),
        ({"prompt": [[1], 1]}, "invalid_request", "prompt"),
        ({"prompt": ["a"] * 1025}, "invalid_request", "prompt"),
        ({"prompt": [7, -1]}, "invalid_request", "prompt[1]"),
        ({"prompt": [7, 9999]}, "token_out_of_vocabulary", "prompt"),
        ({"prompt": [7] * 600}, "context_too_long", "prompt"),
        ({"prompt": "a", "echo": True}, "unsupported_field", "echo"),
        ({"prompt": "a", "suffix": "b"}, "unsupported_field", "suffix"),
        ({"prompt": "a", "best_of": 2}, "invalid_request", "best_of"),
        ({"prompt": "a", "logprobs": 21}, "invalid_request", "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"prompt": "a", "max_tokens": 1}, "depth_mismatch", "max_tokens"),
        ({"prompt": ["a"], "max_tokens": 1}, "depth_mismatch", "max_tokens"),
        ({"prompt": "a", "logprobs": 2, "normalizer": "legal"}, "invalid_request", "logprobs"),
        ({"prompt": "a", "stream_options": {}}, "invalid_request", "stream_options"),
        ({"prompt": "a", "messages": []}, "unknown_field", "messages"),
        ({"prompt": "a", "n": 3, "beam_width": 2}, "invalid_request", "n"),
    ],
)  # fmt: skip
def test_refusals(service: Service, body: dict[str, Any], code: str, param: str | None) -> None:
    answer = service.post("/v1/completions", body)
    assert answer.status == 400
    assert set(answer.json) == {"error"} and set(answer.json["error"]) == {"message", "type", "param", "code"}
    assert (answer.json["error"]["code"], answer.json["error"]["param"]) == (code, param)
    assert "of the batch" not in answer.json["error"]["message"]


def test_a_bad_prompt_is_named(service: Service, sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt 1 of the batch") as caught:
        sdk.completions.create(model="m", prompt=[IDS, [9999]], n=2)
    assert (caught.value.param, caught.value.code) == ("prompt", "token_out_of_vocabulary")
