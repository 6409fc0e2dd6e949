"""Catalog versions whose publisher numbers them: the same number is the same content on every server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.http.service import Service, code, running_service, wait_until
from tests.http.subject import ROW, Subject, parquet
from widebeam import Client, errors

NEW = json.dumps(ROW).encode()


def refused(subject: Subject, number: int, answer: Any, *said: str) -> None:
    """A 409 that names both versions, and nothing has changed."""
    assert code(answer) == (409, "version_not_newer") and answer.json["error"]["param"] == "version"
    for words in (*said, f"{number} is not newer"):
        assert words in answer.json["error"]["message"]


def test_the_publisher_numbers_versions(subject: Subject, tmp_path: Path) -> None:
    """By each way in which one can come; numbers may have gaps."""
    assert subject.change([ROW], version=7).json["version"] == 7
    assert subject.put({"path": "items.jsonl", "version": 20}).json["version"] == 20
    assert subject.put(NEW, "?format=jsonl&version=2026113001").json["version"] == 2026113001
    own = parquet(tmp_path / "x", [ROW], {"version": 2026113002})
    assert subject.put(own, "?format=parquet").json["version"] == 2026113002
    assert subject.put(own, "?format=parquet&if_version=0").status == 409
    own = parquet(tmp_path / "x", [ROW], {"version": 2**53})
    assert subject.put(own, f"?format=parquet&version={2**53}").json["earlier"] == [2026113002, 2026113001, 20]
    assert subject.everything() == (2**53, {"new": ROW})


def test_a_number_that_is_not_newer_is_refused(subject: Subject, tmp_path: Path) -> None:
    subject.change([ROW], version=7)
    for number in (1, 6, 7):
        refused(subject, number, subject.change([ROW | {"title": "x"}], version=number), "is at version 7")
        refused(subject, number, subject.put({"path": "items.jsonl", "version": number}))
        refused(subject, number, subject.put(NEW, f"?format=jsonl&version={number}"))
        own = parquet(tmp_path / "x", [ROW], {"version": number})
        refused(subject, number, subject.put(own, "?format=parquet"), "is at version 7")
    assert subject.everything() == (7, subject.rows | {"new": ROW})
    for wrong in (0, -1, 2**53 + 1, "8", 8.5):
        assert code(subject.change([ROW], version=wrong)) == (400, "invalid_request")
    assert code(subject.put(b'{"path": "items.jsonl"}', "?version=8")) == (400, "invalid_request")
    own = parquet(tmp_path / "x", [ROW], {"version": 9})
    contradiction = subject.put(own, "?format=parquet&version=8")
    assert code(contradiction) == (400, "invalid_request")
    assert "version is 8, but the header of the file says 9" in contradiction.json["error"]["message"]
    assert subject.info()["version"] == 7


def test_who_has_declared_once_declares_always(subject: Subject) -> None:
    """What a server counted might be the publisher's next number, for something else."""
    assert subject.change([ROW]).json["version"] == 2, "the server's own"
    subject.change([ROW], version=7)
    for answer in (
        subject.change([], ["new"]),
        subject.put({"path": "items.jsonl"}),
        subject.put(NEW, "?format=jsonl"),
    ):
        assert (
            code(answer) == (409, "version_required")
            and "declared, the last one as 7" in answer.json["error"]["message"]
        )
    assert subject.everything() == (7, subject.rows | {"new": ROW})


def test_a_number_that_was_taken_back_is_not_given_again(subject: Subject) -> None:
    subject.change([ROW], version=7)
    subject.change([], ["new"], version=9)
    assert subject.roll_back(7).json["version"] == 7
    refused(subject, 9, subject.change([ROW], version=9), "is at version 7 and has been at 9")
    refused(subject, 8, subject.change([ROW], version=8))
    assert subject.roll_back(9).json["version"] == 9 and subject.everything() == (9, subject.rows)
    assert subject.change([ROW], version=10).json["version"] == 10


def test_a_change_that_fails_leaves_its_number(subject: Subject) -> None:
    assert code(subject.change([{}], version=7)) == (400, "invalid_item")
    assert subject.change([ROW], version=7).json["version"] == 7


def test_the_client_declares_versions(subject: Subject, root: Path) -> None:
    with Client(subject.service.url) as client:
        assert client.update_items(subject.name, [ROW], version=7).version == 7
        assert client.put_catalog(subject.name, path="items.jsonl", version=8).version == 8
        with (root / "items.jsonl").open("rb") as file:
            assert client.put_catalog(subject.name, file=file, format="jsonl", version=9).version == 9
        with pytest.raises(errors.Conflict) as conflict:
            client.update_items(subject.name, [ROW], version=9)
        assert conflict.value.code == "version_not_newer"


def header(folder: Path, version: int) -> None:
    """By renaming."""
    (folder / "next.json").write_text(json.dumps({"version": version}))
    (folder / "next.json").rename(folder / "items.catalog.json")


def arrives(service: Service, version: int) -> None:
    wait_until(lambda: service.get("/v1/catalogs/items").json["version"] == version)


def test_two_servers_agree_whatever_each_has_been_through(checkpoint: Path, tmp_path: Path) -> None:
    """One has loaded each version of a watched file, the other started with the last one."""
    file = tiny.save_catalog(tmp_path / "items.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    (tmp_path / "catalog.json").unlink()
    header(tmp_path, 3)
    body = {"input_ids": [7, 11], "n": 100, "beam_width": 100, "min_catalog_version": 5}
    watching = {"watch_catalogs": True, "watch_interval_s": 0.05}
    with running_service(checkpoint, file, **watching) as old:
        for version in (4, 5):
            file.write_text("".join(lines[version:]))
            header(tmp_path, version)
            arrives(old, version)
        with running_service(checkpoint, file) as new:
            answers = [service.post("/v1/recommend", body).json for service in (old, new)]
        assert [answer["catalog"] for answer in answers] == [{"name": "items", "version": 5}] * 2
        assert {item["id"] for item in answers[0]["items"]} == {item["id"] for item in answers[1]["items"]}
        assert len(answers[0]["items"]) == 55
        outcomes = old.engine.live.stats.outcomes
        conflicts = outcomes["items", "conflict"]
        file.write_text("".join(lines[6:]))  # of the same number
        wait_until(lambda: outcomes["items", "conflict"] == conflicts + 1)
        assert old.get("/v1/catalogs/items").json["items"] == 55
