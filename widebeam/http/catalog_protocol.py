"""The wire format of catalogs and their changes, shared by server and client; it has their bounds. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from widebeam.constraints.filter_spec import ItemId
from widebeam.constraints.header import DeclaredVersion, SidForm
from widebeam.http.protocol import Version

MAX_CHANGES = 100_000
UploadFormat = Literal["parquet", "jsonl", "minionerec", "sid2pid"]


class CatalogInfo(msgspec.Struct, kw_only=True):
    """A catalog as new searches get it."""

    name: str
    default: bool
    """Requests that name no catalog get this one."""
    version: int
    items: int
    sids: int
    """Distinct SIDs."""
    levels: int
    """Of the longest SID."""
    codes: list[int]
    """Tokens of each level's codebook."""
    sid_form: SidForm
    columns: list[str]
    """Metadata columns."""
    filters: list[str]
    """Named filters."""
    format: str
    """jsonl, parquet, minionerec or sid2pid."""
    source: str
    """The path of its file, `upload` or `update of version N`."""
    made_at: float
    """Unix time in seconds."""
    earlier: list[int]
    """Versions that a rollback can go to, newest first."""


class CatalogList(msgspec.Struct, kw_only=True):
    data: list[CatalogInfo]


class PutCatalog(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of PUT /v1/catalogs/{name} without a query: load a file that the server has."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Below --catalog-root."""
    if_version: Version | None = None
    """Only if the catalog is at this version; 0: only if there is none."""
    version: DeclaredVersion | None = None
    """Its number, unless the file's header declares it. None: the next that this server counts."""


class UploadQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Query of PUT /v1/catalogs/{name} whose body is a catalog file."""

    format: UploadFormat | UnsetType = UNSET
    if_version: Version | UnsetType = UNSET
    version: DeclaredVersion | UnsetType = UNSET


class RemoveQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Query of DELETE /v1/catalogs/{name}."""

    if_version: Version | UnsetType = UNSET


class UpdateItems(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/catalogs/{name}/items."""

    upsert: Annotated[list[msgspec.Raw], Meta(max_length=MAX_CHANGES)] = []
    """Whole items as in a JSONL file: `item_id`, `sid`, metadata. Each is added, or replaces the item of its id."""
    remove: Annotated[list[ItemId], Meta(max_length=MAX_CHANGES)] = []
    if_version: Version | None = None
    version: DeclaredVersion | None = None


class RollBack(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/catalogs/{name}/rollback."""

    version: Version
    if_version: Version | None = None
