"""Catalog files as changes: each is read and checked when its turn comes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.catalogs import Catalogs
from widebeam.constraints.codebooks import Vocabulary
from widebeam.engine.catalog_changes import Change
from widebeam.engine.catalog_watch import CatalogFile, Fingerprint
from widebeam.errors import CatalogError, InvalidRequest
from widebeam.faults import counted

log = logging.getLogger(__name__)


class CatalogLoader:
    """Makes the changes that load files, and knows which files stay. Lives on the engine's event loop."""

    def __init__(self, catalogs: Catalogs, vocabulary: Vocabulary, deepest: int) -> None:
        """`deepest`: levels that a SID may have here."""
        self.files: dict[str, tuple[CatalogFile, Fingerprint]] = {}
        """Of catalogs that were last loaded from a file that stays: which, and how it looked before it was read."""
        self._catalogs = catalogs
        self._vocabulary = vocabulary
        self._deepest = deepest

    def change(
        self,
        path: str | Path,
        name: str | None = None,
        if_version: int | None = None,
        version: int | None = None,
        below: str | None = None,
        upload: str | None = None,
    ) -> Change:
        """What `LiveCatalogs.load` does, to be changed or done; `name` None stands for that of the file."""
        file = CatalogFile(str(path), below)
        name = file.name if name is None else name
        shown = file.given if upload is None else Path(file.given).name
        seen: Fingerprint = ()

        def build(current: Catalog | None) -> Catalog:
            nonlocal seen
            if version is not None:
                self._catalogs.check_number(name, version)
            with file.here() as (path, seen):
                inherited = None if upload is None or current is None else declared(current, None).header
                token_id, vocab_size = self._vocabulary.token_id, self._vocabulary.size
                catalog = Catalog.load(
                    path, name=name, shown=shown, token_id=token_id, vocab_size=vocab_size, inherited=inherited
                )
                self._check(catalog, shown)
            for warning in catalog.warnings:
                log.warning("catalog %r (%s): %s", name, file.given if upload is None else upload, warning)
            where = str(path) if below is not None else file.given
            known = catalog.header.version
            if version is not None and known not in (None, version):
                raise InvalidRequest(f"version is {version}, but the header of the file says {known}", param="version")
            catalog = catalog if version is None else declared(catalog, version)
            return replace(catalog, source=where if upload is None else upload)

        def offered() -> None:
            if upload is None:
                self.files[name] = file, seen
            else:
                self.files.pop(name, None)

        return Change(name, build, if_version, offered=offered)

    def _check(self, catalog: Catalog, shown: str) -> None:
        """Raise CatalogError for what no search could run on."""
        if not catalog.resolved:
            raise CatalogError(f"{shown} spells SIDs as token strings, but the model has no tokenizer to resolve them")
        if catalog.depth > self._deepest:
            raise CatalogError(
                f"{shown}: there is no room for SIDs of {counted(catalog.depth, 'token')}: --max-levels and "
                f"--max-context-len allow {self._deepest}"
            )


def declared(catalog: Catalog, version: int | None) -> Catalog:
    """The catalog as if its header had declared this version, or none."""
    return replace(catalog, header=msgspec.structs.replace(catalog.header, version=version))
