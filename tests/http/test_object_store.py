"""Catalogs in object storage: a server that reads them by S3's protocol and looks whether they have changed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import tiny
from tests.http.s3 import Bucket, bucket
from tests.http.service import Service, running_service, wait_until
from widebeam.constraints import object_store
from widebeam.errors import CatalogError, CatalogUnreachable


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("EC2_METADATA_DISABLED", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with bucket() as store:
        yield store


@pytest.fixture
def rows(tmp_path: Path) -> list[str]:
    return tiny.save_catalog(tmp_path / "items.jsonl").read_text().splitlines(keepends=True)


def parquet(rows: list[str], version: int) -> bytes:
    table = pa.Table.from_pylist([json.loads(row) for row in rows])
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({"widebeam": json.dumps({"version": version})}), sink)
    return bytes(sink.getvalue())


def state(service: Service, name: str = "items") -> tuple[int, int]:
    info = service.get(f"/v1/catalogs/{name}").json
    return info["version"], info["items"]


def test_an_object_is_loaded_and_looked_at(
    checkpoint: Path,
    store: Bucket,
    rows: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With its header, beside it or in it. While the store refuses, what was loaded stays; no copy does."""
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    store.put("shop/items.jsonl", "".join(rows).encode())
    store.put("shop/items.catalog.json", b'{"version": 3, "order": {"column": "popularity", "descending": true}}')
    store.put("shop/other.parquet", parquet(rows[:9], 7))
    files = (store.uri("shop/items.jsonl"), f"second={store.uri('shop/other.parquet')}")
    with running_service(checkpoint, files, watch_catalogs=True, watch_interval_s=0.05) as service:
        assert (state(service), state(service, "second")) == ((3, 60), (7, 9))
        assert service.engine.catalogs.get("items").header.order is not None
        assert service.get("/v1/catalogs/items").json["source"] == files[0]
        gets = store.gets
        store.put("shop/other.parquet", parquet(rows[:20], 8))
        wait_until(lambda: state(service, "second") == (8, 20))
        assert store.gets > gets and state(service) == (3, 60)
        store.denies = frozenset({"look"})
        wait_until(lambda: sum("nobody can tell" in record.message for record in caplog.records) == 2)
        store.put("shop/other.parquet", parquet(rows[:30], 9))
        assert state(service, "second") == (8, 20)
        answer = service.post("/v1/recommend", {"input_ids": [7], "catalog": "second", "min_catalog_version": 9})
        assert answer.json["error"]["code"] == "catalog_version_not_ready"
        store.denies = frozenset({"read"})
        wait_until(lambda: sum("will be tried again as 'second'" in record.message for record in caplog.records) > 1)
        store.denies = frozenset()
        wait_until(lambda: state(service, "second") == (9, 30))
        outcomes = service.engine.live.stats.outcomes
        failed = outcomes["second", "invalid_catalog"]
        store.put("shop/other.parquet", b"half")
        wait_until(lambda: outcomes["second", "invalid_catalog"] == failed + 1)
        assert state(service, "second") == (9, 30)
        service.check()
    assert sum("nobody can tell" in record.message for record in caplog.records) == 2, "once each"
    assert not list((tmp_path / "copies").glob("widebeam-*"))


def test_what_cannot_be_had_says_why(store: Bucket) -> None:
    with pytest.raises(CatalogError, match="there is no such object"), object_store.fetched(store.uri("no.jsonl"), []):
        pass
    store.denies = frozenset({"look"})
    with pytest.raises(CatalogError, match="ACCESS_DENIED"), object_store.fetched(store.uri("no.jsonl"), []):
        pass
    for uri, words in (("ftp://host/a.jsonl", "Unrecognized"), ("s3://key:secret@bucket/a.jsonl", "environment")):
        with pytest.raises(CatalogError, match=words) as refused:
            object_store.look(uri, [])
        assert "secret@" not in str(refused.value)


def test_an_object_that_changes_while_it_is_read_is_not_taken(
    store: Bucket, rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("items.jsonl", "".join(rows).encode())
    copy = object_store._copy

    def slow(*arguments: object) -> None:
        copy(*arguments)  # type: ignore[arg-type]
        store.put("items.jsonl", "".join(rows[1:]).encode())

    monkeypatch.setattr(object_store, "_copy", slow)
    fetched = object_store.fetched(store.uri("items.jsonl"), [])
    with pytest.raises(CatalogUnreachable, match="changed while it was read"), fetched:
        pass


def test_a_path_of_a_request_is_no_uri(checkpoint: Path, store: Bucket, rows: list[str], tmp_path: Path) -> None:
    """Below the root there are files only: nobody makes the server fetch something."""
    store.put("items.jsonl", "".join(rows).encode())
    with running_service(checkpoint, tmp_path / "items.jsonl", catalog_root=str(tmp_path)) as service:
        answer = service.call("PUT", "/v1/catalogs/items", {"path": store.uri("items.jsonl")})
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_path")
    assert store.gets == 0
