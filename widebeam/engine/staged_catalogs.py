"""Versions that are built, checked and on the device, and that no search gets yet: so that several engines can switch
together, once each of them is able to.

A stage holds its room on the device until it is committed, discarded, or another one of its name takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.catalogs import Catalogs
from widebeam.engine.catalog_changes import Change
from widebeam.engine.live_catalogs import LiveCatalogs
from widebeam.errors import Conflict


class Staged(NamedTuple):
    catalog: Catalog
    offered: Callable[[], None]


class StagedCatalogs:
    """At most one version of each catalog. Lives on the engine's event loop."""

    def __init__(self, catalogs: Catalogs, live: LiveCatalogs) -> None:
        self._catalogs = catalogs
        self._live = live
        self._staged: dict[str, Staged] = {}

    async def stage(self, path: str | Path, name: str | None = None, version: int | None = None) -> Catalog:
        """Do all of `LiveCatalogs.load` that can fail or take long. The version is declared, by the header or here.

        Raises as that does, and Conflict (`version_required`).
        """
        change = self._live.loader.change(path, name, version=version)

        def build(current: Catalog | None) -> Catalog:
            self._staged.pop(change.name, None)  # its room is needed
            catalog = change.build(current)
            assert catalog is not None
            if catalog.header.version is None:
                raise Conflict(
                    f"the version of catalog {change.name!r} is not declared, and would be another on each server",
                    code="version_required",
                    param="version",
                )
            return catalog

        def keep(catalog: Catalog) -> None:
            self._staged[change.name] = Staged(catalog, change.offered)

        return await self._live.change(replace(change, build=build, keep=keep))

    async def commit(self, name: str, version: int) -> Catalog:
        """Offer what is staged; nothing is left to be done if new searches get this version already.

        Raises Conflict: `not_staged`, or `version_not_newer` if another version came first.
        """

        def build(current: Catalog | None) -> Catalog:
            if current is not None and current.version == version:
                return current
            staged = self._staged.get(name)
            if staged is None or staged.catalog.version != version:
                raise Conflict(
                    f"version {version} of catalog {name!r} is not staged here", code="not_staged", param="version"
                )
            self._catalogs.check_number(name, version)
            return staged.catalog

        def offered() -> None:
            self._staged.pop(name).offered()

        return await self._live.change(Change(name, build, numbered=True, offered=offered))

    def discard(self, name: str) -> None:
        """Let go of what is staged, if anything is."""
        self._staged.pop(name, None)
