"""The small header of a catalog file: what its SIDs mean, the order within one SID, history template, named filters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from widebeam.constraints.filter_spec import MAX_PREDICATES, FilterName, Predicates
from widebeam.constraints.template import HistoryTemplate
from widebeam.engine.request import MAX_VERSION
from widebeam.errors import CatalogError
from widebeam.faults import find_fault, why_no_json

SidForm = Literal["codes", "token_ids", "tokens"]
Marker = Annotated[str, Meta(min_length=1, max_length=256)] | Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A token, by its string or its id."""
DeclaredVersion = Annotated[int, Meta(ge=1, le=MAX_VERSION)]
"""What its publisher calls a version: the same number is the same content on every server."""
MAX_DEPTH = 32
"""Levels that a SID may have."""
MAX_NAME_LENGTH = 256
"""Characters of a catalog's name in a request."""
MAX_CODES = 1 << 20
"""Codes that a header may declare for one level."""
PARQUET_KEY = b"widebeam"
"""Key of the parquet schema metadata that holds a header."""
_AGREED = ("version", "sid", "levels", "begin", "end")
"""Fields of which a parquet file and `catalog.json` beside it may not say different things: what its SIDs are."""


class HeaderMismatch(Exception):
    """A header that is well formed, but does not fit the file."""


class Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the codes of one level become tokens: by a token string or by a first token id."""

    token: str | None = None
    """Token of a code, with `{code}` in place of the number: `<a_{code}>`."""
    first_token_id: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Token id of code 0; code c has first_token_id + c."""
    codes: Annotated[int, Meta(ge=1, le=MAX_CODES)] | None = None
    """Size of the codebook: codes 0 .. codes - 1. None: the codes that the catalog holds."""

    def __post_init__(self) -> None:
        if (self.token is None) == (self.first_token_id is None):
            raise ValueError("a level has either `token` or `first_token_id`")
        if self.token is not None and self.token.count("{code}") != 1:
            raise ValueError("`token` must hold {code} once, as in <a_{code}>")

    def name(self, code: int) -> str:
        """The token string of a code, where `token` is given."""
        assert self.token is not None
        return self.token.replace("{code}", str(code))


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Order of items that share one SID; equal values keep the file's order, missing ones come last."""

    column: str
    descending: bool = False


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `catalog.json`. Every field may be left out."""

    version: DeclaredVersion | None = None
    """Number of this version of the catalog. None: each server counts its own."""
    sid: SidForm | None = None
    """What the `sid` column holds. None: strings are tokens, integers are codes with `levels` and token ids without."""
    levels: Annotated[tuple[Level, ...], Meta(min_length=1, max_length=MAX_DEPTH)] | None = None
    """One entry for each level. With SIDs given as codes it maps them to tokens; otherwise it declares codebooks."""
    begin: Marker | None = None
    """Token in front of every SID, to which every prompt is brought: see `Markers`."""
    end: Marker | None = None
    """Token behind every SID. Files may spell both markers around their SIDs, unless those are codes."""
    order: Order | None = None
    """None: the file's order."""
    max_items_per_sid: Annotated[int, Meta(ge=1)] | None = None
    """Most items of one SID that are returned, the first in that order; None: all of them."""
    template: HistoryTemplate | None = None
    filters: Annotated[dict[FilterName, Predicates], Meta(max_length=MAX_PREDICATES)] = {}
    """Filters that requests name; an item passes one that meets all its predicates."""

    def __post_init__(self) -> None:
        if self.sid == "codes" and self.levels is None:
            raise ValueError("SIDs given as codes need `levels`, which map them to tokens")

    def check_levels(self, form: SidForm) -> None:
        """Where SIDs name their tokens themselves, a level can only declare its codebook. Raises HeaderMismatch."""
        wanted = {"tokens": "token", "token_ids": "first_token_id"}.get(form)
        for number, level in enumerate(self.levels or ()):
            if wanted and (getattr(level, wanted) is None or level.codes is None):
                raise HeaderMismatch(
                    f"levels[{number}]: with SIDs given as {form} a level declares its codebook: `{wanted}` and `codes`"
                )


def base_name(path: Path) -> str:
    """The file's name without its ending: the catalog's name, and what its own header is called after."""
    name = path.name
    return name.removesuffix(".index.json") if name.endswith(".index.json") else path.stem


def beside(name: str, other: str) -> str:
    """What messages call another file in the folder of one that they call `name`."""
    folder, slash, _ = name.rpartition("/")
    return folder + slash + other


def find_header(path: Path, embedded: bytes | None, name: str) -> tuple[Header, str | None]:
    """The header of a catalog file, which messages call `name`, and where it was found.

    `NAME.catalog.json` beside the file is the header, whole. Without it that is `catalog.json` in the same folder, and
    what this leaves out is as the header inside a parquet file says. Without any, a header of defaults and None. Raises
    CatalogError, also where the last two contradict each other.
    """
    own = path.with_name(f"{base_name(path)}.catalog.json")
    if own.is_file():
        place = beside(name, own.name)
        return _decode(own.read_bytes(), place), place
    found = []
    shared = path.with_name("catalog.json")
    if shared.is_file() and shared != path:
        place = beside(name, shared.name)
        found.append((_decode(shared.read_bytes(), place), place))
    if embedded is not None:
        place = f"{name} (schema metadata)"
        found.append((_decode(embedded, place), place))
    if len(found) < 2:
        return found[0] if found else (Header(), None)
    (outside, place), (inside, other) = found
    return _joined(outside, inside, f"{place} and {other}", own.name), f"{place} and {other}"


def _joined(outside: Header, inside: Header, places: str, own: str) -> Header:
    """The header beside a file, with what it leaves out from inside. Raises CatalogError."""
    said = {
        field.name: value
        for field in msgspec.structs.fields(Header)
        if (value := getattr(outside, field.name)) != field.default and value != {}
    }
    for name in _AGREED:
        other = getattr(inside, name)
        if name in said and other is not None and said[name] != other:
            raise CatalogError(f"{places} say different things of `{name}`. A header in {own} counts alone")
    return msgspec.structs.replace(inside, **said)


def _decode(text: bytes, place: str) -> Header:
    try:
        return msgspec.json.decode(text, type=Header)
    except msgspec.ValidationError as error:
        raise CatalogError(f"{place}: {find_fault(error, Header).text}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise CatalogError(f"{place}: not valid JSON: {why_no_json(error, text)}") from None
