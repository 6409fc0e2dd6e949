"""Catalogs that change while the server serves, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import tiny
from tests.http.service import Answer, Service, running_service, wait_until
from widebeam import Client, Engine, errors

ROW = {"item_id": "new", "sid": ["<a_4>", "<b_1>", "<c_2>"], "title": "New", "popularity": 3}
LIMITS = {"max_body_bytes": 20_000, "max_update_bytes": 60_000, "max_upload_bytes": 90_000}
NUMBERS = count()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    tiny.save_catalog(folder / "items.jsonl")
    return folder


@pytest.fixture(scope="module")
def live(checkpoint: Path, root: Path) -> Iterator[Service]:
    with running_service(checkpoint, root / "items.jsonl", catalog_root=str(root), **LIMITS) as service:
        yield service
        service.check()


class Subject:
    """A catalog of its own for a test, and what is expected of it."""

    def __init__(self, service: Service, root: Path) -> None:
        self.service, self.name = service, f"catalog-{next(NUMBERS)}"
        self.rows = {row["item_id"]: row for row in map(json.loads, (root / "items.jsonl").read_text().splitlines())}
        assert self.put({"path": "items.jsonl"}).json["version"] == 1

    @property
    def url(self) -> str:
        return f"/v1/catalogs/{self.name}"

    def put(self, body: Any, query: str = "") -> Answer:
        return self.service.call("PUT", self.url + query, body)

    def change(self, upsert: Sequence[Any] = (), remove: Sequence[Any] = (), **fields: Any) -> Answer:
        return self.service.post(f"{self.url}/items", {"upsert": upsert, "remove": remove, **fields})

    def roll_back(self, version: Any, **fields: Any) -> Answer:
        return self.service.post(f"{self.url}/rollback", {"version": version, **fields})

    def info(self) -> Any:
        answer = self.service.get(self.url)
        assert answer.status == 200, answer.content
        return answer.json

    def everything(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Version and items of a search that is wide enough for all there are."""
        body = {"input_ids": [7, 11], "n": 200, "beam_width": 200, "fields": ["title", "popularity"], **fields}
        answer = self.service.post("/v1/recommend", {**body, "catalog": self.name})
        assert answer.status == 200, answer.content
        items = {
            one["id"]: {"item_id": one["id"], "sid": one["sid"], **one["metadata"]} for one in answer.json["items"]
        }
        assert len(items) == len(answer.json["items"])
        return answer.json["catalog"]["version"], items


@pytest.fixture
def subject(live: Service, root: Path) -> Subject:
    return Subject(live, root)


def code(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["error"]["code"]


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


def test_paths_lead_below_the_root_only(subject: Subject, root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "items.jsonl", tmp_path / "outside.jsonl")
    (root / "inner").mkdir(exist_ok=True)
    for link, target in (("out", tmp_path), ("out.jsonl", tmp_path / "outside.jsonl"), ("loop", root / "loop")):
        (root / link).unlink(missing_ok=True)
        (root / link).symlink_to(target)
    (root / "inner" / "link.jsonl").unlink(missing_ok=True)
    (root / "inner" / "link.jsonl").symlink_to(root / "items.jsonl")
    for path in (
        str(tmp_path / "outside.jsonl"), str(root / "items.jsonl"), "inner/../items.jsonl", "../outside.jsonl", "a\0b",
        "out.jsonl", "out/outside.jsonl", "out/nothing", "loop", "inner", ".", "nothing.jsonl", "x" * 3000,
    ):  # fmt: skip
        answer = subject.put({"path": path})
        assert code(answer) == (400, "invalid_path"), path
        assert answer.json["error"]["param"] == "path"
        told = answer.json["error"]["message"].replace(repr(path), "")
        assert told == " is not the relative path of a file below the catalog root"
    assert subject.info()["version"] == 1
    assert subject.put({"path": "inner/link.jsonl"}).json["version"] == 2


def test_without_a_root_no_path_is_loaded(service: Service, catalog_file: Path) -> None:
    answer = service.call("PUT", "/v1/catalogs/items", {"path": str(catalog_file)})
    assert code(answer) == (400, "no_catalog_root")


def parquet(path: Path, rows: Sequence[dict[str, Any]], header: Any = None) -> bytes:
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    pq.write_table(table.replace_schema_metadata({"widebeam": json.dumps(header)}) if header else table, path)
    return path.read_bytes()


def left_over() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("widebeam-*"))


def test_an_upload_without_its_format_is_told_of_it(subject: Subject, tmp_path: Path) -> None:
    file = parquet(tmp_path / "x", [ROW])
    told = subject.put(file).json["error"]["message"]
    assert "not UTF-8" in told and "a file needs its format in the query: parquet, jsonl" in told
    error = subject.put(file, "?format=csv").json["error"]
    assert (error["param"], error["message"]) == (
        "format",
        "format: 'csv' is none of: jsonl, minionerec, parquet, sid2pid",
    )


def test_files_are_uploaded(subject: Subject, tmp_path: Path) -> None:
    before = left_over()
    rows = [ROW, ROW | {"item_id": "other", "popularity": 9}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    answer = subject.put(lines, "?format=jsonl&if_version=1")
    assert (answer.status, answer.json["version"], answer.json["source"]) == (200, 2, "upload"), answer.content
    assert list(subject.everything()[1]) == ["other", "new"]  # by the header of the version before
    assert subject.put(parquet(tmp_path / "x", rows), "?format=parquet").json["version"] == 3
    assert list(subject.everything()[1]) == ["other", "new"]
    own = parquet(tmp_path / "x", rows, {"order": {"column": "popularity"}, "version": None})
    assert subject.put(own, "?format=parquet").json["version"] == 4
    assert list(subject.everything()[1]) == ["new", "other"]
    subject.name += "-copy"
    index = json.dumps({"7": ROW["sid"]}).encode()
    assert subject.put(index, "?format=minionerec&if_version=0").json["format"] == "minionerec"
    assert left_over() == before


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
    assert "version 1 -> 2, 1 items came, 2 changed, 2 went (update of version 1)" in caplog.text


def test_integers_without_a_header_are_warned_of_in_the_log(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    subject.name += "-ids"
    assert subject.put(b'{"item_id": 1, "sid": [11, 12]}', "?format=jsonl").status == 200
    (record,) = [one for one in caplog.records if "token ids" in one.getMessage()]
    assert record.levelname == "WARNING" and f"{subject.name!r} (upload)" in record.getMessage()
    assert subject.service.call("DELETE", subject.url).status == 200


def test_bad_files_change_nothing(subject: Subject, root: Path, tmp_path: Path) -> None:
    before, temporary = subject.info(), left_over()
    good = parquet(tmp_path / "good.parquet", [ROW])
    (root / "cut.parquet").write_bytes(good[:-20])
    (root / "vocabulary.jsonl").write_text(json.dumps(ROW | {"sid": ["<x_1>", "<b_1>", "<c_2>"]}))
    (root / "ids.jsonl").write_text(json.dumps({"item_id": 1, "sid": [1, 2, 90_000]}))
    (root / "ids.catalog.json").write_text("{}")
    for path, words in (("cut.parquet", "parquet"), ("vocabulary.jsonl", "no token"), ("ids.jsonl", "outside the voc")):
        answer = subject.put({"path": path})
        assert code(answer) == (400, "invalid_catalog") and words in answer.json["error"]["message"]
    for body, query, kind, param in (
        (good[:-20], "?format=parquet", "invalid_catalog", "body"),
        (b"", "?format=jsonl", "invalid_catalog", "body"),
        (b"{}", "?format=sid2pid", "invalid_catalog", "body"),
        (good, "?format=csv", "invalid_request", "format"),
        (good, "?format=parquet&format=jsonl", "invalid_request", None),
        (good, "?format=parquet&if_version=x", "invalid_request", "if_version"),
        (good, "?sheet=1", "unknown_field", "sheet"),
        (b'{"path": "items.jsonl"}', "?if_version=1", "invalid_request", "if_version"),
        (good, "", "malformed_utf8", None),
    ):
        answer = subject.put(body, query)
        assert (*code(answer), answer.json["error"]["param"]) == (400, kind, param), (query, answer.content)
    assert code(subject.put(b"x" * (LIMITS["max_upload_bytes"] + 1), "?format=jsonl")) == (413, "payload_too_large")
    for name in ("none", "%00", "x" * 257):
        assert code(subject.service.call("PUT", f"/v1/catalogs/{name}", {"path": "items.jsonl"})) == (
            400,
            "invalid_request",
        )
    assert subject.info() == before and left_over() == temporary


def test_an_upload_of_unknown_length_is_bounded(live: Service) -> None:
    piece = b"%x\r\n%s\r\n" % (30_000, b"x" * 30_000)
    before = left_over()
    with socket.create_connection(live.address, timeout=10) as sock:
        head = "PUT /v1/catalogs/chunked?format=jsonl HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        sock.sendall(head.encode() + piece * 4)
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")
    wait_until(lambda: left_over() == before)
    assert code(live.get("/v1/catalogs/chunked")) == (404, "unknown_catalog")


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


def test_changes_are_counted(subject: Subject) -> None:
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
    wait_until(lambda: searched() is None)
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


def test_the_default_is_a_setting(checkpoint: Path, root: Path) -> None:
    two, body = (f"a={root / 'items.jsonl'}", f"b={root / 'items.jsonl'}"), {"input_ids": [7, 11], "n": 1}
    with running_service(checkpoint, two, default_catalog="b") as service:
        assert service.post("/v1/recommend", body).json["catalog"]["name"] == "b"
    with pytest.raises(errors.ConfigError, match="none of the name 'c', but a, b"):
        Engine(str(checkpoint), catalog=two, default_catalog="c").run(asyncio.sleep(0))


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
