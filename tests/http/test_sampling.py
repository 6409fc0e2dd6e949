"""Which search the beam and sampling fields of the text dialects mean."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from widebeam.errors import InvalidRequest
from widebeam.http.sampling import BeamPlan, SamplingFields, beam_plan, check_sampling
from widebeam.policies import PolicySpec

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
        ({"n": 64, "temperature": 0}, BeamPlan(64, 64, True)),
        ({"n": 64, "top_k": 1}, BeamPlan(64, 64, True)),
    ],
)
def test_beam_dialects(given: dict[str, Any], expected: BeamPlan) -> None:
    assert beam_plan(fields(**given), None, catalog_in_use=False) == expected


def test_n_alone_means_beams_with_a_catalog_and_samples_without() -> None:
    assert beam_plan(fields(n=8), None, catalog_in_use=True) == BeamPlan(8, 8, True)
    with pytest.raises(InvalidRequest, match="8 samples") as caught:
        beam_plan(fields(n=8), None, catalog_in_use=False, where="sampling_params.")
    assert caught.value.param == "sampling_params.n"


def test_a_policy_with_widths_decides_the_width() -> None:
    assert beam_plan(fields(n=2), SCHEDULE, catalog_in_use=False) == BeamPlan(2, None, True)
    assert beam_plan(fields(n=2, beam_width=8), SCHEDULE, catalog_in_use=False) == BeamPlan(2, 8, True)
    assert beam_plan(fields(n=4), PolicySpec(name="fixed"), catalog_in_use=False) == BeamPlan(4, 4, True)


@pytest.mark.parametrize("given", [{"n": 5, "beam_width": 4}, {"n": 2, "beam_width": 1}])
def test_more_sequences_than_beams(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="beam_width is only") as caught:
        beam_plan(fields(**given), None, catalog_in_use=True)
    assert caught.value.param == "n"


WITHOUT_EFFECT_ON_BEAMS = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"7": 2.0},
}


@pytest.mark.parametrize(("name", "value"), WITHOUT_EFFECT_ON_BEAMS.items())
def test_sampling_fields_are_listed_with_beams_and_refused_without(name: str, value: Any) -> None:
    assert check_sampling(fields(**{name: value}), None, beams=True) == [f"no effect on a beam search: {name}"]
    with pytest.raises(InvalidRequest, match="not supported") as caught:
        check_sampling(fields(**{name: value}), None, beams=False)
    assert (caught.value.param, caught.value.code) == (name, "unsupported_field")


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"])
def test_greedy_decoding_still_refuses_what_would_change_it(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        check_sampling(fields(temperature=0, **{name: WITHOUT_EFFECT_ON_BEAMS[name]}), None, beams=False)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0},
        {"temperature": 1e-7},
        {"temperature": 0, "top_p": 0.5, "min_p": 0.1, "top_k": 5},
        {"temperature": 0.7, "top_k": 1},
    ],
)
def test_greedy_needs_no_warning(given: dict[str, Any]) -> None:
    assert check_sampling(fields(**given), 7, beams=False) == []


@pytest.mark.parametrize("given", [{}, {"temperature": 1.0}, {"top_k": -1}, {"top_k": 2**30}, {"top_p": 1}])
def test_default_temperature_decodes_greedily_and_says_so(given: dict[str, Any]) -> None:
    (warning,) = check_sampling(fields(**given), None, beams=False)
    assert "greedily" in warning
    assert check_sampling(fields(**given), None, beams=True) == []


def test_a_seed_does_not_change_beams() -> None:
    assert check_sampling(fields(), 7, beams=True) == ["no effect on a beam search: seed"]
