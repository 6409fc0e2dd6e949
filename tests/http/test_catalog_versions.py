"""Which version of a catalog a search runs on, and how long an earlier one is held."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.http.service import Answer, code, running_service, wait_until
from tests.http.subject import ROW, Subject
from widebeam import Client, errors


def test_a_search_that_waits_finishes_on_its_version(subject: Subject) -> None:
    engine = subject.service.engine
    with ThreadPoolExecutor() as pool:
        with subject.service.held():
            search = pool.submit(subject.everything)
            wait_until(lambda: bool(engine._waiting))
            change = pool.submit(subject.change, (), ["item-6"])
            wait_until(lambda: engine.live._waiting[subject.name] == 1)
        assert search.result() == (1, subject.rows)
        assert change.result().json["version"] == 2
    version, items = subject.everything()
    assert version == 2 and "item-6" not in items


def test_every_answer_is_of_the_version_that_it_names(subject: Subject) -> None:
    """50 changes and 50 searches at once."""
    added: dict[int, str] = {}

    def change(number: int) -> None:
        answer = subject.change([ROW | {"item_id": f"new-{number}"}])
        assert answer.status == 200, answer.content
        added[answer.json["version"]] = f"new-{number}"

    with ThreadPoolExecutor(16) as pool:
        searches = []
        for number in range(50):
            made = pool.submit(change, number)
            searches.append(pool.submit(subject.everything))
        results = [search.result() for search in searches]
        made.result()
    assert sorted(added) == list(range(2, 52))
    for version, items in results:
        assert set(items) == subject.rows.keys() | {added[one] for one in range(2, version + 1)}
    assert len({version for version, _ in results}) > 3


ASKED: dict[str, dict[str, Any]] = {
    "/v1/recommend": {"input_ids": [7, 11], "n": 2},
    "/generate": {"input_ids": [[7, 11], [7]], "sampling_params": {"n": 2}},
    "/v1/chat/completions": {"input_ids": [7, 11], "n": 2},
    "/v1/completions": {"prompt": [7, 11], "n": 2},
}


@pytest.mark.parametrize("route", ASKED)
def test_an_older_version_than_the_request_wants_is_no_answer(subject: Subject, route: str) -> None:
    """Before the version comes, while it is there, when it is passed, and once it was taken back."""

    def ask(version: Any, **fields: Any) -> Answer:
        body = ASKED[route] | {"catalog": subject.name, "min_catalog_version": version} | fields
        return subject.service.post(route, body)

    def refused(version: int, present: int) -> None:
        answer = ask(version)
        error = answer.json["error"]
        assert code(answer) == (503, "catalog_version_not_ready") and error["param"] == "min_catalog_version"
        assert f"at version {present} here, not yet at {version}" in error["message"]
        assert answer.headers["retry-after"] == "1" and "x-catalog-version" not in answer.headers

    refused(2, present=1)
    subject.change([ROW])
    assert [ask(version).headers["x-catalog-version"] for version in (None, 0, 1, 2)] == ["2"] * 4
    refused(3, present=2)
    subject.roll_back(1)
    refused(2, present=1)
    assert ask(1).headers["x-catalog-version"] == "1"
    for wrong in (-1, 2**53 + 1, "2", 1.5):
        assert ask(wrong).status == 400
    for other, status in (("nothing", 404), ("none", 400)):
        assert ask(1, catalog=other).status == status


def test_the_client_waits_for_a_version(subject: Subject) -> None:
    """It is told to come again, and does."""
    with Client(subject.service.url) as client, ThreadPoolExecutor() as pool:
        with pytest.raises(errors.CatalogVersionNotReady) as not_ready:
            client.recommend(input_ids=[7], catalog=subject.name, min_catalog_version=2, timeout=0.5)
        assert not_ready.value.retry_after_s == 1.0 and not_ready.value.retryable
        refused = 'widebeam_requests_total{outcome="catalog_version_not_ready",route="/v1/recommend"}'
        before = counted(subject, refused)
        asked = pool.submit(client.recommend, input_ids=[7], catalog=subject.name, min_catalog_version=2)
        wait_until(lambda: counted(subject, refused) > before)
        subject.change([ROW])
        assert asked.result().catalog.version == 2


def counted(subject: Subject, name: str) -> float:
    lines = subject.service.get("/metrics").content.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_a_version_that_nobody_searches_is_let_go_by_the_device(subject: Subject) -> None:
    """It lies there for as long as the catalog object that was searched is held, which no answered search does."""
    searched = weakref.ref(subject.service.engine.catalogs.get(subject.name))
    with ThreadPoolExecutor() as pool:
        with subject.service.held():
            search = pool.submit(subject.everything)
            wait_until(lambda: bool(subject.service.engine._waiting))
            change = pool.submit(subject.change, [ROW])
            wait_until(lambda: subject.service.engine.live._waiting[subject.name] == 1)
            assert searched() is not None
        assert search.result()[0] == 1 and change.result().json["earlier"] == [1]
    wait_until(lambda: searched() is None)
    assert subject.roll_back(1).json["version"] == 1 and subject.everything() == (1, subject.rows)


def test_a_request_keeps_to_the_catalog_that_it_was_checked_for(checkpoint: Path, root: Path) -> None:
    """Its prompt is still being made when the first catalog comes."""
    made, body = threading.Event(), {"text": "a b", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    with running_service(checkpoint, None) as service, ThreadPoolExecutor() as pool:
        making = service.engine._prompts._thread
        making.submit(made.wait, 30)
        answering = pool.submit(service.post, "/generate", body)
        wait_until(lambda: making._work_queue.qsize() == 1)
        service.thread.run(service.engine.load_catalog(root / "items.jsonl"))
        made.set()
        answer = answering.result()
        assert answer.status == 200, answer.json
        assert len(answer.json["output_ids"]) == 2 and "items" not in answer.json["meta_info"]
        assert "items" in service.post("/generate", body | {"sampling_params": {}}).json["meta_info"]
        service.check()
