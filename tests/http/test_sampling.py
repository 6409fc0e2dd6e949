"""Which search the beam and sampling fields of the text dialects mean."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from widebeam.engine.request import Sampling
from widebeam.errors import InvalidRequest
from widebeam.http.sampling import BeamPlan, SamplingFields, beam_plan, text_sampling, token_bias, without_effect
from widebeam.http.sglang import SamplingParams
from widebeam.policies import PolicySpec

VOCABULARY = 64
SCHEDULE = PolicySpec(name="scheduled", widths=(4, 8))


def fields(**given: Any) -> SamplingFields:
    return msgspec.convert(given, SamplingFields)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, BeamPlan(1, 1, False)),
        ({"n": 1}, BeamPlan(1, 1, False)),
        ({"beam_width": 1}, BeamPlan(1, 1, False)),
        ({"beam_width": 256}, BeamPlan(1, 256, True)),  # n stays 1, as in SGLang
        ({"beam_width": 256, "n": 256}, BeamPlan(256, 256, True)),
        ({"beam_width": 256, "n": 10, "use_beam_search": True}, BeamPlan(10, 256, True)),
        ({"use_beam_search": True, "n": 64}, BeamPlan(64, 64, True)),
        ({"use_beam_search": True}, BeamPlan(1, 1, True)),
        ({"n": 64, "use_beam_search": True, "temperature": 0}, BeamPlan(64, 64, True)),
        ({"n": 64, "temperature": 0}, BeamPlan(64, 64, True, by_greed=True)),
        ({"n": 64, "top_k": 1}, BeamPlan(64, 64, True, by_greed=True)),
    ],
)
def test_beam_dialects(given: dict[str, Any], expected: BeamPlan) -> None:
    assert beam_plan(fields(**given), None, catalog_in_use=False) == expected


def test_n_alone_means_beams_with_a_catalog_and_samples_without() -> None:
    assert beam_plan(fields(n=8), None, catalog_in_use=True) == BeamPlan(8, 8, True)
    assert beam_plan(fields(n=8, temperature=0), None, catalog_in_use=True) == BeamPlan(8, 8, True)
    assert beam_plan(fields(n=8), None, catalog_in_use=False) == BeamPlan(8, 1, False)
    assert beam_plan(fields(n=8, temperature=0.7), None, catalog_in_use=False) == BeamPlan(8, 1, False)


def test_a_policy_with_widths_decides_the_width() -> None:
    assert beam_plan(fields(n=2), SCHEDULE, catalog_in_use=False) == BeamPlan(2, None, True)
    assert beam_plan(fields(n=2, beam_width=8), SCHEDULE, catalog_in_use=False) == BeamPlan(2, 8, True)
    assert beam_plan(fields(n=4), PolicySpec(name="fixed"), catalog_in_use=False) == BeamPlan(4, 4, True)


@pytest.mark.parametrize("given", [{"n": 5, "beam_width": 4}, {"n": 2, "beam_width": 1}])
def test_more_sequences_than_beams(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="beam_width is only") as caught:
        beam_plan(fields(**given), None, catalog_in_use=True)
    assert caught.value.param == "n"


ASKING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"7": 2.0},
    "seed": 7,
}


@pytest.mark.parametrize(("name", "value"), ASKING.items())
def test_what_acts_on_texts_is_listed_with_beams(name: str, value: Any) -> None:
    assert without_effect(fields(**{name: value})) == [f"no effect on a beam search: {name}"]
    sampling = text_sampling(fields(**{name: value}), VOCABULARY)
    expected = {name: {7: 2.0} if name == "logit_bias" else value}
    assert sampling == Sampling(**expected)


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ({"temperature": 0}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"top_k": 1}, "top_k"),
        ({"temperature": 0, "top_k": 1}, "temperature, top_k"),
        ({"temperature": 0.7, "top_k": 1}, "temperature, top_k"),
    ],
)
def test_greed_is_listed_unless_it_chose_beams(given: dict[str, Any], listed: str) -> None:
    warning = f"no effect on a beam search: {listed}"
    assert without_effect(fields(**given)) == [warning]
    idle = [name for name in given if given[name] == 0.7]
    assert without_effect(fields(**given), by_greed=True) == [f"no effect on a beam search: {name}" for name in idle]


def test_names_are_those_of_the_dialect() -> None:
    given = msgspec.convert({"sampling_seed": 3, "min_new_tokens": 2}, SamplingParams)
    assert text_sampling(given, VOCABULARY) == Sampling(seed=3, min_new_tokens=2)
    with pytest.raises(InvalidRequest, match="min_new_tokens") as caught:
        without_effect(given, "sampling_params.")
    assert (caught.value.param, caught.value.code) == ("sampling_params.min_new_tokens", "unsupported_field")
    given = msgspec.convert({"sampling_seed": 3}, SamplingParams)
    assert without_effect(given) == ["no effect on a beam search: sampling_seed"]
    with pytest.raises(InvalidRequest) as caught:
        without_effect(fields(min_tokens=2))
    assert caught.value.param == "min_tokens"


def test_beams_have_no_stop_strings() -> None:
    assert without_effect(fields(stop="")) == without_effect(fields(stop=[])) == []
    with pytest.raises(InvalidRequest, match="stop_token_ids") as caught:
        without_effect(fields(stop=["x"]), "sampling_params.")
    assert caught.value.param == "sampling_params.stop"


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 1.0}, {"top_k": -1}, {"top_k": 0}, {"top_k": 2**30}, {"top_p": 1}]
)
def test_the_default_is_to_draw_from_all_tokens(given: dict[str, Any]) -> None:
    assert text_sampling(fields(**given), VOCABULARY) == Sampling()
    assert without_effect(fields(**given)) == []


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0},
        {"temperature": 1e-7},
        {"temperature": 0, "top_p": 0.5, "min_p": 0.1, "top_k": 5},
        {"temperature": 0.7, "top_k": 1},
        {"temperature": 0, "seed": 7, "repetition_penalty": 1.0, "frequency_penalty": 0, "logit_bias": {}},
    ],
)
def test_greedy_draws_nothing(given: dict[str, Any]) -> None:
    assert text_sampling(fields(**given), VOCABULARY) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"frequency_penalty": 2}, {"frequency_penalty": 2}),
        ({"logit_bias": {"0": -100}}, {"logit_bias": {0: -100.0}}),
        ({"min_tokens": 3}, {"min_new_tokens": 3}),
        ({"repetition_penalty": 1.2, "top_p": 0.5, "min_p": 0.3}, {"repetition_penalty": 1.2}),
    ],
)
def test_greedy_with_something_that_bends_it(given: dict[str, Any], expected: dict[str, Any]) -> None:
    for greedy in ({"temperature": 0}, {"temperature": 0.7, "top_k": 1}):
        assert text_sampling(fields(**greedy, **given), VOCABULARY) == Sampling(temperature=0.0, **expected)


@pytest.mark.parametrize("key", ["64", "-1", "1.0", "x", "", "07", "+7", " 7", "1_0", "\u0667", "9" * 30])
def test_a_bias_is_for_tokens_of_the_vocabulary(key: str) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary of 64") as caught:
        token_bias(fields(logit_bias={"63": 1.0, key: 1.0}), VOCABULARY, "sampling_params.")
    assert (caught.value.param, caught.value.code) == ("sampling_params.logit_bias", "token_out_of_vocabulary")
