"""POST /generate: SGLang's shapes, dialects, batches and streams, checked against the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.service import Answer, Service
from widebeam.constraints.catalog import Catalog
from widebeam.engine.request import Sampling, SearchParams, SearchResult
from widebeam.engine.results import ranked_items

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


def catalog_of(service: Service) -> Catalog:
    catalog = service.engine.catalogs.get(None)
    assert catalog is not None
    return catalog


def test_golden_beam_answer(service: Service) -> None:
    found = generate(service, {"beam_width": 8, "n": 3}, rid="rid-7")
    assert set(found) == {"text", "output_ids", "meta_info"}
    meta = found["meta_info"]
    assert set(meta) == REQUEST_META | {"sequence_score", "beam_results", "items"}
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
        assert set(beam["meta_info"]) == {"finish_reason", "sequence_score", "items"}
        assert beam["text"] == service.engine.decode(beam["output_ids"])
    expected = search(service, beam_width=8, n=3).sequences
    assert [beam["output_ids"] for beam in (first, *others)] == [sequence.token_ids for sequence in expected]
    scores = [beam["meta_info"]["sequence_score"] for beam in (first, *others)]
    assert scores == pytest.approx([sequence.score for sequence in expected], abs=1e-5)
    items = [beam["meta_info"]["items"] for beam in (first, *others)]
    ranked = ranked_items(catalog_of(service), expected, 99, [])
    assert [item for of_one in items for item in of_one] == [item.id for item in ranked]


def test_golden_text_answer(service: Service) -> None:
    found = generate(service, {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}, catalog="none")
    assert set(found) == {"text", "output_ids", "meta_info"}
    assert set(found["meta_info"]) == REQUEST_META
    (expected,) = search(service, max_new_tokens=6, ignore_eos=True, catalog="none").sequences
    assert found["output_ids"] == expected.token_ids
    assert found["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


def test_golden_samples_are_a_list(service: Service) -> None:
    """Several texts of one prompt without a beam field are drawn independently: an answer for each."""
    sampling = {"n": 3, "max_new_tokens": 4, "ignore_eos": True, "sampling_seed": 5}
    found = generate(service, sampling, catalog="none", rid="s")
    drawn = Sampling(seed=5)
    expected = search(service, n=3, max_new_tokens=4, ignore_eos=True, sampling=drawn, catalog="none").sequences
    assert [answer["output_ids"] for answer in found] == [sequence.token_ids for sequence in expected]
    for answer in found:
        assert set(answer) == {"text", "output_ids", "meta_info"}
        assert set(answer["meta_info"]) == REQUEST_META
        assert answer["text"] == service.engine.decode(answer["output_ids"])
        meta = answer["meta_info"]
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("s", 5, 4)


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
    to_the_end = generate(bare_service, greedy | {"max_new_tokens": None}, input_ids=[7] * 480)["meta_info"]
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


@pytest.mark.parametrize("sampling", [{"beam_width": 4, "n": 2}, {"n": 2}, {"temperature": 0}], ids=str)
def test_likely_tokens_of_every_answer(bare_service: Service, sampling: dict[str, Any]) -> None:
    sampling = {"max_new_tokens": 3, "ignore_eos": True, "sampling_seed": 1, **sampling}
    given = {"return_logprob": True, "top_logprobs_num": 4, "return_text_in_logprobs": True}
    found = generate(bare_service, sampling, **given)
    answers = found if isinstance(found, list) else found["meta_info"].get("beam_results", [found])
    assert len(answers) == sampling.get("n", 1)
    if "beam_width" in sampling:
        assert found["meta_info"]["output_top_logprobs"] == answers[0]["meta_info"]["output_top_logprobs"]
    for answer in answers:
        meta, prefix = answer["meta_info"], list(IDS)
        assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
        for (logprob, token, text), likely in zip(
            meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
        ):
            ranked = bare_service.thread.run(
                bare_service.engine.submit(prefix, SearchParams(n=64, beam_width=64, max_new_tokens=1))
            ).sequences
            best = [(pytest.approx(each.score, abs=1e-4), each.token_ids[0]) for each in ranked[:4]]
            assert [(value, number) for value, number, _ in likely] == best
            assert {each.token_ids[0]: each.score for each in ranked}[token] == pytest.approx(logprob, abs=1e-4)
            for number, spelt in [(token, text), *((number, spelt) for _, number, spelt in likely)]:
                assert spelt == bare_service.engine.decode([number], skip_special_tokens=False)
            prefix.append(token)
    bare = generate(bare_service, sampling, return_logprob=True, top_logprobs_num=1)
    first = bare[0] if isinstance(bare, list) else bare
    assert {text for ((_, _, text),) in first["meta_info"]["output_top_logprobs"]} == {None}
    assert first["meta_info"]["input_top_logprobs"] == []


def test_likely_tokens_prompt_by_prompt(service: Service) -> None:
    body = {"input_ids": [IDS, [8]], "sampling_params": {"n": 2}, "return_logprob": [True, False]}
    found = service.post("/generate", body | {"top_logprobs_num": [3, 0]}).json
    assert {len(likely) for likely in found[0]["meta_info"]["output_top_logprobs"]} == {3}
    assert "output_top_logprobs" not in found[1]["meta_info"]
    refused = service.post("/generate", body | {"top_logprobs_num": 3})
    assert (refused.status, refused.json["error"]["param"]) == (400, "top_logprobs_num")
    assert refused.json["error"]["message"].startswith("prompt 1 of the batch: ")


def test_beam_details(service: Service) -> None:
    found = generate(service, {"beam_width": 6, "n": 4}, return_beam_details=True)
    levels = found["meta_info"]["beam_details"]
    assert [set(level) for level in levels] == [{"parents", "token_ids", "scores"}] * 3
    prefixes: list[list[int]] = [[]]
    for level in levels:
        prefixes = [
            prefixes[parent] + [token] for parent, token in zip(level["parents"], level["token_ids"], strict=True)
        ]
    beams = found["meta_info"]["beam_results"]
    assert prefixes == [beam["output_ids"] for beam in beams]
    scores = [3 * beam["meta_info"]["sequence_score"] for beam in beams]
    assert levels[-1]["scores"] == pytest.approx(scores, abs=1e-4)
    assert "beam_details" not in beams[0]["meta_info"]
    drawn = {"input_ids": IDS, "catalog": "none", "return_beam_details": True}
    answer = service.post("/generate", drawn)
    assert (answer.status, answer.json["error"]["param"]) == (400, "return_beam_details")


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


def test_samples_of_a_batch_come_prompt_by_prompt(bare_service: Service) -> None:
    sampling = {"n": 2, "max_new_tokens": 4, "sampling_seed": 3, "ignore_eos": True}
    body = {"input_ids": [IDS, [8]], "sampling_params": sampling, "rid": "r"}
    found = bare_service.post("/generate", body).json
    assert [answer["meta_info"]["id"] for answer in found] == ["r_0", "r_0", "r_1", "r_1"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in found] == [5, 5, 1, 1]
    alone = generate(bare_service, sampling)
    assert [answer["output_ids"] for answer in found[:2]] == [answer["output_ids"] for answer in alone]
    streamed = events(bare_service.post("/generate", body | {"stream": True}))
    assert [event.pop("index") for event in streamed] == [0, 1, 2, 3]
    assert without_times(streamed) == without_times(found)
    single = events(bare_service.post("/generate", {"input_ids": IDS, "sampling_params": sampling, "stream": True}))
    assert [event["index"] for event in single] == [0, 1]


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
        {"text": "a", "top_logprobs_num": 2},
        {"text": "a", "return_logprob": True, "top_logprobs_num": [2]},
        {"text": "a", "catalog": "none", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}},
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
    assert found["warnings"] == ["no effect on a beam search: temperature, top_p, frequency_penalty, sampling_seed"]
    assert found["output_ids"] == generate(service, {"n": 2})["output_ids"]
    for fields in ({"n": 2}, {"n": 2, "beam_width": 4}, {"n": 2, "use_beam_search": True}):
        greedy = generate(service, fields | {"temperature": 0, "top_k": 1})
        assert greedy["warnings"] == ["no effect on a beam search: temperature, top_k"]
    chosen = generate(service, {"n": 2, "temperature": 0, "top_p": 0.9, "max_new_tokens": 2}, catalog="none")
    assert chosen["warnings"] == ["no effect on a beam search: top_p"] and len(chosen["meta_info"]["beam_results"]) == 2
    one = generate(service, {"temperature": 0.7, "top_k": 3, "logit_bias": {"7": 100}})  # a catalog's width is 1
    assert one["warnings"] == ["no effect on a beam search: temperature, top_k, logit_bias"]
    assert one["output_ids"] == search(service).sequences[0].token_ids


def test_concurrent_requests_get_what_they_get_alone(service: Service) -> None:
    from concurrent.futures import ThreadPoolExecutor

    bodies = [{"input_ids": [7, 11 + index, 30], "sampling_params": {"n": 1 + index % 4}} for index in range(24)]
    alone = [service.post("/generate", body).json["output_ids"] for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda body: service.post("/generate", body).json["output_ids"], bodies))
    assert together == alone
