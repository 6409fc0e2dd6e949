"""A catalog with begin and end markers, on every route: as if the prompt spelled the one, and texts show the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.http.service import Service, running_service

BEGIN, END = "next", "b"
IDS = [7, 20, 30]
HISTORY = ["item-1", "item-2"]


@pytest.fixture(scope="module")
def marked(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The catalog of the other service, with markers and a template without its last word."""
    path = tiny.save_catalog(tmp_path_factory.mktemp("marked") / "items.jsonl")
    header = json.loads((path.parent / "catalog.json").read_text())
    header |= {"begin": BEGIN, "end": END, "template": header["template"] | {"suffix": ""}}
    (path.parent / "catalog.json").write_text(json.dumps(header))
    with running_service(checkpoint, path) as service:
        yield service
        service.check()


def begin_of(service: Service) -> int:
    assert service.engine.tokenizer is not None
    begin = service.engine.tokenizer.token_id(BEGIN)
    assert begin is not None
    return begin


def plain(answer: Any) -> Any:
    """Without what differs from call to call."""
    return {k: v for k, v in answer.items() if k not in ("id", "created", "timing_ms")}


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ({"input_ids": IDS}, {"input_ids": [*IDS, 8]}),
        ({"input_ids": [*IDS, 8]}, {"input_ids": [*IDS, 8]}),  # it is there already
        ({"prompt": "watched <a_1>"}, {"prompt": "watched <a_1> next"}),
        ({"messages": [{"role": "user", "content": "watched"}]}, None),
        ({"history": HISTORY}, {"history": HISTORY}),
    ],
    ids=["ids", "ids with it", "prompt", "messages", "history"],
)
def test_recommend_searches_behind_the_marker(marked: Service, service: Service, given: Any, spelled: Any) -> None:
    assert begin_of(marked) == 8
    if spelled is None:
        ids = service.thread.run(service.engine.render_chat(given["messages"]))
        spelled = {"input_ids": [*ids, 8]}
    wanted = service.post("/v1/recommend", spelled).json
    found = marked.post("/v1/recommend", given).json
    assert wanted["items"] and plain(found) == plain(wanted)


def test_texts_show_the_end_and_tokens_do_not(marked: Service, service: Service) -> None:
    body = {"input_ids": IDS, "sampling_params": {"n": 4}, "return_prompt_token_ids": True}
    found = marked.post("/generate", body).json
    wanted = service.post("/generate", body | {"input_ids": [*IDS, 8]}).json
    assert found["prompt_token_ids"] == [*IDS, 8] == wanted["prompt_token_ids"]
    assert found["meta_info"]["prompt_tokens"] == 4
    for mine, theirs in zip(found["meta_info"]["beam_results"], wanted["meta_info"]["beam_results"], strict=True):
        assert mine["output_ids"] == theirs["output_ids"] and len(mine["output_ids"]) == tiny.LEVELS
        assert mine["text"] == theirs["text"] + f" {END}"
        assert mine["meta_info"]["sequence_score"] == theirs["meta_info"]["sequence_score"]


def test_openai_routes(marked: Service, service: Service) -> None:
    for path, prompt in (("/v1/chat/completions", "input_ids"), ("/v1/completions", "prompt")):
        found = marked.post(path, {prompt: IDS, "n": 3}).json
        wanted = service.post(path, {prompt: [*IDS, 8], "n": 3}).json
        assert found["usage"] == wanted["usage"] and found["usage"]["prompt_tokens"] == 4
        for mine, theirs in zip(found["choices"], wanted["choices"], strict=True):
            assert mine["sglext"] == theirs["sglext"]
            said = [choice.get("text") or choice["message"]["content"] for choice in (mine, theirs)]
            assert said[0] == f"{said[1]} {END}"


def test_without_a_catalog_there_are_no_markers(marked: Service, service: Service) -> None:
    body = {"input_ids": IDS, "sampling_params": {"temperature": 0, "max_new_tokens": 3}, "catalog": "none"}
    found, wanted = marked.post("/generate", body).json, service.post("/generate", body).json
    assert (found["text"], found["output_ids"]) == (wanted["text"], wanted["output_ids"])
    assert found["meta_info"]["prompt_tokens"] == 3


def test_the_marker_takes_its_place_in_the_context(marked: Service) -> None:
    most = marked.engine.max_context_len
    room = most - tiny.LEVELS - 1
    assert marked.post("/v1/recommend", {"input_ids": [7] * room}).status == 200
    refused = marked.post("/v1/recommend", {"input_ids": [7] * (room + 1)})
    assert refused.status == 400 and refused.json["error"]["code"] == "context_too_long"
    assert marked.post("/v1/recommend", {"history": HISTORY * most}).json["usage"]["prompt_tokens"] <= room + 1


def test_an_empty_prompt_stays_empty(marked: Service) -> None:
    for body in ({"input_ids": []}, {"input_ids": [], "return_prompt_token_ids": True}):
        refused = marked.post("/generate", body)
        assert refused.status == 400 and "empty" in refused.content.decode()
