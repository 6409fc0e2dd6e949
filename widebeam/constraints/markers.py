"""Begin and end markers: tokens that stand around every SID, so that nobody needs to search for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from widebeam.constraints.header import Header, HeaderMismatch, Marker, SidForm

if TYPE_CHECKING:
    from widebeam.constraints.codebooks import Codebook, Vocabulary
    from widebeam.constraints.rows import Problems, Rows


@dataclass(frozen=True)
class Markers:
    """Token ids; None: there is none."""

    begin: int | None = None
    """Every prompt ends with it: it is appended where it is missing."""
    end: int | None = None
    """Shown behind a SID in texts, and never generated."""
    resolved: bool = True
    """False: a token string was not looked up, for want of a tokenizer."""

    @classmethod
    def of(cls, header: Header, vocabulary: Vocabulary, codebooks: Sequence[Codebook] = ()) -> Markers:
        """Raises HeaderMismatch for a marker that is no token, or one of a level's."""
        ids = {name: _token_id(name, value, vocabulary) for name, value in _declared(header).items()}
        for name, token_id in ids.items():
            for level, book in enumerate(codebooks):
                if token_id is not None and book.resolved and token_id in book.token_ids:
                    raise HeaderMismatch(f"{name}: token {token_id} is one of level {level}")
        return cls(**ids, resolved=None not in ids.values())

    def opened(self, tokens_T: np.ndarray) -> np.ndarray:
        """A prompt, not empty, with the begin marker at its end."""
        if self.begin is None or tokens_T[-1] == self.begin:
            return tokens_T
        return np.append(tokens_T, tokens_T.dtype.type(self.begin))


def without_markers(rows: Rows, form: SidForm, header: Header, vocabulary: Vocabulary, problems: Problems) -> Rows:
    """The same rows where SIDs spell no marker, neither in front nor behind, so that lengths count levels. Codes have
    none.

    A SID of nothing else goes to `problems`. Raises CatalogError for those, HeaderMismatch for a marker that is no
    token.
    """
    declared = _declared(header)
    if not declared or form == "codes":
        return rows
    spelled = {name: _as_written(name, value, rows, vocabulary) for name, value in declared.items()}
    ends = np.cumsum(rows.lengths)
    starts = ends - rows.lengths
    kept = np.ones(rows.values.size, bool)
    for name, places in (("begin", starts), ("end", ends - 1)):
        if (value := spelled.get(name)) is not None:
            kept[places[rows.values[places] == value]] = False
    lengths = np.add.reduceat(kept, starts, dtype=np.int64)

    def describe(row: int) -> str:
        return f"{rows.where(row)}: item {rows.ids[row]!r}: sid has nothing but markers"

    problems.add_rows(np.flatnonzero(lengths == 0), describe)
    problems.check()
    return replace(rows, lengths=lengths, values=rows.values[kept])


def _declared(header: Header) -> dict[str, Marker]:
    given = {"begin": header.begin, "end": header.end}
    return {name: value for name, value in given.items() if value is not None}


def _token_id(name: str, value: Marker, vocabulary: Vocabulary) -> int | None:
    """None where only a tokenizer would know."""
    if isinstance(value, int):
        token_id: int | None = value
    elif vocabulary.token_id is None:
        return None
    else:
        token_id = vocabulary.token_id(value)
    if token_id is None:
        raise HeaderMismatch(f"{name}: the tokenizer has no token {value!r}")
    if token_id >= vocabulary.limit:
        raise HeaderMismatch(f"{name}: token {token_id} is outside the vocabulary of {vocabulary.limit} tokens")
    return token_id


def _as_written(name: str, value: Marker, rows: Rows, vocabulary: Vocabulary) -> int | None:
    """The marker among the values of `rows`; None if it cannot be there."""
    if rows.tokens is None:
        return _token_id(name, value, vocabulary)
    return rows.tokens.index(value) if value in rows.tokens else None
