"""POST /v1/recommend against the engine itself and against the catalog file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.http.service import MODEL_NAME, Service
from widebeam.engine.request import SearchParams


def catalog_rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["item_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_golden_answer(service: Service, catalog_file: Path) -> None:
    body = {"history": ["item-3", "item-17"], "n": 4, "fields": ["title", "popularity"], "request_id": "req-1"}
    answer = service.post("/v1/recommend", body)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("application/json")
    found = answer.json
    assert list(found) == [
        "id", "model", "catalog", "normalizer", "items", "usage", "timing_ms", "warnings",
    ]  # fmt: skip
    assert found["id"] == "req-1" and answer.headers["x-request-id"] == "req-1"
    assert found["model"] == MODEL_NAME
    assert found["catalog"] == {"name": "items", "version": 1}
    assert found["normalizer"] == "level"
    assert found["warnings"] == []
    assert set(found["timing_ms"]) == {"queue", "prefill", "decode", "total"}
    # "watched", two SIDs of three tokens, "next"
    assert found["usage"]["prompt_tokens"] == 8
    assert found["usage"]["total_tokens"] == 8 + found["usage"]["completion_tokens"]
    rows = catalog_rows(catalog_file)
    assert len(found["items"]) == 4
    for item in found["items"]:
        assert list(item) == ["id", "sid", "token_ids", "score", "cum_logprob", "metadata"]
        row = rows[item["id"]]
        assert item["sid"] == row["sid"]
        assert item["metadata"] == {"title": row["title"], "popularity": row["popularity"]}
        assert item["score"] == pytest.approx(item["cum_logprob"] / 3)
    scores = [item["score"] for item in found["items"]]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beam_width": 32, "n": 12},
        {"normalizer": "legal", "length_penalty": 0.5},
        {"normalizer": "vocab"},
        {"policy": {"name": "scheduled", "widths": [4, 16, 12]}},
    ],
)
def test_equals_the_engine(service: Service, options: dict[str, Any]) -> None:
    body = {"input_ids": [7, 11, 30, 8], "n": 10, **options}
    found = service.post("/v1/recommend", body).json["items"]
    params = msgspec.convert({key: value for key, value in options.items() if key != "n"}, SearchParams)
    wanted = service.engine.recommend(input_ids=[7, 11, 30, 8], n=body["n"], params=params)
    expected = service.thread.run(wanted).items
    assert [(item["id"], item["token_ids"]) for item in found] == [(item.id, item.token_ids) for item in expected]
    assert [item["score"] for item in found] == pytest.approx([item.score for item in expected], abs=1e-5)


def test_four_forms_of_one_prompt(service: Service, catalog_file: Path) -> None:
    """History, text and token ids that mean the same give the same items; messages go through the template."""
    by_history = service.post("/v1/recommend", {"history": ["item-5"], "n": 3}).json
    sid = " ".join(catalog_rows(catalog_file)["item-5"]["sid"])
    by_text = service.post("/v1/recommend", {"prompt": f"watched {sid} next", "n": 3}).json
    ids = service.thread.run(service.engine.encode(f"watched {sid} next"))
    by_ids = service.post("/v1/recommend", {"input_ids": ids, "n": 3}).json
    assert by_history["items"] == by_text["items"] == by_ids["items"]
    turns = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    by_messages = service.post("/v1/recommend", {"messages": turns, "n": 3}).json
    same_ids = service.thread.run(service.engine.render_chat([{"role": "user", "content": "a\nb"}]))
    assert by_messages["items"] == service.post("/v1/recommend", {"input_ids": same_ids, "n": 3}).json["items"]


def test_unknown_items_are_counted_or_refused(service: Service) -> None:
    body = {"history": ["item-1", "ghost", 404], "n": 2}
    found = service.post("/v1/recommend", body).json
    (warning,) = found["warnings"]
    assert "2 history items" in warning and "ghost" in warning and "404" in warning
    assert found["items"] == service.post("/v1/recommend", {"history": ["item-1"], "n": 2}).json["items"]
    (warning,) = service.post("/v1/recommend", body | {"history": ["item-1", "ghost"]}).json["warnings"]
    assert warning.startswith("1 history item is not in the catalog")
    refused = service.post("/v1/recommend", body | {"unknown_items": "refuse"})
    assert refused.status == 400
    assert refused.json["error"]["code"] == "unknown_item" and refused.json["error"]["param"] == "history"


def test_a_history_that_is_cut_says_so(service: Service) -> None:
    history = [f"item-{index}" for index in range(30)]  # the template keeps 20
    found = service.post("/v1/recommend", {"history": history, "n": 2}).json
    assert found["warnings"] == ["history: only the newest 20 of 30 known items are used: the template's max_items"]
    assert found["items"] == service.post("/v1/recommend", {"history": history[-20:], "n": 2}).json["items"]


def test_without_a_catalog_there_is_nothing_to_recommend(service: Service, bare_service: Service) -> None:
    for answer in (
        bare_service.post("/v1/recommend", {"input_ids": [7]}),
        service.post("/v1/recommend", {"input_ids": [7], "catalog": "none"}),
    ):
        assert answer.status == 400
        assert answer.json["error"]["code"] == "no_catalog"
        assert "--catalog" in answer.json["error"]["message"] and "/generate" in answer.json["error"]["message"]


def test_the_default_width_grows_with_n(service: Service) -> None:
    found = service.post("/v1/recommend", {"input_ids": [7, 8], "n": 40}).json
    assert len(found["items"]) == 40  # more than default_beam_width


def test_the_model_that_is_named_is_echoed(service: Service) -> None:
    body = {"input_ids": [7, 11], "n": 1}
    assert service.post("/v1/recommend", body).json["model"] == MODEL_NAME
    assert service.post("/v1/recommend", body | {"model": "org/other"}).json["model"] == "org/other"
    assert service.post("/v1/recommend", body | {"model": "x" * 1025}).json["error"]["param"] == "model"
