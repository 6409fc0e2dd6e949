"""Catalogs that tests change while a server serves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.http.service import Answer, Service

ROW = {"item_id": "new", "sid": ["<a_4>", "<b_1>", "<c_2>"], "title": "New", "popularity": 3}
LIMITS = {"max_body_bytes": 20_000, "max_update_bytes": 60_000, "max_upload_bytes": 90_000}
"""Of the server, in bytes: a search, a batch of items, a file."""
NUMBERS = count()


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


def parquet(path: Path, rows: Sequence[dict[str, Any]], header: Any = None) -> bytes:
    """What a file of these rows holds; it is written too."""
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    pq.write_table(table.replace_schema_metadata({"widebeam": json.dumps(header)}) if header else table, path)
    return path.read_bytes()
