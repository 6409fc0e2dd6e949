"""Catalog files that are loaded again when they change."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from widebeam.constraints.header import base_name
from widebeam.errors import InvalidRequest, RequestError, WideBeamError

if TYPE_CHECKING:
    from widebeam.engine.live_catalogs import LiveCatalogs

log = logging.getLogger(__name__)
Fingerprint = tuple[tuple[int, int, int] | None, ...]
"""Time of change, size and inode of a catalog file and of what is read with it; None where there is no such file."""


def fingerprint(path: Path) -> Fingerprint:
    """How a catalog file looks now, with its header and the metadata beside it. Blocks."""
    beside = (f"{base_name(path)}.catalog.json", "catalog.json", f"{base_name(path)}.item.json")
    return tuple(_look(one) for one in (path, *(path.with_name(name) for name in beside)))


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
    """Path, relative to `below` if there is one."""
    below: str | None = None
    """Folder that the file must lie in, wherever links lead; None: it may lie anywhere."""

    def find(self) -> Path:
        """Where it lies now. Raises InvalidRequest (`invalid_path`), with the same words for all that is not a file
        below the folder. Blocks."""
        if self.below is None:
            return Path(self.given)
        base, given = Path(self.below).resolve(), Path(self.given)
        try:
            file = (base / given).resolve()
            good = not given.is_absolute() and ".." not in given.parts and file.is_relative_to(base) and file.is_file()
        except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a zero byte
            good = False
        if not good:
            raise InvalidRequest(
                f"{self.given!r} is not the relative path of a file below the catalog root",
                code="invalid_path",
                param="path",
            )
        return file

    def look(self) -> Fingerprint:
        """How what it leads to looks now; empty where it leads to none. Blocks."""
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
    while True:
        await asyncio.sleep(interval_s)
        for name, (file, loaded) in list(catalogs.files.items()):
            now = await asyncio.to_thread(file.look)
            settled, before[name] = before.get(name) == now, now
            if not settled or now in (loaded, refused.get(name)):
                continue
            try:
                catalog = await catalogs.load(file.given, name, below=file.below)
                log.info("%s has changed: catalog %r is at version %d", file.given, name, catalog.version)
            except WideBeamError as error:
                if isinstance(error, RequestError) and error.retryable:
                    log.warning("%s has changed, and will be tried again as %r: %s", file.given, name, error)
                    continue
                refused[name] = now
                log.error("%s has changed, but catalog %r stays as it is: %s", file.given, name, error)
            except Exception:  # a defect that this file meets must not end the watch over all others
                refused[name] = now
                log.exception("%s has changed, but catalog %r stays as it is", file.given, name)
