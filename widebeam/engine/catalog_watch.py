"""Catalog files that are loaded again when they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from widebeam.constraints import object_store
from widebeam.constraints.header import base_name
from widebeam.errors import CatalogUnreachable, InvalidRequest, NotFound, WideBeamError

if TYPE_CHECKING:
    from widebeam.engine.live_catalogs import LiveCatalogs

log = logging.getLogger(__name__)
Fingerprint = tuple[tuple[int, int, int] | None, ...]
"""Time of change, size and inode of a catalog file and of what is read with it; None where there is no such file."""


def fingerprint(path: Path) -> Fingerprint:
    """How a catalog file looks now, with its header and the metadata beside it. Blocks."""
    return tuple(_look(one) for one in (path, *(path.with_name(name) for name in _beside(path.name))))


def _beside(name: str) -> list[str]:
    """Names of what may be read with a catalog file of this name."""
    base = base_name(Path(name))
    return [f"{base}.catalog.json", "catalog.json", f"{base}.item.json"]


def _look(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


@dataclass(frozen=True)
class CatalogFile:
    """A file as it was named: where that leads to may be another one each time."""

    given: str
    """Path, relative to `below` if there is one; without, it may be a URI of an object store."""
    below: str | None = None
    """Folder that the file must lie in, wherever links lead; None: it may lie anywhere."""

    @property
    def name(self) -> str:
        """What a catalog of this file is called."""
        return base_name(Path(object_store.file_name(self.given)))

    @property
    def _is_remote(self) -> bool:
        return self.below is None and object_store.is_uri(self.given)

    @contextmanager
    def here(self) -> Iterator[tuple[Path, Fingerprint]]:
        """Where it can be read within the `with` block, and how it looked before. Blocks. Raises CatalogError for an
        object that cannot be had, and as `find`."""
        if self._is_remote:
            with object_store.fetched(self.given, self._names_beside) as (path, seen):
                yield path, seen
        else:
            path = self.find()
            yield path, fingerprint(path)

    @property
    def _names_beside(self) -> list[str]:
        return _beside(object_store.file_name(self.given))

    def find(self) -> Path:
        """Where it lies now. Raises InvalidRequest (`invalid_path`), with the same words for all that is not below the
        folder, whether it is there or not. Blocks."""
        if self.below is None:
            return Path(self.given)
        base, given = Path(self.below).resolve(), Path(self.given)
        wrong = f"{self.given!r} is not the relative path of a file below the catalog root"
        try:
            file = (base / given).resolve()
            if not given.is_absolute() and ".." not in given.parts and file.is_relative_to(base):
                if file.is_file():
                    return file
                wrong = (
                    f"{'a folder, no file' if file.is_dir() else 'no such file'} below the catalog root: {self.given!r}"
                )
        except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a zero byte
            pass
        raise InvalidRequest(wrong, code="invalid_path", param="path")

    def look(self) -> Fingerprint:
        """How what it leads to looks now; empty where it leads to none. Blocks. Raises CatalogUnreachable if an
        object store does not tell."""
        if self._is_remote:
            return object_store.look(self.given, self._names_beside)
        try:
            return fingerprint(self.find())
        except InvalidRequest:
            return ()


async def watch(catalogs: LiveCatalogs, interval_s: float) -> None:
    """Look at all files at this interval, until cancelled, and load those that changed and then stayed as they are for
    one interval. A file that cannot be loaded is logged, and left alone until it changes again; but where trying again
    can help, the next look does."""
    refused: dict[str, Fingerprint] = {}
    before: dict[str, Fingerprint] = {}
    unseen: set[str] = set()
    while True:
        await asyncio.sleep(interval_s)
        for name, (file, loaded) in list(catalogs.loader.files.items()):
            try:
                now = await asyncio.to_thread(file.look)
                unseen.discard(name)
            except CatalogUnreachable as error:
                if name not in unseen:
                    log.error("nobody can tell whether catalog %r has changed: %s", name, error)
                unseen.add(name)
                continue
            settled, before[name] = before.get(name) == now, now
            if not settled or now in (loaded, refused.get(name)):
                continue
            try:
                catalog = await catalogs.load(file.given, name, below=file.below, again=True)
                log.info("%s has changed: catalog %r is at version %d", file.given, name, catalog.version)
            except NotFound:
                continue  # it was removed meanwhile
            except WideBeamError as error:
                if error.retryable:
                    log.warning("%s has changed, and will be tried again as %r: %s", file.given, name, error)
                    continue
                refused[name] = now
                log.error("%s has changed, but catalog %r stays as it is: %s", file.given, name, error)
            except Exception:  # a defect that this file meets must not end the watch over all others
                refused[name] = now
                log.exception("%s has changed, but catalog %r stays as it is", file.given, name)
