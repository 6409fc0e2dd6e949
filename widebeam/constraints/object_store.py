"""Catalog files in object storage (`s3://`, `gs://`, ..), by Arrow's own file systems: how one looks, and a copy here.

Credentials, region and endpoint come from where the store's own tools take them, or from the query of the URI.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from widebeam.errors import CatalogError, CatalogUnreachable

_URI = re.compile(r"[a-z][a-z0-9+.-]+://")
_CHUNK_BYTES = 8 << 20
Look = tuple[int, int, int] | None
"""Time of change in ns, size, 0; None where there is no such object."""


def is_uri(text: str) -> bool:
    return _URI.match(text) is not None


def file_name(text: str) -> str:
    """The last part of a path or of a URI's path."""
    return PurePosixPath(urlsplit(text).path).name if is_uri(text) else Path(text).name


def look(uri: str, names_beside: Sequence[str]) -> tuple[Look, ...]:
    """How an object looks now, and those of these names beside it. Blocks. Raises CatalogUnreachable."""
    store, path = _open(uri)
    with _errors(uri):
        found = store.get_file_info([path, *(_beside(path, name) for name in names_beside)])
    return tuple(None if one.type != fs.FileType.File else (one.mtime_ns or 0, one.size or 0, 0) for one in found)


@contextmanager
def fetched(uri: str, names_beside: Sequence[str]) -> Iterator[tuple[Path, tuple[Look, ...]]]:
    """A copy of an object for the `with` block, beside it copies of those beside it that there are, and how all looked.

    Blocks. Raises CatalogError, and CatalogUnreachable also if one of them changed meanwhile: a copy is made in pieces,
    and could be half of each.
    """
    store, path = _open(uri)
    before = look(uri, names_beside)
    if before[0] is None:
        raise CatalogError(f"{uri}: there is no such object")
    with tempfile.TemporaryDirectory(prefix="widebeam-") as folder:
        for one, source in zip(before, [path, *(_beside(path, name) for name in names_beside)], strict=True):
            if one is not None:
                with _errors(uri):
                    _copy(store, source, Path(folder) / PurePosixPath(source).name)
        if look(uri, names_beside) != before:
            raise CatalogUnreachable(f"{uri} changed while it was read")
        yield Path(folder) / PurePosixPath(path).name, before


def _open(uri: str) -> tuple[fs.FileSystem, str]:
    if urlsplit(uri).password is not None:
        raise CatalogError("the URI of a catalog holds a password: leave credentials to the environment")
    try:
        store, path = fs.FileSystem.from_uri(uri)
    except (OSError, pa.ArrowException) as error:
        raise CatalogError(f"{uri}: {error}") from None
    return store, path


def _beside(path: str, name: str) -> str:
    return str(PurePosixPath(path).with_name(name))


def _copy(store: fs.FileSystem, source: str, target: Path) -> None:
    with store.open_input_stream(source) as stream, target.open("wb") as file:
        while piece := stream.read(_CHUNK_BYTES):
            file.write(piece)


@contextmanager
def _errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise CatalogUnreachable(f"{uri}: {error}") from None
