"""POST /generate: SGLang's shapes, dialects, batches and streams, checked against the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.service import Answer, Service
from widebeam.engine.request import SearchParams, SearchResult

IDS = [7, 11, 30, 55, 8]
REQUEST_META = {
    "normalizer",
    "id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens",
    "num_retractions", "weight_version", "e2e_latency", "response_sent_to_client_ts",
}  # fmt: skip


def search(service: Service, **params: Any) -> SearchResult:
    return service.thread.run(service.engine.submit(IDS, SearchParams(**params)))


def generate(service: Service, sampling: Any = None, **fields: Any) -> Any:
    body = {"sampling_params": sampling, **({} if "text" in fields else {"input_ids": IDS}), **fields}
    answer = service.post("/generate", body)
    assert answer.status == 200, answer.content
    return answer.json


def test_golden_beam_answer(service: Service) -> None:
    found = generate(service, {"beam_width": 8, "n": 3}, rid="rid-7")
    assert set(found) == {"text", "output_ids", "meta_info"}
    meta = found["meta_info"]
    assert set(meta) == REQUEST_META | {"sequence_score", "beam_results"}
    assert meta["id"] == "rid-7"
    assert meta["prompt_tokens"] == 5
    assert meta["completion_tokens"] == 9  # summed over the sequences that are returned, not over the width
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["e2e_latency"] > 0
    first, *others = meta["beam_results"]
    assert first == {
        "text": found["text"],
        "output_ids": found["output_ids"],
        "meta_info": {key: value for key, value in meta.items() if key != "beam_results"},
    }
    assert len(others) == 2
    for beam in others:
        assert set(beam) == {"text", "output_ids", "meta_info"}
        assert set(beam["meta_info"]) == {"finish_reason", "sequence_score"}
        assert beam["text"] == service.engine.decode(beam["output_ids"])
    expected = search(service, beam_width=8, n=3).sequences
    assert [beam["output_ids"] for beam in (first, *others)] == [sequence.token_ids for sequence in expected]
    scores = [beam["meta_info"]["sequence_score"] for beam in (first, *others)]
    assert scores == pytest.approx([sequence.score for sequence in expected], abs=1e-5)


def test_golden_text_answer(service: Service) -> None:
    found = generate(service, {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}, catalog="none")
    assert set(found) == {"text", "output_ids", "meta_info"}
    assert set(found["meta_info"]) == REQUEST_META
    (expected,) = search(service, max_new_tokens=6, ignore_eos=True, catalog="none").sequences
    assert found["output_ids"] == expected.token_ids
    assert found["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


def test_put_is_the_same(service: Service) -> None:
    body = {"input_ids": IDS, "sampling_params": {"beam_width": 4, "n": 2}}
    assert service.call("PUT", "/generate", body).json["output_ids"] == generate(service, {"n": 2})["output_ids"]


@pytest.mark.parametrize(
    ("sampling", "fields", "width", "returned"),
    [
        ({"beam_width": 8}, {}, 8, 1),
        ({"beam_width": 8, "n": 4}, {}, 8, 4),
        ({"use_beam_search": True, "n": 4}, {}, 4, 4),
        ({"n": 4}, {}, 4, 4),
        ({"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True, "n": 4}, {}, 4, 4),
        (None, {"beam_width": 4}, 4, 4),
        ({"n": 4}, {"beam_width": 4}, 4, 4),
        ({"n": 2}, {"policy": {"name": "scheduled", "widths": [3, 6, 4]}}, None, 2),
    ],
)
def test_beam_dialects(
    service: Service, sampling: Any, fields: dict[str, Any], width: int | None, returned: int
) -> None:
    found = generate(service, sampling, **fields)
    beams = found["meta_info"]["beam_results"]
    assert len(beams) == returned
    if width is not None:
        expected = search(service, beam_width=width, n=returned).sequences
        assert [beam["output_ids"] for beam in beams] == [sequence.token_ids for sequence in expected]


def test_extensions_reach_the_search(service: Service) -> None:
    found = generate(service, {"n": 3}, normalizer="legal", length_penalty=0.0)
    expected = search(service, beam_width=3, n=3, normalizer="legal", length_penalty=0.0).sequences
    scores = [beam["meta_info"]["sequence_score"] for beam in found["meta_info"]["beam_results"]]
    assert scores == pytest.approx([sequence.cum_logprob for sequence in expected], abs=1e-5)


def test_stop_tokens_are_kept_in_ids_and_trimmed_from_text(bare_service: Service) -> None:
    free = generate(bare_service, {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True})
    first, stop, *_ = free["output_ids"]
    assert stop != first
    sampling = {"temperature": 0, "max_new_tokens": 4, "stop_token_ids": [stop]}
    found = generate(bare_service, sampling)
    assert found["output_ids"] == [first, stop]
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert found["text"] == bare_service.engine.decode([first])
    untrimmed = generate(bare_service, sampling | {"no_stop_trim": True, "skip_special_tokens": False})
    assert untrimmed["text"] == bare_service.engine.decode(found["output_ids"], skip_special_tokens=False)


def test_max_new_tokens_default_null_and_depth(service: Service, bare_service: Service) -> None:
    greedy = {"temperature": 0, "ignore_eos": True}
    assert generate(bare_service, greedy)["meta_info"]["completion_tokens"] == 128
    to_the_end = generate(bare_service, greedy | {"max_new_tokens": None})["meta_info"]
    assert to_the_end["prompt_tokens"] + to_the_end["completion_tokens"] == bare_service.engine.max_context_len
    assert generate(service, {"n": 2, "max_new_tokens": None})["meta_info"]["completion_tokens"] == 6
    assert generate(service, {"n": 2, "max_new_tokens": 3})["meta_info"]["finish_reason"]["type"] == "length"
    # an item that ends before the limit ends by its last token
    longer = generate(service, {"n": 2, "max_new_tokens": 64})
    assert longer["meta_info"]["finish_reason"] == {"type": "stop", "matched": longer["output_ids"][-1]}
    shorter = service.post("/generate", {"input_ids": IDS, "sampling_params": {"n": 2, "max_new_tokens": 2}})
    assert shorter.status == 400 and shorter.json["error"]["code"] == "depth_mismatch"


def test_logprobs_of_every_beam(service: Service) -> None:
    found = generate(service, {"beam_width": 4, "n": 2}, return_logprob=True)
    meta = found["meta_info"]
    assert meta["input_token_logprobs"] == []
    expected = search(service, beam_width=4, n=2).sequences
    for beam, sequence in zip(meta["beam_results"], expected, strict=True):
        triples = beam["meta_info"]["output_token_logprobs"]
        assert beam["meta_info"]["output_token_logprobs_length"] == 3
        assert [[token, text] for _, token, text in triples] == [[token, None] for token in sequence.token_ids]
        assert sum(logprob for logprob, _, _ in triples) == pytest.approx(sequence.cum_logprob, abs=1e-4)


def test_prompt_ids_on_request(service: Service) -> None:
    found = generate(service, {"n": 2}, text="watched <a_0> next", return_prompt_token_ids=True)
    assert found["prompt_token_ids"] == service.thread.run(service.engine.encode("watched <a_0> next"))


def test_batches_come_back_in_order(service: Service) -> None:
    prompts = [IDS, [8, 9], [7, 7, 7]]
    sampling = [{"n": 2}, {"beam_width": 8, "n": 1}, {"temperature": 0}]
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": [False, False, True]}
    found = service.post("/generate", body | {"rid": ["a", "b", "c"]}).json
    assert [answer["meta_info"]["id"] for answer in found] == ["a", "b", "c"]
    for index, answer in enumerate(found):
        alone = service.post("/generate", {"input_ids": prompts[index], "sampling_params": sampling[index]}).json
        assert answer["output_ids"] == alone["output_ids"]
        assert ("beam_results" in answer["meta_info"]) == (index < 2)
        assert ("output_token_logprobs" in answer["meta_info"]) == (index == 2)
    texts = service.post("/generate", {"text": ["watched a", "b"], "sampling_params": {"n": 2}, "rid": "r"}).json
    assert [answer["meta_info"]["id"] for answer in texts] == ["r_0", "r_1"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in texts] == [2, 1]
    (one,) = service.post("/generate", {"text": ["watched a"], "sampling_params": {"n": 2}}).json
    assert one["output_ids"] == texts[0]["output_ids"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_ids": [IDS, [9999], IDS]}, "input_ids"),
        ({"input_ids": [IDS, IDS], "sampling_params": [{"n": 2}, {"n": 3, "beam_width": 2}]}, "sampling_params.n"),
        ({"input_ids": [IDS, []]}, "input_ids"),
    ],
)
def test_one_bad_prompt_fails_the_batch_and_is_named(service: Service, body: dict[str, Any], param: str) -> None:
    answer = service.post("/generate", {"sampling_params": {"n": 2}} | body)
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith("prompt 1 of the batch: ")
    assert answer.json["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"text": []},
        {"input_ids": []},
        {"input_ids": [1, [2]]},
        {"text": "a", "sampling_params": [{}]},
        {"text": ["a", "b"], "sampling_params": [{}]},
        {"text": ["a", "b"], "rid": ["x"]},
        {"text": "a", "rid": ["x"]},
        {"text": "a", "return_logprob": [True]},
        {"text": "a", "beam_width": 4, "sampling_params": {"n": 3}},
    ],
)
def test_bodies_that_contradict_themselves(service: Service, body: dict[str, Any]) -> None:
    answer = service.post("/generate", body)
    assert answer.status == 400
    assert answer.json["error"]["code"] in ("invalid_request", "empty_prompt")
    assert answer.json["error"]["param"] is not None


def events(answer: Answer) -> list[Any]:
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *data, last, rest = answer.content.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in data]


def without_times(answer: Any) -> Any:
    return json.loads(
        json.dumps(answer),
        object_hook=lambda d: {k: v for k, v in d.items() if k not in ("e2e_latency", "response_sent_to_client_ts")},
    )


def test_a_stream_is_one_event_with_the_whole_answer(service: Service) -> None:
    body = {"input_ids": IDS, "sampling_params": {"beam_width": 4, "n": 2}, "rid": "s"}
    (event,) = events(service.post("/generate", body | {"stream": True}))
    assert without_times(event) == without_times(service.post("/generate", body).json)
    batch = {"input_ids": [IDS, [8]], "sampling_params": {"n": 2}, "stream": True}
    assert [event["index"] for event in events(service.post("/generate", batch))] == [0, 1]


def test_every_line_of_an_answer_is_whole_json(service: Service) -> None:
    """Benchmark clients read line by line, also where they did not ask for a stream."""
    answer = service.post("/generate", {"input_ids": IDS, "sampling_params": {"n": 4}})
    (line,) = answer.content.splitlines()
    assert json.loads(line)["text"] != ""


def test_fields_without_effect_are_listed(service: Service) -> None:
    sampling = {"n": 2, "temperature": 0.7, "top_p": 0.9, "frequency_penalty": 1.0, "sampling_seed": 3}
    found = generate(service, sampling)
    assert found["warnings"] == ["no effect on a beam search: temperature, top_p, frequency_penalty, seed"]
    assert found["output_ids"] == generate(service, {"n": 2})["output_ids"]


def test_concurrent_requests_get_what_they_get_alone(service: Service) -> None:
    from concurrent.futures import ThreadPoolExecutor

    bodies = [{"input_ids": [7, 11 + index, 30], "sampling_params": {"n": 1 + index % 4}} for index in range(24)]
    alone = [service.post("/generate", body).json["output_ids"] for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda body: service.post("/generate", body).json["output_ids"], bodies))
    assert together == alone
