"""What the SDK calls about catalogs: what there is, and how it changes. For administrators."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import IO, Any
from urllib.parse import quote, urlencode

from widebeam.errors import InvalidRequest
from widebeam.http.catalog_protocol import CatalogInfo, CatalogList, UploadFormat
from widebeam.transport import Data, Transport, encode


class CatalogCalls:
    """A part of `AsyncClient`."""

    _transport: Transport
    _timeout_s: float

    async def catalogs(self) -> list[CatalogInfo]:
        """The catalogs that the server has, by name."""
        answer: CatalogList = await self._transport.call(
            "GET", "/v1/catalogs", CatalogList, lambda _: None, self._timeout_s
        )
        return answer.data

    async def catalog(self, name: str) -> CatalogInfo:
        """One catalog by its name."""
        answer: CatalogInfo = await self._transport.call(
            "GET", _catalog_path(name), CatalogInfo, lambda _: None, self._timeout_s
        )
        return answer

    async def update_items(
        self,
        name: str,
        upsert: Sequence[Mapping[str, Any]] = (),
        remove: Sequence[int | str] = (),
        *,
        if_version: int | None = None,
        version: int | None = None,
    ) -> CatalogInfo:
        """Add or replace whole items, with `item_id`, `sid` and metadata, and remove others by id: all or nothing.

        `if_version`: only if the catalog is at that version, else `Conflict`. `version`: the number that the new one
        has on every server. Never repeated, like all changes.
        """
        body = {"upsert": upsert, "remove": remove, "if_version": if_version, "version": version}
        return await self._change("POST", f"{_catalog_path(name)}/items", encode(body))

    async def rollback(self, name: str, version: int, *, if_version: int | None = None) -> CatalogInfo:
        """Go back to an earlier version of a catalog."""
        body = {"version": version, "if_version": if_version}
        return await self._change("POST", f"{_catalog_path(name)}/rollback", encode(body))

    async def remove_catalog(self, name: str, *, if_version: int | None = None) -> CatalogInfo:
        """Remove a catalog, with its earlier versions; what it was. Searches that run finish on it."""
        query = "" if if_version is None else f"?if_version={if_version}"
        return await self._change("DELETE", f"{_catalog_path(name)}{query}", None)

    async def put_catalog(
        self,
        name: str,
        *,
        path: str | None = None,
        file: IO[bytes] | None = None,
        format: UploadFormat = "parquet",
        if_version: int | None = None,
        version: int | None = None,
    ) -> CatalogInfo:
        """Load a catalog from a path below the server's catalog root, or from an open file, which is uploaded.

        Raises TypeError for a `file` that is a path, or open as text: what was uploaded would be something else.
        """
        if (path is None) == (file is None):
            raise InvalidRequest("give either path or file", param="path")
        if file is not None and (not hasattr(file, "read") or isinstance(file, io.TextIOBase)):
            raise TypeError(
                f"file must be a binary file that is open, as of open(.., 'rb'), not {type(file).__name__}: to load a "
                "file that the server has, give path=, relative to its --catalog-root"
            )
        if file is None:
            body = {"path": path, "if_version": if_version, "version": version}
            return await self._change("PUT", _catalog_path(name), encode(body))
        given = {"format": format, "if_version": if_version, "version": version}
        query = urlencode({key: value for key, value in given.items() if value is not None})
        return await self._change("PUT", f"{_catalog_path(name)}?{query}", file)

    async def _change(self, method: str, path: str, data: Data) -> CatalogInfo:
        answer: CatalogInfo = await self._transport.call(
            method, path, CatalogInfo, lambda _: data, self._timeout_s, repeatable=False
        )
        return answer


def _catalog_path(name: str) -> str:
    return f"/v1/catalogs/{quote(name, safe='')}"
