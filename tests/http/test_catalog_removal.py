"""Catalogs that are removed while the server serves."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.http.service import code, running_service, wait_until
from tests.http.subject import ROW, Subject
from widebeam import Client


def test_a_catalog_is_removed(subject: Subject) -> None:
    """Who waits for a search of it gets that; nothing of it is held, counted or found any more."""
    service, name = subject.service, f'catalog="{subject.name}"'
    searched = weakref.ref(service.engine.catalogs.get(subject.name))
    assert code(service.call("DELETE", f"{subject.url}?if_version=2")) == (409, "version_conflict")
    assert code(service.call("DELETE", f"{subject.url}?version=1")) == (400, "unknown_field")
    with ThreadPoolExecutor() as pool, service.held():
        search = pool.submit(subject.everything)
        wait_until(lambda: bool(service.engine._waiting))
        answer = service.call("DELETE", f"{subject.url}?if_version=1")
        assert (answer.status, answer.json["version"], answer.json["items"]) == (200, 1, 60), answer.content
        assert code(service.post("/v1/recommend", {"input_ids": [7], "n": 1, "catalog": subject.name})) == (
            404,
            "unknown_catalog",
        )
        assert searched() is not None
    assert search.result() == (1, subject.rows)
    wait_until(lambda: gc.collect() >= 0 and searched() is None)
    assert name not in service.get("/metrics").content.decode()
    for answer in (service.call("DELETE", subject.url), subject.change((), ["item-3"]), subject.roll_back(1)):
        assert code(answer) == (404, "unknown_catalog")
    assert (subject.put({"path": "items.jsonl"}).json["version"], subject.info()["earlier"]) == (2, [])


def test_of_two_that_remove_a_catalog_one_does(subject: Subject) -> None:
    with ThreadPoolExecutor() as pool:
        with subject.service.held():
            first = pool.submit(subject.change, [ROW])
            wait_until(lambda: subject.service.engine.live._waiting[subject.name] == 1)
            removing = [pool.submit(subject.service.call, "DELETE", subject.url) for _ in range(2)]
            wait_until(lambda: subject.service.engine.live._waiting[subject.name] == 3)
            late = pool.submit(subject.change, [ROW])
        assert first.result().status == 200
        assert sorted(one.result().status for one in removing) == [200, 404]
        assert late.result().status == 404


def test_loads_do_not_change_the_default_and_it_can_be_removed(checkpoint: Path, root: Path) -> None:
    plain, prompt = {"input_ids": [7, 11], "n": 1}, {"input_ids": [7, 11], "sampling_params": {"max_new_tokens": 2}}
    with running_service(checkpoint, root / "items.jsonl", catalog_root=str(root), watch_catalogs=True) as service:
        assert service.call("PUT", "/v1/catalogs/itmes", {"path": "items.jsonl"}).status == 200
        told = {one["name"]: one["default"] for one in service.get("/v1/catalogs").json["data"]}
        assert told == {"items": True, "itmes": False}
        assert service.post("/v1/recommend", plain).json["catalog"]["name"] == "items"
        with Client(service.url) as client:
            assert client.remove_catalog("itmes", if_version=1).default is False
            assert [one.name for one in client.catalogs()] == ["items"]
            client.put_catalog("other", path="items.jsonl")
            assert client.remove_catalog("items").default
        assert set(service.engine.live.loader.files) == {"other"}, "what is removed is watched no more"
        refused = service.post("/v1/recommend", plain)
        assert code(refused) == (400, "no_catalog") and "name one of other" in refused.json["error"]["message"]
        assert "items" not in service.post("/generate", prompt).json["meta_info"]
        service.check()
