"""Policies over HTTP: what they change, and what is refused."""

from __future__ import annotations

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
    ],
)
def test_refusals_name_the_field(service: Service, policy: dict[str, Any], param: str) -> None:
    answer = service.post("/v1/recommend", BODY | {"policy": policy})
    assert answer.status == 400 and answer.json["error"]["param"] == param
