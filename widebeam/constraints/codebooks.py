"""The codebook of each level: its tokens as the catalog file writes them, and what is wrong with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from widebeam.constraints.header import HeaderMismatch, Level, SidForm
from widebeam.faults import counted

MAX_TOKEN_ID = 2**31 - 1
ADD_TOKENS = (
    "add the SID tokens to the tokenizer (those of added_tokens.json, if `widebeam catalog build` made the catalog; "
    "see docs/catalogs.md)"
)
_NOUNS: dict[SidForm, str] = {"codes": "code", "token_ids": "token id", "tokens": "token"}


@dataclass(frozen=True)
class Vocabulary:
    """What is known of the model's tokens. Without a tokenizer `token_id` is None; `size` is None when unknown."""

    token_id: Callable[[str], int | None] | None = None
    size: int | None = None

    @property
    def limit(self) -> int:
        return MAX_TOKEN_ID + 1 if self.size is None else self.size


@dataclass(frozen=True, eq=False)
class Codebook:
    """The tokens of one level, over which the `level` normaliser sums. No update changes them."""

    token_ids: np.ndarray
    """int64 [C], ascending."""
    values: np.ndarray
    """[C]; each token as the catalog file writes it: codes or token ids (int64), or strings (object)."""
    declared: bool
    """By the header; otherwise these are the tokens that the file held."""
    resolved: bool
    """False: made-up token ids, for want of a tokenizer."""

    def find(self, values: np.ndarray) -> np.ndarray:
        """int32; the place of each value as the file writes it, -1 where the codebook lacks it."""
        ascending, places = self._by_value
        at = np.minimum(np.searchsorted(ascending, values), ascending.size - 1)
        return np.where(ascending[at] == values, places[at], np.int32(-1))

    @functools.cached_property
    def _by_value(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.values, kind="stable")
        return self.values[order], order.astype(np.int32)


@dataclass(frozen=True)
class CodebookMaker:
    """Makes the codebook of one level."""

    number: int
    form: SidForm
    spec: Level | None
    vocabulary: Vocabulary

    def codebook(self, written: np.ndarray, surrogate: int) -> tuple[Codebook, dict[int, str]]:
        """The codebook, and what is wrong with distinct values of the file, by their place in `written`.

        `surrogate` is the first token id to make up when there is no tokenizer.
        """
        declared = self._declared()
        values = np.sort(written) if declared is None else declared
        names = self._names(values)
        resolved = names is None or self.vocabulary.token_id is not None
        token_ids = self._token_ids(values, names, surrogate)
        wrong = self._faults(values, names, token_ids, self.vocabulary.limit if resolved else MAX_TOKEN_ID + 1)
        entries = np.minimum(np.searchsorted(values, written), len(values) - 1)
        entries = np.where(values[entries] == written, entries, -1)
        self._refuse_level(values, token_ids, wrong, entries)
        order = np.argsort(token_ids, kind="stable")
        book = Codebook(token_ids[order], values[order], declared is not None, resolved)
        unusable = {int(i): wrong[int(entries[i])] for i in np.flatnonzero(np.isin(entries, list(wrong)))}
        return book, self.missing(book, written) | unusable

    def missing(self, book: Codebook, written: np.ndarray) -> dict[int, str]:
        """What is wrong with values that a codebook lacks, by their place in `written`."""
        size = counted(book.token_ids.size, "code")
        outside = f"is outside the declared codebook of {size}"
        if not book.declared:
            outside = (
                f"is outside the codebook of {size}, to which no update adds any: load a whole "
                "file, which begins a new codebook, or declare the level's `codes` in the catalog's header"
            )
        return {int(i): f"{self._show(written[i])} {outside}" for i in np.flatnonzero(book.find(written) < 0)}

    def without_token(self, book: Codebook, written: np.ndarray, faults: dict[int, str]) -> list[int]:
        """Those of the faults that are a token string without a token, by their place in `written`."""
        if self._names(written) is None or self.vocabulary.token_id is None:
            return []
        places = book.find(written)
        return [i for i in faults if places[i] >= 0 and book.token_ids[places[i]] < 0]

    def _declared(self) -> np.ndarray | None:
        """All codes that the header declares, ascending, as the file would write them."""
        if self.spec is None or self.spec.codes is None:
            return None
        codes = np.arange(self.spec.codes)
        if self.form == "tokens":
            return np.sort(_names_of(codes, self.spec))
        return codes if self.spec.first_token_id is None or self.form == "codes" else codes + self.spec.first_token_id

    def _names(self, values: np.ndarray) -> np.ndarray | None:
        """The token string of each value; None where token ids follow without a tokenizer."""
        if self.form == "tokens":
            return values
        if self.spec is not None and self.spec.token is not None:
            return _names_of(values, self.spec)
        return None

    def _token_ids(self, values: np.ndarray, names: np.ndarray | None, surrogate: int) -> np.ndarray:
        """int64 token id of each value; -1 where the tokenizer has no such token."""
        lookup = self.vocabulary.token_id
        if names is not None and lookup is None:
            return surrogate + np.arange(len(names))
        if names is not None and lookup is not None:
            found = map(lookup, names.tolist())
            return np.array([-1 if token_id is None else token_id for token_id in found], np.int64)
        if self.form == "codes" and self.spec is not None and self.spec.first_token_id is not None:
            return values + self.spec.first_token_id
        return values

    def _faults(
        self, values: np.ndarray, names: np.ndarray | None, token_ids: np.ndarray, limit: int
    ) -> dict[int, str]:
        """By place in `values`, why its token cannot be used."""
        wrong = (token_ids < 0) | (token_ids >= limit)
        if self.form != "tokens":
            wrong |= (values < 0) | (values > MAX_TOKEN_ID)
        faults = {}
        for i in np.flatnonzero(wrong).tolist():
            shown, token_id = self._show(values[i]), int(token_ids[i])
            if self.form != "tokens" and values[i] < 0:
                faults[i] = f"{shown} is negative"
            elif self.form != "tokens" and values[i] > MAX_TOKEN_ID:
                faults[i] = f"{shown} is above {MAX_TOKEN_ID}"
            elif names is not None and token_id < 0:
                faults[i] = f"the tokenizer has no token {names[i]!r}"
            elif self.form == "token_ids":
                faults[i] = f"{shown} is outside the vocabulary of {limit} tokens"
            else:
                faults[i] = f"{shown} is token id {token_id}, outside the vocabulary of {limit} tokens"
        return faults

    def _refuse_level(
        self, values: np.ndarray, token_ids: np.ndarray, wrong: dict[int, str], entries: np.ndarray
    ) -> None:
        """Raise HeaderMismatch for what no single item shows: unusable declared codes, two codes with one token."""
        unused = np.setdiff1d(np.array(list(wrong), np.int64), entries)
        if unused.size:
            raise HeaderMismatch(
                f"level {self.number}: {len(wrong)} of the {len(values)} declared codes cannot be used, for example: "
                f"{wrong[int(unused[0])]}" + (f"; {ADD_TOKENS}" if token_ids[unused[0]] < 0 else "")
            )
        order = np.argsort(token_ids, kind="stable")
        ascending = token_ids[order]
        same = np.flatnonzero((np.diff(ascending) == 0) & (ascending[1:] >= 0))
        if same.size:
            first, second = (self._show(values[i]) for i in order[same[0] : same[0] + 2])
            raise HeaderMismatch(f"level {self.number}: {first} and {second} are the same token {ascending[same[0]]}")

    def _show(self, value: int | str) -> str:
        return f"{_NOUNS[self.form]} {value!r}" if isinstance(value, str) else f"{_NOUNS[self.form]} {value}"


def _names_of(codes: np.ndarray, spec: Level) -> np.ndarray:
    """Token strings of codes, as an array of Python strings."""
    return np.array([spec.name(code) for code in codes.tolist()], object)
