"""Catalog files that are watched, over real HTTP."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.http.service import Service, running_service, wait_until
from tests.http.subject import ROW


@pytest.fixture
def watched(checkpoint: Path, tmp_path: Path) -> Iterator[tuple[Service, Path]]:
    file = tiny.save_catalog(tmp_path / "items.jsonl")
    with running_service(
        checkpoint, file, watch_catalogs=True, watch_interval_s=0.05, catalog_root=str(tmp_path)
    ) as service:
        yield service, file


def replace(file: Path, text: str) -> None:
    """By renaming, so that nobody sees a part."""
    (file.parent / "next").write_text(text)
    (file.parent / "next").rename(file)


def version_of(service: Service, name: str) -> int:
    return int(service.get(f"/v1/catalogs/{name}").json["version"])


def test_a_watched_file_is_loaded_when_it_changes(
    watched: tuple[Service, Path], caplog: pytest.LogCaptureFixture
) -> None:
    service, file = watched
    lines, outcomes = file.read_text(), service.engine.live.stats.outcomes

    def version() -> int:
        return version_of(service, "items")

    replace(file, lines + json.dumps(ROW) + "\n")
    wait_until(lambda: version() == 2)
    assert service.get("/v1/catalogs/items").json["items"] == 61
    replace(file, lines + '{"item_id": "half a line')
    wait_until(lambda: outcomes["items", "invalid_catalog"] == 1)
    threading.Event().wait(0.3)  # it is looked at several times more
    assert outcomes["items", "invalid_catalog"] == 1 and version() == 2
    assert [record.levelname for record in caplog.records if "has changed" in record.message].count("ERROR") == 1
    (file.parent / "items.catalog.json").write_text('{"sid": "tokens"}')
    replace(file, lines)
    wait_until(lambda: version() == 3)
    assert service.engine.catalogs.get("items").header.order is None
    assert service.post("/v1/catalogs/items/items", {"remove": ["item-3"]}).json["version"] == 4
    threading.Event().wait(0.2)
    assert version() == 4


def link(at: Path, target: Path) -> None:
    """In place of another link, in one step."""
    (at.parent / "next").symlink_to(target)
    (at.parent / "next").rename(at)


def test_a_watched_link_is_followed_anew(
    watched: tuple[Service, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    service, file = watched
    outcomes, place = service.engine.live.stats.outcomes, file.parent / "current"
    rows = file.read_text().splitlines(keepends=True)
    outside = tmp_path_factory.mktemp("outside")
    for number, folder in enumerate((file.parent / "v1", file.parent / "v2", outside)):
        folder.mkdir(exist_ok=True)
        (folder / "items.jsonl").write_text("".join(rows[number:]))
    link(place, file.parent / "v1")
    url = "/v1/catalogs/linked"
    assert service.call("PUT", url, {"path": "current/items.jsonl"}).json["items"] == 60
    link(place, file.parent / "v2")
    wait_until(lambda: version_of(service, "linked") == 2)
    assert service.get(url).json["items"] == 59
    link(place, outside)
    wait_until(lambda: outcomes["linked", "invalid_request"] == 1)
    threading.Event().wait(0.2)
    assert (version_of(service, "linked"), outcomes["linked", "invalid_request"]) == (2, 1)
    link(place, file.parent / "v1")
    wait_until(lambda: version_of(service, "linked") == 3)
    assert service.get(url).json["items"] == 60


def test_a_file_is_watched_though_its_client_went_away(watched: tuple[Service, Path]) -> None:
    service, file = watched
    body = json.dumps({"path": file.name}).encode()
    head = f"PUT /v1/catalogs/left HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with service.held():
        with socket.create_connection(service.address, timeout=10) as sock:
            sock.sendall(head + body)
            wait_until(lambda: service.engine.live._waiting["left"] == 1)
        wait_until(lambda: b'outcome="cancelled"' in service.get("/metrics").content)
    wait_until(lambda: service.get("/v1/catalogs/left").status == 200)
    replace(file, file.read_text() + json.dumps(ROW) + "\n")
    wait_until(lambda: version_of(service, "left") == 2)


def test_what_may_go_well_later_is_tried_again(watched: tuple[Service, Path], caplog: pytest.LogCaptureFixture) -> None:
    service, file = watched
    service.call("PUT", "/v1/catalogs/other", {"path": file.name})
    url = "/v1/catalogs/other/items"
    with ThreadPoolExecutor(64) as pool:
        with service.held():
            waiting = [pool.submit(service.post, url, {"upsert": [ROW]}) for _ in range(64)]
            wait_until(lambda: service.engine.live._waiting["other"] == 64)
            replace(file, file.read_text() + json.dumps(ROW) + "\n")
            wait_until(lambda: sum("tried again as 'items'" in record.message for record in caplog.records) > 1)
            assert version_of(service, "items") == 1
        assert {one.result().status for one in waiting} == {200}
    wait_until(lambda: version_of(service, "items") == 2)


def test_a_defect_does_not_end_the_watch(
    watched: tuple[Service, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, file = watched
    lines, outcomes = file.read_text(), service.engine.live.stats.outcomes

    def broken(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr("widebeam.constraints.formats.read", broken)
        replace(file, lines + json.dumps(ROW) + "\n")
        wait_until(lambda: outcomes["items", "internal_error"] == 1)
        threading.Event().wait(0.2)
        assert outcomes["items", "internal_error"] == 1 and version_of(service, "items") == 1
    assert [record.exc_info is not None for record in caplog.records if "stays as it is" in record.message] == [True]
    replace(file, lines + json.dumps(ROW) + "\n\n")
    wait_until(lambda: version_of(service, "items") == 2)
