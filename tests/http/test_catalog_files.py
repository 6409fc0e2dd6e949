"""Whole catalog files that a server is told to load, or is sent: where they may lie, and what is wrong with them."""

from __future__ import annotations

import json
import re
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from tests.http.service import Service, code, wait_until
from tests.http.subject import LIMITS, ROW, Subject, parquet


def test_paths_lead_below_the_root_only(subject: Subject, root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "items.jsonl", tmp_path / "outside.jsonl")
    (root / "inner").mkdir(exist_ok=True)
    for link, target in (("out", tmp_path), ("out.jsonl", tmp_path / "outside.jsonl"), ("loop", root / "loop")):
        (root / link).unlink(missing_ok=True)
        (root / link).symlink_to(target)
    (root / "inner" / "link.jsonl").unlink(missing_ok=True)
    (root / "inner" / "link.jsonl").symlink_to(root / "items.jsonl")
    for link, target in (("gone", tmp_path / "gone"), ("inner/gone.jsonl", root / "gone.jsonl")):
        (root / link).unlink(missing_ok=True)
        (root / link).symlink_to(target)
    outside = "PATH is not the relative path of a file below the catalog root"
    for words, paths in {
        outside: (
            str(tmp_path / "outside.jsonl"), str(root / "items.jsonl"), "inner/../items.jsonl", "../outside.jsonl",
            str(tmp_path / "nothing"), "../nothing", "a\0b", "out.jsonl", "out/outside.jsonl", "out/nothing", "out",
            "gone", "x" * 3000,
        ),
        "no such file below the catalog root: PATH": (
            "nothing.jsonl", "inner/nothing.jsonl", "nowhere/nothing.jsonl", "inner/gone.jsonl", "items.jsonl/x",
        ),
        "a folder, no file below the catalog root: PATH": ("inner", "."),
    }.items():  # fmt: skip
        for path in paths:
            answer = subject.put({"path": path})
            assert code(answer) == (400, "invalid_path"), path
            assert answer.json["error"]["param"] == "path"
            assert answer.json["error"]["message"].replace(repr(path), "PATH") == words
    assert code(subject.put({"path": "loop"})) == (400, "invalid_path")  # Python versions differ in what it is
    assert subject.info()["version"] == 1
    assert subject.put({"path": "inner/link.jsonl"}).json["version"] == 2


def test_without_a_root_no_path_is_loaded(service: Service, catalog_file: Path) -> None:
    answer = service.call("PUT", "/v1/catalogs/items", {"path": str(catalog_file)})
    assert code(answer) == (400, "no_catalog_root")


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


def test_an_upload_that_does_not_fit_the_header_before_is_told_of_that(subject: Subject, tmp_path: Path) -> None:
    ids = parquet(tmp_path / "x", [ROW | {"sid": [11, 27, 43]}])
    for body, form, words in (
        (ids, "parquet", "says that SIDs are tokens, but .* gives them as integers"),
        (json.dumps({"item_id": "new", "sid": ROW["sid"]}).encode(), "jsonl", ".*no metadata column 'popularity'"),
    ):
        answer = subject.put(body, f"?format={form}")
        assert code(answer) == (400, "invalid_catalog")
        message = answer.json["error"]["message"]
        assert re.search(f"the header of the version before .*{words}", message), message
        assert "catalog.json" not in message


def test_an_upload_under_a_new_name_has_a_template_if_it_brings_one(subject: Subject, tmp_path: Path) -> None:
    lines, history = json.dumps(ROW).encode(), {"history": ["new"], "n": 1}
    subject.name += "-new"
    assert subject.put(lines, "?format=jsonl").status == 200
    refused = subject.service.post("/v1/recommend", history | {"catalog": subject.name})
    assert code(refused) == (400, "no_template") and "inside a parquet file" in refused.json["error"]["message"]
    header = {"template": {"prefix": "watched ", "item": "{sid}", "separator": " "}}
    assert subject.put(parquet(tmp_path / "x", [ROW], header), "?format=parquet").status == 200
    assert subject.service.post("/v1/recommend", history | {"catalog": subject.name}).json["items"][0]["id"] == "new"


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
