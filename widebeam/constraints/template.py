"""From a user's history to the prompt that the model was trained on: the template that a catalog carries."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from widebeam.errors import InvalidRequest
from widebeam.faults import counted

if TYPE_CHECKING:
    from widebeam.constraints.catalog import Catalog

Piece = str | list[int]
"""Part of a prompt: text that the tokenizer has yet to see, or token ids."""


class HistoryPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A rendered history."""

    token_ids: list[int]
    num_used: int
    """Known items that reached the prompt."""
    num_dropped: int
    """Known items that were left out, the oldest ones, because of `max_items` or the token limit."""
    unknown: list[int | str]
    """Items of the history that the catalog does not have, in the order given."""
    at_max_items: bool = False
    """Whether it was `max_items` that left some out, not the token limit."""

    @property
    def warnings(self) -> list[str]:
        """What of the history did not reach the prompt, in words."""
        found = []
        if self.unknown:
            are = "is" if len(self.unknown) == 1 else "are"
            found.append(f"{counted(len(self.unknown), 'history item')} {are} not in the catalog: {self.unknown[:5]}")
        if self.num_dropped:
            known = self.num_used + self.num_dropped
            why = "are used: the template's max_items" if self.at_max_items else "fit the prompt"
            found.append(f"history: only the newest {self.num_used} of {known} known items {why}")
        return found


class HistoryTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """prefix + item + separator + item + .. + suffix.

    In `item`, `{sid}` stands for the token ids of the item's SID, `{item_id}` and `{column}` for the item's id and
    metadata as text (nothing where it is missing); `{{` and `}}` are braces. Prefix, separator and suffix are taken
    as they are.
    """

    prefix: str = ""
    item: str = "{sid}"
    separator: str = ""
    suffix: str = ""
    max_items: Annotated[int, Meta(ge=1)] | None = None
    """Most items that reach the prompt; None: as many as fit."""

    def __post_init__(self) -> None:
        if not any(name is not None for _, name in _parse(self.item)):
            raise ValueError("template.item must name {sid} or a column")

    @property
    def columns(self) -> list[str]:
        """Metadata columns that `item` names."""
        return [name for _, name in _parse(self.item) if name not in (None, "sid", "item_id")]

    def render(
        self,
        catalog: Catalog,
        history: Sequence[int | str],
        encode: Callable[[str], list[int]],
        max_tokens: int,
    ) -> HistoryPrompt:
        """The prompt for a history of item ids, oldest first, in at most `max_tokens` tokens.

        Kept are the newest known items: at most `max_items`, at most one for each of `max_tokens`, and as many of
        those as fit. Text between two SIDs is one call to `encode`, which must add no special tokens: pieces that a
        tokenizer would have merged in training are merged here. Raises InvalidRequest (`prompt_too_long`) when even
        the prefix and the suffix do not fit.
        """
        rows: list[int] = []
        unknown: list[int | str] = []
        for item_id in history:
            row = catalog.row_of(item_id)
            if row is None:
                unknown.append(item_id)
            else:
                rows.append(row)
        most = min(len(rows), max_tokens, self.max_items or len(rows))
        items = [self._item_pieces(catalog, row) for row in rows[len(rows) - most :]]
        token_ids, num_used = self._fit(items, functools.cache(encode), max_tokens)
        return HistoryPrompt(
            token_ids=token_ids, num_used=num_used, num_dropped=len(rows) - num_used, unknown=unknown,
            at_max_items=num_used == self.max_items < len(rows) if self.max_items else False,
        )  # fmt: skip

    def _item_pieces(self, catalog: Catalog, row: int) -> list[Piece]:
        pieces: list[Piece] = []
        for literal, name in _parse(self.item):
            pieces.append(literal)
            if name == "sid":
                pieces.append(catalog.token_ids(row))
            elif name == "item_id":
                pieces.append(str(catalog.item_id(row)))
            elif name is not None:
                value = catalog.metadata(row, [name])[name]
                pieces.append("" if value is None else str(value))
        return pieces

    def _fit(
        self, items: list[list[Piece]], encode: Callable[[str], list[int]], max_tokens: int
    ) -> tuple[list[int], int]:
        """Tokens of the longest tail of `items` that fits, found by bisection, and its length."""

        def prompt(count: int) -> list[int]:
            pieces: list[Piece] = [self.prefix]
            for place, item in enumerate(items[len(items) - count :]):
                pieces += [self.separator, *item] if place else item
            return _tokens([*pieces, self.suffix], encode)

        whole = prompt(len(items))
        if len(whole) <= max_tokens:
            return whole, len(items)
        best, low, high = prompt(0), 0, len(items)  # `low` items fit, `high` do not
        if len(best) > max_tokens:
            raise InvalidRequest(
                f"the history template alone takes {counted(len(best), 'token')}; the prompt may have {max_tokens}",
                code="prompt_too_long",
                param="history",
            )
        while high - low > 1:
            middle = (low + high) // 2
            tokens = prompt(middle)
            if len(tokens) <= max_tokens:
                best, low = tokens, middle
            else:
                high = middle
        return best, low


@functools.lru_cache(maxsize=64)
def _parse(item: str) -> tuple[tuple[str, str | None], ...]:
    """(text, name of the placeholder behind it or None) for each part. Raises ValueError."""
    parts = []
    for literal, name, spec, conversion in string.Formatter().parse(item):
        if name == "" or spec or conversion:
            raise ValueError(f"template.item {item!r}: a placeholder is a column's name in braces, with nothing else")
        parts.append((literal, name))
    return tuple(parts)


def _tokens(pieces: list[Piece], encode: Callable[[str], list[int]]) -> list[int]:
    """Join neighbouring text, encode it, and string everything together."""
    token_ids: list[int] = []
    text: list[str] = []
    for piece in [*pieces, []]:
        if isinstance(piece, str):
            text.append(piece)
            continue
        joined = "".join(text)
        if joined:
            token_ids += encode(joined)
        text.clear()
        token_ids += piece
    return token_ids
