"""The catalogs of a server by name: the version of each that new searches get, and those before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from widebeam.constraints.catalog import Catalog, hint
from widebeam.constraints.header import base_name
from widebeam.constraints.object_store import file_name
from widebeam.engine.request import NO_CATALOG
from widebeam.errors import CatalogVersionNotReady, ConfigError, Conflict, InvalidRequest, NotFound

_LOOK_AGAIN_S = 1.0
"""When a version that others have may be here too."""


class Catalogs:
    """The current version of each catalog by name, the last `history` of those before it, and which is the default."""

    def __init__(self, history: int = 3, default: str | None = None) -> None:
        """`default`: the name of the default catalog, whether there is one of that name or not."""
        self._most = history
        self._chosen = default
        self.default = default
        """Name of the catalog of requests that name none. None: there has been none yet, or several came first."""
        self._current: dict[str, Catalog] = {}
        self._earlier: dict[str, dict[int, Catalog]] = {}
        """By version number, those that were current last behind the others."""
        self._numbers: Counter[str] = Counter()
        """The highest that each name has had."""
        self._declared: set[str] = set()
        """Names whose versions their publisher numbers."""

    def check_number(self, name: str, declared: int | None) -> None:
        """Raise Conflict unless the next version of a name can have this number, or without one be counted here.

        A number is given once, so that it never stands for two contents. Where one has been declared, all are: a number
        that this server counts could be the publisher's next, for something else.
        """
        highest = self._numbers[name]
        if declared is None and name in self._declared:
            raise Conflict(
                f"the versions of catalog {name!r} are declared, the last one as {highest}: declare the next one too",
                code="version_required",
                param="version",
            )
        if declared is not None and declared <= highest:
            current = self._current[name].version if name in self._current else 0
            at = f"is at version {current}" + (f" and has been at {highest}" if current != highest else "")
            raise Conflict(f"catalog {name!r} {at}: {declared} is not newer", code="version_not_newer", param="version")

    def next_version(self, catalog: Catalog) -> Catalog:
        """The catalog under the number that its header declares, else under the next of its name. Raises Conflict."""
        declared = catalog.header.version
        self.check_number(catalog.name, declared)
        return replace(catalog, version=self._numbers[catalog.name] + 1 if declared is None else declared)

    def add(self, catalog: Catalog) -> None:
        """Offer a catalog under its name, in place of another version, which is kept for a while."""
        if self.default is None and not self._current:
            self.default = catalog.name
        before, earlier = self._current.get(catalog.name), self._earlier.setdefault(catalog.name, {})
        if before is not None:
            # a copy, since the device forgets a version when nobody holds the catalog that was searched
            earlier.pop(before.version, None)
            earlier[before.version] = replace(before)
        earlier.pop(catalog.version, None)
        for version in list(earlier)[: max(0, len(earlier) - self._most)]:
            del earlier[version]
        self._current[catalog.name] = catalog
        self._numbers[catalog.name] = max(self._numbers[catalog.name], catalog.version)
        if catalog.header.version is not None:
            self._declared.add(catalog.name)

    def none_is_first(self) -> None:
        """What was added so far came together: without a choice of the setting, several have no default."""
        if len(self._current) > 1:
            self.default = self._chosen

    def remove(self, name: str) -> None:
        """Offer a catalog no more, and forget its earlier versions. Its numbers stay taken.

        When none is left, the next one that comes is the default again, unless the setting says which.
        """
        del self._current[name]
        self._earlier.pop(name, None)
        if not self._current:
            self.default = self._chosen

    def earlier(self, name: str) -> list[Catalog]:
        """Versions that the catalog can go back to, newest number first. They are not to be searched."""
        return sorted(self._earlier.get(name, {}).values(), key=lambda catalog: -catalog.version)

    def copy_of(self, name: str, version: int) -> Catalog:
        """An earlier version, under its number, to be offered again. Raises NotFound (`unknown_version`)."""
        earlier = self._earlier.get(name, {})
        if version not in earlier:
            known = ", ".join(str(one.version) for one in self.earlier(name)) or "none"
            raise NotFound(
                f"catalog {name!r} has no version {version} to go back to; kept are: {known}",
                code="unknown_version",
                param="version",
            )
        return replace(earlier[version])

    def names(self) -> list[str]:
        return sorted(self._current)

    def get(self, name: str | None, min_version: int | None = None) -> Catalog | None:
        """The catalog that a request names. None asks for the default, if there is one; "none" for no constraint.

        Raises NotFound (`unknown_catalog`), InvalidRequest (`ambiguous_catalog`) when none is named and none is the
        default or where `min_version` has no catalog, and CatalogVersionNotReady where the current one is older.
        """
        catalog = self._named(name)
        if min_version is None:
            return catalog
        if catalog is None:
            raise InvalidRequest("min_catalog_version needs a catalog", param="min_catalog_version")
        if catalog.version < min_version:
            raise CatalogVersionNotReady(
                f"catalog {catalog.name!r} is at version {catalog.version} here, not yet at {min_version}",
                param="min_catalog_version",
                retry_after_s=_LOOK_AGAIN_S,
            )
        return catalog

    def _named(self, name: str | None) -> Catalog | None:
        if name == NO_CATALOG or (name is None and not self._current):
            return None
        known = ", ".join(self.names()) or "none"
        if name is None:
            if self.default is None:
                raise InvalidRequest(
                    f"name one of the catalogs: {known}; none of them is the default (--default-catalog)",
                    code="ambiguous_catalog",
                    param="catalog",
                )
            return self._current.get(self.default)
        if name not in self._current:
            raise NotFound(
                f"unknown catalog {name!r}{hint(name, self._current)}; known are: {known}",
                code="unknown_catalog",
                param="catalog",
            )
        return self._current[name]


def catalog_files(given: str | Sequence[str] | None, default: str | None = None) -> dict[str, str]:
    """Files by the names of their catalogs, of the setting: each FILE or NAME=FILE. Raises ConfigError, also where the
    default is none of them."""
    files: dict[str, str] = {}
    for text in [given] if isinstance(given, str) else given or ():
        name, equals, file = text.partition("=")
        if not equals or "/" in name:
            name, file = base_name(Path(file_name(text))), text
        if not name or not file:
            raise ConfigError(f"--catalog {text!r} must be FILE or NAME=FILE")
        if name in files:
            raise ConfigError(
                f"--catalog: {files[name]} and {file} would both be named {name!r}; give names by NAME=FILE"
            )
        files[name] = file
    if files and default is not None and default not in files:
        raise ConfigError(
            f"--default-catalog: --catalog gives none of the name {default!r}{hint(default, files)}, but "
            f"{', '.join(sorted(files))}"
        )
    return files
