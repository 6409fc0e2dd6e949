"""`widebeam catalog validate`: everything that is wrong with a catalog file, line by line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from widebeam.constraints.catalog import Catalog
from widebeam.errors import CatalogError
from widebeam.faults import counted

PLACE = re.compile(r"(?P<file>.+?)(?::(?P<line>\d+)| row (?P<row>\d+))?: (?P<reason>.+)", re.DOTALL)
"""How messages about catalog files begin: `items.jsonl:17: ..`, `items.parquet row 3: ..`, `catalog.json: ..`."""
MORE = re.compile(r"\.\.\. and (\d+) more")


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that is wrong."""

    file: str
    """As it was named."""
    line: int | None = None
    """Of a JSONL file, from 1."""
    row: int | None = None
    """Of a parquet file, from 0."""
    reason: str

    @classmethod
    def of(cls, text: str, path: Path) -> Problem:
        """From a message about the catalog at `path`, its header or its metadata."""
        match = PLACE.fullmatch(text)
        if match is None or not path.with_name(match["file"].rsplit("/")[-1]).is_file():
            return cls(file=str(path), reason=text)
        line, row = (None if match[name] is None else int(match[name]) for name in ("line", "row"))
        return cls(file=match["file"], line=line, row=row, reason=match["reason"])


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a catalog file is fine."""

    file: str
    fine: bool
    items: int | None
    """None: it is not fine, so they were not counted."""
    sids: int | None
    resolved: bool
    """False: token strings were not looked up in a tokenizer."""
    problems: list[Problem]
    more: int
    """Problems beyond those listed."""
    messages: tuple[str, ...]
    """The problems as they are printed."""
    warnings: tuple[str, ...] = ()
    """What may be other than meant, of a file that is fine."""

    def text(self) -> str:
        if not self.fine:
            return "\n".join(self.messages)
        unchecked = "" if self.resolved else "; token strings were not looked up in a tokenizer (--model)"
        assert self.items is not None and self.sids is not None
        found = f"{counted(self.items, 'item', ',')} under {counted(self.sids, 'SID', ',')}"
        fine = f"{self.file} is fine: {found}{unchecked}"
        return "\n".join([fine, *(f"warning: {text}" for text in self.warnings)])


def validate(
    path: Path, token_id: Callable[[str], int | None] | None = None, vocab_size: int | None = None
) -> Validation:
    """Read and check a catalog file as a server does (see Catalog.load)."""
    try:
        catalog = Catalog.load(path, shown=str(path), token_id=token_id, vocab_size=vocab_size)
    except CatalogError as error:
        more = sum(int(found[1]) for text in error.problems if (found := MORE.fullmatch(text)))
        problems = [Problem.of(text, path) for text in error.problems if not MORE.fullmatch(text)]
        return Validation(
            file=str(path), fine=False, items=None, sids=None, resolved=token_id is not None, problems=problems,
            more=more, messages=tuple(error.problems),
        )  # fmt: skip
    return Validation(
        file=str(path), fine=True, items=catalog.num_items, sids=catalog.num_sids, resolved=catalog.resolved,
        problems=[], more=0, messages=(), warnings=catalog.warnings,
    )  # fmt: skip
