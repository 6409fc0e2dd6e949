"""Item filters on every route: what comes back is the ranking of all items, less those that may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.http.service import Service

HISTORY = ["item-3", "item-17"]


@pytest.fixture(scope="module")
def rows(catalog_file: Path) -> dict[str, dict[str, Any]]:
    return {row["item_id"]: row for row in map(json.loads, catalog_file.read_text().splitlines())}


def recommend(service: Service, **fields: Any) -> Any:
    answer = service.post("/v1/recommend", {"history": HISTORY, "n": 200, "beam_width": 200} | fields)
    assert answer.status == 200, answer.content
    return answer.json


def ranking(answer: Any) -> list[tuple[str, float]]:
    return [(item["id"], round(item["score"], 4)) for item in answer["items"]]


@pytest.fixture
def everything(service: Service, rows: dict[str, dict[str, Any]]) -> list[tuple[str, float]]:
    """All items, best first: the beam is wider than the catalog."""
    found = ranking(recommend(service))
    assert {name for name, _ in found} == set(rows)
    return found


FILTERS: list[tuple[dict[str, Any], Any]] = [
    ({"deny": ["item-1", "item-2", "item-30"]}, lambda row: row["item_id"] not in ("item-1", "item-2", "item-30")),
    ({"allow": ["item-5", "item-9", "nothing"]}, lambda row: row["item_id"] in ("item-5", "item-9")),
    ({"where": [{"column": "popularity", "op": ">=", "value": 7}]}, lambda row: row["popularity"] >= 7),
    (
        {
            "where": [
                {"column": "popularity", "op": "in", "value": [1, 2, 3, 4, 5]},
                {"column": "title", "op": "contains", "value": "1"},
            ],
            "deny": ["item-1"],
        },
        lambda row: row["popularity"] in range(1, 6) and "1" in row["title"] and row["item_id"] != "item-1",
    ),
]


@pytest.mark.parametrize(("filters", "passes"), FILTERS)
def test_a_filtered_ranking_is_the_ranking_filtered(
    service: Service, rows: dict[str, dict[str, Any]], everything: Any, filters: dict[str, Any], passes: Any
) -> None:
    wanted = [(name, score) for name, score in everything if passes(rows[name])]
    assert 0 < len(wanted) < len(everything)
    found = recommend(service, filters=filters)
    assert ranking(found) == wanted
    assert any("nothing" in warning for warning in found["warnings"]) == ("nothing" in filters.get("allow", ()))


def test_no_beam_is_wasted(service: Service, everything: Any) -> None:
    """A beam of two over the two worst items finds them, where filtering its answer would have found nothing."""
    worst = [name for name, _ in everything[-2:]]
    found = recommend(service, n=2, beam_width=2, filters={"allow": worst})
    assert {name for name, _ in ranking(found)} == set(worst)


def test_the_history_can_be_left_out(service: Service, everything: Any) -> None:
    found = recommend(service, exclude_history=True, filters={"deny": ["item-0"]})
    assert ranking(found) == [(name, score) for name, score in everything if name not in (*HISTORY, "item-0")]
    with_unknown = service.post(
        "/v1/recommend", {"history": [*HISTORY, "no such item"], "n": 5, "exclude_history": True}
    )
    assert with_unknown.status == 200 and len(with_unknown.json["items"]) == 5


def test_filters_that_leave_nothing(service: Service) -> None:
    nothing = {"where": [{"column": "popularity", "op": ">", "value": 1000}]}
    found = recommend(service, filters=nothing)
    assert found["items"] == [] and any("no item" in warning for warning in found["warnings"])
    body = {"input_ids": [1, 2, 3], "sampling_params": {"beam_width": 4, "n": 4}, "filters": nothing}
    answer = service.post("/generate", body).json
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["beam_results"]) == ("", [], [])
    for path, prompt in (("/v1/chat/completions", "input_ids"), ("/v1/completions", "prompt")):
        answer = service.post(path, {prompt: [1, 2, 3], "n": 4, "beam_width": 4, "filters": nothing})
        assert answer.status == 200 and answer.json["choices"] == []


def test_every_route_filters(service: Service, rows: dict[str, dict[str, Any]]) -> None:
    filters = {"where": [{"column": "popularity", "op": "==", "value": 3}]}
    wanted = {name for name, row in rows.items() if row["popularity"] == 3}
    beams = {"n": 50, "beam_width": 50, "filters": filters}
    generated = service.post(
        "/generate", {"input_ids": [1, 2, 3], "sampling_params": {"n": 50, "beam_width": 50}, "filters": filters}
    ).json
    found = [item for beam in generated["meta_info"]["beam_results"] for item in beam["meta_info"]["items"]]
    assert set(found) == wanted and len(found) == len(wanted)
    for path, prompt in (("/v1/chat/completions", "input_ids"), ("/v1/completions", "prompt")):
        choices = service.post(path, {prompt: [1, 2, 3], **beams}).json["choices"]
        found = [item for choice in choices for item in choice["sglext"]["items"]]
        assert set(found) == wanted and len(found) == len(wanted)


@pytest.mark.parametrize(
    ("filters", "param"),
    [
        ({"where": [{"column": "popularty", "op": "==", "value": 3}]}, "filters.where[0].column"),
        ({"where": [{"column": "popularity", "op": "==", "value": "three"}]}, "filters.where[0].value"),
        ({"where": [{"column": "popularity", "op": "~", "value": 3}]}, "filters.where[0].op"),
        ({"where": [{"column": "title", "op": "==", "value": 3, "code": "x"}]}, "filters.where[0].code"),
        ({"named": ["fresh"]}, "filters.named[0]"),
        ({"deny": [[1]]}, "filters.deny[0]"),
        ({"deny": ["x"] * 100_001}, "filters.deny"),
    ],
)
def test_bad_filters_name_the_place(service: Service, filters: dict[str, Any], param: str) -> None:
    answer = service.post("/v1/recommend", {"history": HISTORY, "filters": filters})
    assert answer.status == 400
    assert answer.json["error"]["param"].replace("[...]", "[0]") == param


def test_only_a_history_can_be_excluded(service: Service) -> None:
    answer = service.post("/v1/recommend", {"input_ids": [1, 2], "exclude_history": True})
    assert answer.status == 400 and answer.json["error"]["param"] == "exclude_history"


def test_filters_need_a_catalog(service: Service) -> None:
    body = {"input_ids": [1, 2, 3], "catalog": "none", "filters": {"deny": ["item-1"]}}
    answer = service.post("/generate", body)
    assert answer.status == 400 and answer.json["param"] == "filters"
