"""What the fields of sampling_params do to a text, over HTTP: each acts, or is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.http.service import Service, running_service
from tests.http.test_generate import IDS, generate, search
from widebeam.engine.request import Sampling


def text(service: Service, **sampling: Any) -> list[int]:
    """The ids of one text of 12 tokens that ends at no stop token, unless told otherwise."""
    ids: list[int] = generate(service, {"max_new_tokens": 12, "ignore_eos": True, **sampling})["output_ids"]
    return ids


def test_a_text_is_drawn_by_default(bare_service: Service) -> None:
    assert len({tuple(text(bare_service)) for _ in range(8)}) > 1
    seeded = {tuple(text(bare_service, sampling_seed=seed)) for seed in (1, 2, 3, 1, 2, 3)}
    assert len(seeded) == 3
    greedy = text(bare_service, temperature=0)
    assert greedy == search(bare_service, max_new_tokens=12, ignore_eos=True).sequences[0].token_ids


@pytest.mark.parametrize(
    "only_the_best", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-5}, {"temperature": 0}]
)
def test_fields_that_leave_the_most_probable_token(bare_service: Service, only_the_best: dict[str, Any]) -> None:
    greedy = search(bare_service, max_new_tokens=12, ignore_eos=True).sequences[0].token_ids
    assert text(bare_service, **only_the_best) == greedy


def test_a_high_temperature_draws_improbable_tokens(bare_service: Service) -> None:
    seen = {token for seed in range(4) for token in text(bare_service, temperature=1e6, sampling_seed=seed)}
    assert len(seen) > 24  # of 48 drawn evenly from 64
    few = {token for seed in range(4) for token in text(bare_service, temperature=1e6, top_k=2, sampling_seed=seed)[:1]}
    best = search(bare_service, n=2, beam_width=2, max_new_tokens=1, ignore_eos=True).sequences
    assert few <= {sequence.token_ids[0] for sequence in best}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_bias_forces_and_forbids(bare_service: Service, temperature: float) -> None:
    assert text(bare_service, temperature=temperature, logit_bias={"9": 1e9}) == [9] * 12
    free = text(bare_service, temperature=temperature, sampling_seed=4)
    banned = dict.fromkeys(map(str, free), -100)
    assert not set(text(bare_service, temperature=temperature, sampling_seed=4, logit_bias=banned)) & set(free)


BENDING: dict[str, Any] = {
    "frequency_penalty": 2.0,
    "presence_penalty": -2.0,
    "repetition_penalty": 2.0,
    "logit_bias": {"9": 3.0, "30": 2.0},
}


@pytest.mark.parametrize(("name", "value"), BENDING.items())
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_what_bends_a_text(bare_service: Service, name: str, value: Any, temperature: float) -> None:
    sampling = {"temperature": temperature, "sampling_seed": 3, "max_new_tokens": 40}
    bent = text(bare_service, **sampling, **{name: value})
    bias = {name: {9: 3.0, 30: 2.0}} if name == "logit_bias" else {name: value}
    drawn = Sampling(temperature=temperature, seed=3, **bias)
    assert bent == search(bare_service, max_new_tokens=40, ignore_eos=True, sampling=drawn).sequences[0].token_ids
    assert bent != text(bare_service, **sampling)


def test_penalties_prevent_repeats_and_encourage_them(bare_service: Service) -> None:
    def distinct(**penalties: float) -> int:
        return len(set(text(bare_service, temperature=0, max_new_tokens=40, **penalties)))

    plain = distinct()
    assert distinct(frequency_penalty=2.0, presence_penalty=2.0) > plain + 5
    assert distinct(frequency_penalty=-2.0, presence_penalty=-2.0) < plain


def test_no_stop_token_comes_too_early(bare_service: Service) -> None:
    free = text(bare_service, temperature=0)
    stops = {"ignore_eos": False, "stop_token_ids": free[1:2], "temperature": 0}
    assert text(bare_service, **stops) == free[: free.index(free[1]) + 1]
    least = text(bare_service, min_new_tokens=5, **stops)
    assert len(least) > 5 and free[1] not in least[:5]
    drawn = text(bare_service, min_new_tokens=12, ignore_eos=False, stop_token_ids=list(range(30, 60)), sampling_seed=1)
    assert len(drawn) == 12 and not set(drawn[:11]) & set(range(30, 60))


@pytest.mark.parametrize("temperature", [0, 1e-5])
def test_a_stop_token_at_the_last_place_ends_a_text_by_itself(bare_service: Service, temperature: float) -> None:
    free = text(bare_service, temperature=temperature)
    place = next(place for place in range(1, 12) if free[place] not in free[:place])
    stops = {"max_new_tokens": place + 1, "stop_token_ids": free[place : place + 1], "temperature": temperature}
    found = generate(bare_service, stops)
    assert found["output_ids"] == free[: place + 1]
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[place]}
    assert found["text"] == bare_service.engine.decode(free[:place])
    chat = {"input_ids": IDS, "max_tokens": place + 1, "stop_token_ids": [free[place]], "temperature": temperature}
    (choice,) = bare_service.post("/v1/chat/completions", chat).json["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", free[place])


def test_special_tokens_can_be_suppressed(bare_service: Service) -> None:
    wanted = {"logit_bias": {"0": 1000.0, "2": 990.0, "9": 980.0}}  # 0 and 2 are special
    assert text(bare_service, **wanted) == [0] * 12
    assert text(bare_service, **wanted, suppress_special_tokens=True) == [9] * 12
    everything = {"beam_width": 64, "n": 64, "max_new_tokens": 1}
    for suppress, found in ((False, True), (True, False)):
        answer = generate(bare_service, {**everything, "suppress_special_tokens": suppress})
        assert ([2] in [beam["output_ids"] for beam in answer["meta_info"]["beam_results"]]) == found


# Stop strings


def test_a_stop_string_ends_a_text(bare_service: Service) -> None:
    tokens = search(bare_service, max_new_tokens=12, ignore_eos=True).sequences[0].token_ids
    decode = bare_service.engine.decode
    plain = generate(bare_service, {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}, return_logprob=True)
    words = plain["text"].split(" ")
    string = words[3][-2:] + " " + words[4][:2]  # ends within a word, and begins within another
    length = next(k for k in range(13) if string in decode(tokens[:k]))
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, "stop": string}
    found = generate(bare_service, sampling, return_logprob=True, top_logprobs_num=2)
    assert found["text"] == plain["text"].split(string)[0]
    assert found["output_ids"] == tokens[:length]
    meta = found["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": string}
    assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == length < 12
    assert meta["output_token_logprobs"] == plain["meta_info"]["output_token_logprobs"][:length]
    assert len(meta["output_top_logprobs"]) == length
    several = generate(bare_service, {**sampling, "stop": ["nowhere", string], "no_stop_trim": True})
    assert several["text"] == found["text"] + string
    assert several["output_ids"] == found["output_ids"]


def test_stop_strings_and_samples(bare_service: Service) -> None:
    sampling = {"n": 6, "max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 2}
    free = [answer["text"] for answer in generate(bare_service, sampling)]
    ended = generate(bare_service, {**sampling, "stop": ["<a_", "_1>"]})
    assert any(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in ended)
    for answer, whole in zip(ended, free, strict=True):
        places = [whole.find(string) for string in ("<a_", "_1>") if string in whole]
        assert answer["text"] == (whole[: min(places)] if places else whole)
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])


@pytest.mark.parametrize("sampling", [{"n": 2}, {"temperature": 0}, {"beam_width": 4}], ids=str)
def test_items_and_beams_have_no_stop_strings(service: Service, sampling: dict[str, Any]) -> None:
    answer = service.post("/generate", {"input_ids": IDS, "sampling_params": {**sampling, "stop": ["x"]}})
    assert (answer.status, answer.json["error"]["param"]) == (400, "sampling_params.stop")
    assert "stop_token_ids" in answer.json["error"]["message"]
    assert generate(service, {**sampling, "stop": []})["output_ids"]


def test_without_a_tokenizer_there_are_ids_alone(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / name, tmp_path)
    with running_service(tmp_path, None) as service:
        found = generate(service, {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}, return_logprob=True)
        assert (found["text"], len(found["output_ids"])) == ("", 4)
        body = {"prompt": IDS, "max_tokens": 4, "logprobs": 1, "temperature": 0, "ignore_eos": True}
        (choice,) = service.post("/v1/completions", body).json["choices"]
        assert (choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (
            "",
            [""] * 4,
            [0] * 4,
        )
        for sampling, param in (({"stop": "a"}, "sampling_params.stop"), ({}, "text")):
            prompt = {"input_ids": IDS} if sampling else {"text": "a"}
            refused = service.post("/generate", {**prompt, "sampling_params": sampling})
            assert (refused.status, refused.json["error"]["code"]) == (400, "no_tokenizer")
            assert refused.json["error"]["param"] == param
