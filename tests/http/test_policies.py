"""Policies over HTTP: what they change, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.http.service import Service

BODY = {"history": ["item-3", "item-17"], "n": 30, "beam_width": 40}


def found(service: Service, policy: dict[str, Any] | None, **fields: Any) -> list[str]:
    answer = service.post("/v1/recommend", BODY | {"policy": policy} | fields)
    assert answer.status == 200, answer.content
    return [item["id"] for item in answer.json["items"]]


def test_neutral_values_change_nothing(service: Service) -> None:
    plain = found(service, None)
    assert found(service, {"name": "score_margin", "margin": 1e6}) == plain
    assert found(service, {"name": "nucleus", "mass": 1.0}) == plain
    assert found(service, {"name": "score_margin", "margin": 0, "floor": 40}) == plain


def test_fewer_beams_find_less(service: Service) -> None:
    """With one beam left after each level, all that comes back begins with the best two codes."""
    greedy = found(service, {"name": "score_margin", "margin": 0})
    assert greedy == found(service, {"name": "nucleus", "mass": 1e-6})
    assert greedy == found(service, {"name": "scheduled", "widths": [1, 1, 40]}, beam_width=None)
    assert 0 < len(greedy) < 30


@pytest.mark.parametrize(
    ("policy", "param"),
    [
        ({"name": "score_margin"}, "policy.margin"),
        ({"name": "score_margin", "margin": -1}, "policy.margin"),
        ({"name": "score_margin", "margin": 1, "mass": 0.5}, "policy.mass"),
        ({"name": "nucleus"}, "policy.mass"),
        ({"name": "nucleus", "mass": 0}, "policy.mass"),
        ({"name": "nucleus", "mass": 0.5, "floor": 0}, "policy.floor"),
        ({"name": "fixed", "widths": [3]}, "policy.widths"),
        ({"name": "fixed", "margin": 2}, "policy.margin"),
        ({"name": "nucleos", "mass": 0.5}, "policy.name"),
        ({"name": "diverse"}, "policy.cap"),
        ({"name": "diverse", "cap": 0}, "policy.cap"),
        ({"name": "diverse", "cap": 5001}, "policy.cap"),
        ({"name": "diverse", "cap": 1.5}, "policy.cap"),
        ({"name": "diverse", "cap": 2, "seed": 1}, "policy.seed"),
        ({"name": "stochastic", "cap": 2}, "policy.cap"),
        ({"name": "stochastic", "seed": 2**63}, "policy.seed"),
        ({"name": "stochastic", "seed": "1"}, "policy.seed"),
    ],
)
def test_refusals_name_the_field(service: Service, policy: dict[str, Any], param: str) -> None:
    answer = service.post("/v1/recommend", BODY | {"policy": policy})
    assert answer.status == 400 and answer.json["error"]["param"] == param


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("name", "field"), [("score_margin", "margin"), ("nucleus", "mass"), ("diverse", "cap"), ("stochastic", "seed")]
)
def test_what_is_no_number_is_refused(service: Service, name: str, field: str, number: str) -> None:
    body = json.dumps(BODY)[:-1] + f', "policy": {{"name": "{name}", "{field}": {number}}}}}'
    assert service.post("/v1/recommend", body.encode()).status == 400


PROMPT = [7, 8, 30, 41]
WIDTH = {"n": 5, "beam_width": 20}
ROUTES: dict[str, Callable[[Any], list[list[str]]]] = {
    "/v1/recommend": lambda answer: [item["sid"] for item in answer["items"]],
    "/generate": lambda answer: [one["text"].split() for one in answer["meta_info"]["beam_results"]],
    "/v1/chat/completions": lambda answer: [one["message"]["content"].split() for one in answer["choices"]],
    "/v1/completions": lambda answer: [one["text"].split() for one in answer["choices"]],
}


@pytest.mark.parametrize("policy", [{"name": "diverse", "cap": 1}, {"name": "stochastic", "seed": 3}])
def test_every_route_takes_them(service: Service, policy: dict[str, Any]) -> None:
    """And finds the same SIDs, which are not those of the best beams. Items of one SID are several of a list."""
    sids = []
    for route, read in ROUTES.items():
        width = {"sampling_params": WIDTH} if route == "/generate" else WIDTH
        prompt = {"prompt" if route == "/v1/completions" else "input_ids": PROMPT}
        answer = service.post(route, prompt | width | {"policy": policy})
        assert answer.status == 200, answer.content
        sids.append([sid for sid, _ in itertools.groupby(read(answer.json))])
    assert len(sids[1]) == 5 and sids[1] == sids[2] == sids[3]
    assert sids[0] == sids[1][: len(sids[0])] and sids[0]
    plain = service.post("/v1/recommend", {"input_ids": PROMPT} | WIDTH).json
    assert sids[0] != [item["sid"] for item in plain["items"]]
    if policy["name"] == "diverse":
        assert len({sid[0] for sid in sids[1]}) == 5
