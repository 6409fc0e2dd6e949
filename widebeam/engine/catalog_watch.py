"""Catalog files that are loaded again when they change."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from widebeam.constraints.header import base_name
from widebeam.errors import WideBeamError

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


async def watch(catalogs: LiveCatalogs, interval_s: float) -> None:
    """Look at all files at this interval, until cancelled, and load those that changed and then stayed as they are for
    one interval. A file that cannot be loaded is logged, and left alone until it changes again."""
    refused: dict[str, Fingerprint] = {}
    before: dict[str, Fingerprint] = {}
    while True:
        await asyncio.sleep(interval_s)
        for name, (path, loaded) in list(catalogs.files.items()):
            now = await asyncio.to_thread(fingerprint, path)
            settled, before[name] = before.get(name) == now, now
            if not settled or now in (loaded, refused.get(name)):
                continue
            try:
                catalog = await catalogs.load(path, name)
                log.info("%s has changed: catalog %r is at version %d", path, name, catalog.version)
            except WideBeamError as error:
                refused[name] = now
                log.error("%s has changed, but catalog %r stays as it is: %s", path, name, error)
