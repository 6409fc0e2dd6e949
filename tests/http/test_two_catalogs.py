"""Two catalogs of different depths and codebooks on one server: requests choose, and their waves never mix."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.http.service import Service, running_service, wait_until
from widebeam import Engine, errors
from widebeam.engine.runtime import Runtime

SIDS = [[token, 12 + token % 5] for token in range(20, 50)]


@pytest.fixture(scope="module")
def two(checkpoint: Path, catalog_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path = tmp_path_factory.mktemp("second") / "items.jsonl"  # the other file's name
    path.write_text("".join(json.dumps({"item_id": 100 + i, "sid": sid}) + "\n" for i, sid in enumerate(SIDS)))
    with running_service(checkpoint, (str(catalog_file), f"short={path}")) as service:
        yield service
        service.check()


def ask(service: Service, **fields: Any) -> Any:
    answer = service.post("/v1/recommend", {"input_ids": [5, 6, 7], "n": 8, "beam_width": 16} | fields)
    assert answer.status == 200, answer.content
    return answer.json


def test_each_request_gets_its_catalog(two: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    waves: list[list[str]] = []
    launch = Runtime.launch

    def noting(runtime: Runtime, jobs: Any, *rest: Any) -> Any:
        waves.append([job.search.catalog.name for job in jobs])
        return launch(runtime, jobs, *rest)

    alone = {name: [item["id"] for item in ask(two, catalog=name)["items"]] for name in ("items", "short")}
    assert len(alone["items"]) == len(alone["short"]) == 8
    assert all(str(item).startswith("item-") for item in alone["items"])
    assert set(alone["short"]) <= {100 + i for i in range(len(SIDS))}
    monkeypatch.setattr(Runtime, "launch", noting)
    with ThreadPoolExecutor(12) as pool, two.held():
        names = ["items", "short"] * 6
        asked = [pool.submit(ask, two, catalog=name) for name in names]
        wait_until(lambda: two.engine.stats().requests_waiting == len(names))
    for name, future in zip(names, asked, strict=True):
        answer = future.result()
        assert answer["catalog"] == {"name": name, "version": 1}
        assert [item["id"] for item in answer["items"]] == alone[name]
        assert {len(item["sid"]) for item in answer["items"]} == ({3} if name == "items" else {2})
    assert sorted(name for wave in waves for name in wave) == sorted(names)
    assert all(len(set(wave)) == 1 for wave in waves) and len(waves) < len(names)


def test_who_names_none_is_asked_which(two: Service) -> None:
    answer = two.post("/v1/recommend", {"input_ids": [5], "n": 1})
    assert (answer.status, answer.json["error"]["code"]) == (400, "ambiguous_catalog")
    assert "items, short" in answer.json["error"]["message"] and "--default-catalog" in answer.json["error"]["message"]
    assert [one["default"] for one in two.get("/v1/catalogs").json["data"]] == [False, False]
    answer = two.post("/v1/recommend", {"input_ids": [5], "n": 1, "catalog": "shrt"})
    assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_catalog")
    assert "short" in answer.json["error"]["message"]
    text = two.get("/metrics").content.decode()
    assert 'widebeam_catalog_items{catalog="short"} 30' in text and 'widebeam_catalog_items{catalog="items"} 60' in text


def test_the_default_is_a_setting(checkpoint: Path, catalog_file: Path) -> None:
    both, body = (f"a={catalog_file}", f"b={catalog_file}"), {"input_ids": [7, 11], "n": 1}
    with running_service(checkpoint, both, default_catalog="b") as service:
        assert service.post("/v1/recommend", body).json["catalog"]["name"] == "b"
    with pytest.raises(errors.ConfigError, match="none of the name 'c', but a, b"):
        Engine(str(checkpoint), catalog=both, default_catalog="c").run(asyncio.sleep(0))
