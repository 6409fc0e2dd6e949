"""/v1/catalogs: what there is, and how administrators change it while the server serves."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from widebeam.constraints.header import MAX_NAME_LENGTH
from widebeam.engine.request import NO_CATALOG
from widebeam.errors import CatalogError, ConfigError, InvalidRequest, NotFound, Overloaded, RequestTimeout
from widebeam.http.body import check_head, decode, invalid, json_response, read_body, too_large
from widebeam.http.catalog_protocol import (
    CatalogInfo,
    CatalogList,
    PutCatalog,
    RemoveQuery,
    RollBack,
    UpdateItems,
    UploadFormat,
    UploadQuery,
)
from widebeam.http.keys import FACTS, SERVER_CONFIG, UPLOADS, working_engine

if TYPE_CHECKING:
    from widebeam.constraints.catalog import Catalog
    from widebeam.engine.engine import Engine

T = TypeVar("T", bound=msgspec.Struct)
MOST_UPLOADS = 2
"""Files that arrive, wait or are read at once."""
_NAMES: dict[UploadFormat, str] = {
    "parquet": "upload.parquet",
    "jsonl": "upload.jsonl",
    "minionerec": "upload.index.json",
    "sid2pid": "sid2pid.json",
}
"""What a file of each format is called, by which it is told apart."""
_WRITE_BYTES = 1 << 20
_PUT, _ROLL_BACK = msgspec.json.Decoder(PutCatalog), msgspec.json.Decoder(RollBack)
_UPDATE, _ROW = msgspec.json.Decoder(UpdateItems), msgspec.json.Decoder(dict[str, Any])


async def list_catalogs(request: web.Request) -> web.Response:
    """All catalogs, by name."""
    engine = working_engine(request)
    found = [engine.catalogs.get(name) for name in engine.catalogs.names()]
    return json_response(CatalogList(data=[_info(engine, one) for one in found if one is not None]))


async def show_catalog(request: web.Request) -> web.Response:
    """One catalog. NotFound if there is none of that name."""
    engine = working_engine(request)
    name = request.match_info["name"]
    catalog = engine.catalogs.get(name)
    if catalog is None:
        raise NotFound(f"no catalog is called {name!r}", code="unknown_catalog", param="catalog")
    return json_response(_info(engine, catalog))


async def put_catalog(request: web.Request) -> web.Response:
    """Offer a file under a name: one that the server has, or with `format` in the query the body itself."""
    engine, name = working_engine(request), request.match_info["name"]
    if name == NO_CATALOG or not name.isprintable() or len(name) > MAX_NAME_LENGTH:
        raise InvalidRequest(
            f"a catalog's name has at most {MAX_NAME_LENGTH} printable characters, and is not {NO_CATALOG!r}",
            param="name",
        )
    query = _query(request, UploadQuery)
    if query.format is UNSET:
        for field in ("if_version", "version"):
            if getattr(query, field) is not UNSET:
                raise InvalidRequest(f"without format, {field} belongs into the body", param=field)
        body = decode(_PUT, await read_body(request), f"; a file needs its format in the query: {', '.join(_NAMES)}")
        root = request.app[SERVER_CONFIG].catalog_root
        if root is None:
            raise InvalidRequest(
                "this server loads no files by their path (--catalog-root): upload it, with `format` in the query",
                code="no_catalog_root",
                param="path",
            )
        with _file_errors("path"):
            catalog = await engine.live.load(body.path, name, body.if_version, version=body.version, below=root)
    else:
        with _file_errors("body"):
            catalog = await _upload(request, engine, name, query)
    return _changed(request, engine, catalog)


async def remove_catalog(request: web.Request) -> web.Response:
    """Offer a catalog no more; the answer says what it was."""
    engine = working_engine(request)
    query = _query(request, RemoveQuery)
    if_version = None if query.if_version is UNSET else query.if_version
    return _changed(request, engine, await engine.live.remove(request.match_info["name"], if_version))


async def update_items(request: web.Request) -> web.Response:
    """Add, replace and remove items: all of the batch, or none."""
    engine = working_engine(request)
    text = await read_body(request, "max_update_bytes")
    body = await asyncio.to_thread(decode, _UPDATE, text)  # it may be long
    with _file_errors("upsert"):
        catalog = await engine.live.update(
            request.match_info["name"], _rows(body.upsert), body.remove, body.if_version, version=body.version
        )
    return _changed(request, engine, catalog)


async def roll_back(request: web.Request) -> web.Response:
    """Go back to an earlier version, under its number."""
    engine = working_engine(request)
    body = decode(_ROLL_BACK, await read_body(request))
    catalog = await engine.live.roll_back(request.match_info["name"], body.version, body.if_version)
    return _changed(request, engine, catalog)


async def check_root(app: web.Application) -> None:
    """Startup hook. Raises ConfigError."""
    root = app[SERVER_CONFIG].catalog_root
    if root is not None and not await asyncio.to_thread(Path(root).is_dir):
        raise ConfigError(f"--catalog-root: {root} is not a folder")


def _changed(request: web.Request, engine: Engine, catalog: Catalog) -> web.Response:
    """The answer to a change, whose line in the log says of which catalog it was."""
    facts = request[FACTS]
    facts.catalog, facts.version = catalog.name, catalog.version
    return json_response(_info(engine, catalog))


def _info(engine: Engine, catalog: Catalog) -> CatalogInfo:
    return CatalogInfo(
        name=catalog.name,
        default=catalog.name == engine.catalogs.default,
        version=catalog.version,
        items=catalog.num_items,
        sids=catalog.num_sids,
        levels=catalog.depth,
        codes=[tokens.size for tokens in catalog.level_token_ids],
        sid_form=catalog.sid_form,
        columns=list(catalog.fields),
        filters=list(catalog.header.filters),
        format=catalog.format,
        source=catalog.source,
        made_at=catalog.made_at,
        earlier=[one.version for one in engine.catalogs.earlier(catalog.name)],
    )


def _query(request: web.Request, kind: type[T]) -> T:
    if len(request.query) > len(set(request.query)):
        raise InvalidRequest("a parameter of the query is there twice")
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(error, kind) from None


def _rows(upsert: Sequence[msgspec.Raw]) -> Iterator[dict[str, Any]]:
    """Rows one by one, so that no long call keeps other threads from running."""
    for number, raw in enumerate(upsert):
        try:
            yield _ROW.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"upsert[{number}]: {error}", code="invalid_item", param=f"upsert[{number}]") from None


@contextmanager
def _file_errors(param: str) -> Iterator[None]:
    """What ends a start is here the fault of a request."""
    try:
        yield
    except CatalogError as error:
        raise InvalidRequest(str(error), code="invalid_catalog", param=param) from None


async def _upload(request: web.Request, engine: Engine, name: str, query: UploadQuery) -> Catalog:
    assert query.format is not UNSET
    file = _NAMES[query.format]
    if_version, version = (None if one is UNSET else one for one in (query.if_version, query.version))
    slots = request.app[UPLOADS]
    if slots.locked():
        raise Overloaded(f"{MOST_UPLOADS} files are being uploaded", retry_after_s=5.0)
    async with AsyncExitStack() as held:
        await held.enter_async_context(slots)
        path = await held.enter_async_context(_temporary_folder()) / file
        await _receive(request, path)
        kept = held.pop_all()

    async def load() -> Catalog:
        async with kept:  # the file stays until it has been read, even if the client goes away
            return await engine.live.load(path, name, if_version, version=version, upload="upload")

    return await asyncio.shield(asyncio.create_task(load()))


@asynccontextmanager
async def _temporary_folder() -> AsyncIterator[Path]:
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="widebeam-"))
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)


async def _receive(request: web.Request, path: Path) -> None:
    """Write the body to a file as it comes. Raises PayloadTooLarge, RequestTimeout."""
    limit, seconds = check_head(request, "max_upload_bytes"), request.app[SERVER_CONFIG].upload_timeout_s
    received, waiting = 0, bytearray()
    file = await asyncio.to_thread(path.open, "wb")
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.content.iter_any():
                received += len(piece)
                if received > limit:
                    raise too_large(limit, "max_upload_bytes")
                waiting += piece
                if len(waiting) >= _WRITE_BYTES:
                    await asyncio.to_thread(file.write, waiting)
                    waiting = bytearray()
            await asyncio.to_thread(file.write, waiting)
    except TimeoutError:
        raise RequestTimeout(f"the file did not arrive within {seconds:g} s") from None
    finally:
        await asyncio.to_thread(file.close)
