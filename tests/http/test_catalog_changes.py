"""Batches of changed items and the way back, over real HTTP: what they change, who wins, and what is refused."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.http.service import Service, code, wait_until
from tests.http.subject import LIMITS, ROW, Subject
from widebeam import Client, errors


def test_items_are_added_replaced_and_removed(subject: Subject) -> None:
    assert subject.everything() == (1, subject.rows)
    moved = subject.rows["item-4"] | {"sid": ROW["sid"]}
    renamed = subject.rows["item-5"] | {"title": "Other"}
    answer = subject.change([ROW, moved, renamed], ["item-6", "item-7"])
    assert answer.status == 200 and answer.json["version"] == 2
    wanted = subject.rows | {"new": ROW, "item-4": moved, "item-5": renamed}
    for gone in ("item-6", "item-7"):
        del wanted[gone]
    assert subject.everything() == (2, wanted)
    only = {"where": [{"column": "title", "op": "==", "value": "Other"}]}
    assert list(subject.everything(filters=only)[1]) == ["item-5"]
    _, shared = subject.everything(filters={"allow": ["new", "item-4"]})
    order = sorted(("new", "item-4"), key=lambda one: -wanted[one]["popularity"])  # as the header declares it
    assert list(shared) == order
    info = subject.info()
    assert (info["items"], info["source"], info["earlier"]) == (len(wanted), "update of version 1", [1])
    assert info["codes"] == [6, 16, 16] and info["levels"] == 3 and info["columns"] == ["title", "popularity"]
    assert subject.name in [one["name"] for one in subject.service.get("/v1/catalogs").json["data"]]


def scores(subject: Subject) -> dict[str, float]:
    body = {"input_ids": [7, 11], "n": 200, "beam_width": 200, "catalog": subject.name}
    answer = subject.service.post("/v1/recommend", body)
    assert answer.status == 200 and answer.json["normalizer"] == "level", answer.content
    return {one["id"]: one["score"] for one in answer.json["items"]}


def test_scores_stay_when_items_come_and_go(subject: Subject) -> None:
    """Not when a whole file begins codebooks of its own."""
    before, first = scores(subject), subject.rows["item-0"]["sid"][0]
    gone = [name for name, row in subject.rows.items() if row["sid"][0] == first]
    assert subject.change([ROW], gone).json["codes"] == [6, 16, 16], "its code stays, though nothing begins with it"
    left = {name: score for name, score in before.items() if name not in gone}
    after = scores(subject)
    assert after.pop("new") and after == pytest.approx(left, abs=1e-4)
    outside = ROW | {"item_id": "other", "sid": ["<a_1>", "<b_1>", "<c_2>"]}
    refused = subject.change([outside])
    assert code(refused) == (400, "invalid_item") and "codebook of 6 codes" in refused.json["error"]["message"]
    kept = [row for name, row in subject.rows.items() if name in left]
    lines = "".join(json.dumps(row) + "\n" for row in [*kept, outside])
    loaded = subject.put(lines.encode(), "?format=jsonl").json
    assert (loaded["version"], loaded["codes"][0]) == (3, 6), "one that went, one that came"
    assert scores(subject)[kept[0]["item_id"]] != pytest.approx(left[kept[0]["item_id"]], abs=1e-4)


def test_going_back_and_on(subject: Subject) -> None:
    for number in range(2, 6):
        assert subject.change([ROW | {"title": f"v{number}"}]).json["version"] == number
    assert subject.info()["earlier"] == [4, 3, 2]
    assert code(subject.roll_back(1)) == (404, "unknown_version")
    assert subject.everything()[1]["new"]["title"] == "v5"
    back = subject.roll_back(3, if_version=5)
    assert (back.status, back.json["version"], back.json["earlier"]) == (200, 3, [5, 4, 2])
    assert subject.everything() == (3, subject.rows | {"new": ROW | {"title": "v3"}})
    assert subject.roll_back(3).json["version"] == 3
    assert subject.change((), ["new"]).json["version"] == 6
    assert subject.everything() == (6, subject.rows)
    assert subject.info()["earlier"] == [5, 4, 3]


def test_of_two_changes_of_one_version_one_is_made(subject: Subject) -> None:
    with ThreadPoolExecutor() as pool:
        with subject.service.held():
            racing = [pool.submit(subject.change, [ROW | {"title": title}], if_version=1) for title in "ab"]
            wait_until(lambda: subject.service.engine.live._waiting[subject.name] == 2)
        answers = sorted((one.result() for one in racing), key=lambda answer: answer.status)
    assert answers[0].json["version"] == 2
    assert code(answers[1]) == (409, "version_conflict") and answers[1].json["error"]["type"] == "conflict"
    for answer in (
        subject.roll_back(1, if_version=7),
        subject.put({"path": "items.jsonl", "if_version": 0}),
        subject.put(b"", "?format=jsonl&if_version=1"),
    ):
        assert code(answer) == (409, "version_conflict")
    assert subject.info()["version"] == 2


def test_a_change_is_completed_when_its_client_goes_away(subject: Subject) -> None:
    body = json.dumps({"upsert": [ROW]}).encode()
    head = f"POST {subject.url}/items HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    live = subject.service.engine.live
    with subject.service.held(), socket.create_connection(subject.service.address, timeout=10) as sock:
        sock.sendall(head + body)
        wait_until(lambda: live._waiting[subject.name] == 1)
    wait_until(lambda: subject.info()["version"] == 2)
    assert subject.everything()[1].keys() == subject.rows.keys() | {"new"}


WRONG_ROWS: list[tuple[Any, str, str]] = [
    ({"sid": ROW["sid"]}, "invalid_item", "upsert[1]"),
    ({"item_id": 1.5, "sid": ROW["sid"]}, "invalid_item", "upsert[1]"),
    ({"item_id": "", "sid": ROW["sid"]}, "invalid_item", "upsert[1]"),
    ({"item_id": "x" * 600, "sid": ROW["sid"]}, "invalid_item", "upsert[1].item_id"),
    ({"item_id": "x"}, "invalid_item", "upsert[1]"),
    ({"item_id": "x", "sid": "<a_4>"}, "invalid_item", "upsert[1]"),
    ({"item_id": "x", "sid": [1, 2, 3]}, "invalid_item", "upsert[1]"),
    ({"item_id": "x", "sid": ["<a_4>", "<b_1>"]}, "depth_mismatch", "upsert[1].sid"),
    ({"item_id": "x", "sid": ["<a_4>", "<b_1>", "<c_2>", "<c_2>"]}, "depth_mismatch", "upsert[1].sid"),
    ({"item_id": "x", "sid": ["<a_4>", "<b_99>", "<c_2>"]}, "invalid_item", "upsert[1].sid"),
    ({"item_id": "x", "sid": ["<a_4>", "<b_1>", 3]}, "invalid_item", "upsert[1]"),
    (ROW | {"item_id": "x", "color": "red"}, "unknown_field", "upsert[1].color"),
    (ROW | {"item_id": "x", "title": 5}, "type_mismatch", "upsert[1].title"),
    (ROW | {"item_id": "x", "popularity": "much"}, "type_mismatch", "upsert[1].popularity"),
    (ROW | {"title": "again"}, "duplicate_item", "upsert[1]"),
    ("row", "invalid_item", "upsert[1]"),
]


@pytest.mark.parametrize(("row", "kind", "param"), WRONG_ROWS)
def test_a_wrong_row_changes_nothing(live: Service, root: Path, row: Any, kind: str, param: str) -> None:
    before = live.get("/v1/catalogs/items").json
    answer = live.post("/v1/catalogs/items/items", {"upsert": [ROW, row], "remove": ["item-3"]})
    assert code(answer) == (400, kind), answer.content
    assert answer.json["error"]["param"] == param
    assert param.split(".")[0] in answer.json["error"]["message"]
    assert live.get("/v1/catalogs/items").json == before


def test_wrong_changes_change_nothing(live: Service) -> None:
    before, url = live.get("/v1/catalogs/items").json, "/v1/catalogs/items/items"
    everything = [f"item-{number}" for number in range(60)]
    for body, status, kind, param in (
        ({}, 400, "invalid_request", "upsert"),
        ({"remove": ["item-3", "nobody"]}, 400, "unknown_item", "remove[1]"),
        ({"remove": ["item-3", "item-3"]}, 400, "duplicate_item", "remove[1]"),
        ({"upsert": [ROW], "remove": ["new"]}, 400, "duplicate_item", "remove[0]"),
        ({"remove": everything}, 400, "empty_catalog", "remove"),
        ({"remove": [1.5]}, 400, "invalid_request", "remove[0]"),
        ({"remove": ["item-3", "x" * 600]}, 400, "invalid_request", "remove[1]"),
        ({"upsert": [ROW], "if_version": 9}, 409, "version_conflict", "if_version"),
        ({"upsert": [ROW], "if_version": -1}, 400, "invalid_request", "if_version"),
        ({"upsert": [ROW], "merge": True}, 400, "unknown_field", "merge"),
        ({"upsert": [ROW | {"title": "x" * LIMITS["max_update_bytes"]}]}, 413, "payload_too_large", None),
    ):
        answer = live.post(url, body)
        assert (*code(answer), answer.json["error"]["param"]) == (status, kind, param), body
    for path in ("none", "nothing"):
        for answer in (
            live.post(f"/v1/catalogs/{path}/items", {"upsert": [ROW]}),
            live.post(f"/v1/catalogs/{path}/rollback", {"version": 1}),
            live.get(f"/v1/catalogs/{path}"),
        ):
            assert code(answer) == (404, "unknown_catalog")
    assert live.get("/v1/catalogs/items").json == before


def test_a_change_may_be_larger_than_a_search(subject: Subject) -> None:
    title = "x" * (LIMITS["max_body_bytes"] + 1)
    assert subject.change([ROW | {"title": title}]).json["version"] == 2
    assert subject.everything()[1]["new"]["title"] == title


def test_every_change_is_logged(subject: Subject, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As numbers, and the request's own line names the catalog; what fails is no change."""
    caplog.set_level("INFO")
    replaced = [subject.rows["item-1"] | {"title": "x"}, subject.rows["item-2"] | {"sid": ROW["sid"]}]
    assert subject.change([ROW, *replaced], ["item-5", "item-6"]).headers["x-catalog-version"] == "2"
    assert subject.change([{}]).status == 400
    assert subject.roll_back(1).status == subject.roll_back(1).status == 200
    lines = [json.dumps(row) for row in [*list(subject.rows.values())[:50], ROW]]
    assert subject.put("\n".join(lines).encode(), "?format=jsonl").status == 200
    assert subject.service.call("DELETE", subject.url).status == 200
    fields = [one.fields for one in caplog.records if getattr(one, "fields", {}).get("catalog") == subject.name]  # type: ignore[attr-defined]
    changes = [tuple(one.values())[1:] for one in fields if "came" in one]
    assert changes == [
        (1, 2, 1, 2, 2, "update of version 1"),
        (2, 1, 2, 1, 1, str(root / "items.jsonl")),
        (1, 3, 1, 0, 10, "upload"),
        (3, 0, 0, 0, 51, "removed"),
    ]
    requests = [(one["method"], one["version"]) for one in fields if "method" in one]
    assert requests == [("POST", 2), ("POST", 1), ("POST", 1), ("PUT", 3), ("DELETE", 3)]
    assert "version 1 -> 2; items: 1 came, 2 changed, 2 went (update of version 1)" in caplog.text


def test_too_many_changes_and_uploads_are_refused(subject: Subject) -> None:
    live = subject.service.engine.live
    with ThreadPoolExecutor(70) as pool:
        with subject.service.held():
            waiting = [pool.submit(subject.change, [ROW | {"title": str(number)}]) for number in range(64)]
            wait_until(lambda: live._waiting[subject.name] == 64)
            refused = subject.change([ROW])
            assert code(refused) == (429, "overloaded") and "retry-after" in refused.headers
            assert code(subject.put(b"{}", "?format=jsonl")) == (429, "overloaded")
        assert sorted(one.result().json["version"] for one in waiting) == list(range(2, 66))


def test_changes_are_counted(subject: Subject, root: Path) -> None:
    (root / "cut.parquet").write_bytes(b"PAR1")
    subject.change([ROW])
    subject.change([{}])
    subject.put({"path": "cut.parquet"})
    text = subject.service.get("/metrics").content.decode()
    name = f'catalog="{subject.name}"'
    for line in (
        f'widebeam_catalog_updates_total{{{name},outcome="ok"}} 2.0',
        f'widebeam_catalog_updates_total{{{name},outcome="invalid_request"}} 1.0',
        f"widebeam_catalog_version{{{name}}} 2.0",
    ):
        assert line in text
    assert f"widebeam_catalog_build_seconds{{{name}}}" in text and f"widebeam_catalog_swap_seconds{{{name}}}" in text


def test_the_client_changes_catalogs(subject: Subject, root: Path) -> None:
    with Client(subject.service.url) as client:
        assert subject.name in [one.name for one in client.catalogs()]
        assert client.update_items(subject.name, [ROW], ["item-3"]).version == 2
        with pytest.raises(errors.Conflict) as conflict:
            client.update_items(subject.name, [ROW], if_version=1)
        assert conflict.value.code == "version_conflict"
        assert client.rollback(subject.name, 1, if_version=2).version == 1
        with (root / "items.jsonl").open("rb") as file:
            assert client.put_catalog(subject.name, file=file, format="jsonl").version == 3
        assert client.put_catalog(f"{subject.name} / two", path="items.jsonl", if_version=0).version == 1
        assert client.catalog(f"{subject.name} / two").items == 60
        with pytest.raises(errors.NotFound):
            client.catalog("nothing")
