"""From SIDs as written to codes: each item's place in the codebook of each level, and the items that have none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from widebeam.constraints.codebooks import ADD_TOKENS, Codebook, CodebookMaker, Vocabulary
from widebeam.constraints.header import MAX_DEPTH, Header, HeaderMismatch, Level, SidForm
from widebeam.constraints.rows import MAX_PROBLEMS, Problems, Rows


def sid_form(rows: Rows, header: Header) -> SidForm:
    """What the SIDs are: as declared, or strings for tokens, integers for codes with `levels` and token ids without."""
    if header.sid is not None:
        return header.sid
    if rows.tokens is not None:
        return "tokens"
    return "token_ids" if header.levels is None else "codes"


def encode_sids(
    rows: Rows, header: Header, vocabulary: Vocabulary, problems: Problems, known: Sequence[Codebook] = ()
) -> tuple[np.ndarray, list[Codebook]]:
    """int32 [rows, depth] places in the codebooks, -1 behind a shorter SID, and the codebook of each level.

    `rows` spell no markers. `known`: the codebooks of a catalog that these rows come to, one for each level, which must
    hold all their codes; no SID of the rows is longer. What is wrong with single items goes to `problems`, and the
    result is of use only if there are none. Raises HeaderMismatch for what is wrong with a level as a whole.
    """
    form = sid_form(rows, header)
    header.check_levels(form)
    levels = header.levels or ()
    depth = len(known) or _depth(rows, levels, problems)
    starts = np.cumsum(rows.lengths) - rows.lengths
    codes = np.full((len(rows.lengths), depth), -1, np.int32)
    books: list[Codebook] = []
    lost: list[tuple[int, np.ndarray, np.ndarray, dict[int, str]]] = []
    for number in range(depth):
        spelled = np.flatnonzero(rows.lengths > number)
        present, inverse = _distinct(rows.values[starts[spelled] + number])
        written = present if rows.tokens is None else np.array(rows.tokens, object)[present]
        level = CodebookMaker(number, form, levels[number] if levels else None, vocabulary)
        if known:
            book, faults = known[number], level.missing(known[number], written)
        else:
            book, faults = level.codebook(written, sum(book.token_ids.size for book in books))
        books.append(book)
        codes[spelled, number] = book.find(written)[inverse]
        without = {place: faults.pop(place) for place in level.without_token(book, written, faults)}
        lost.append((number, spelled, inverse, without))
        _report(rows, problems, number, spelled, inverse, faults)
    _report_lost(rows, problems, lost)
    return codes, books


def _depth(rows: Rows, levels: tuple[Level, ...], problems: Problems) -> int:
    """Levels of the longest SID, which the header's levels and the general limit bound."""
    limit = len(levels) or MAX_DEPTH
    limited_by = "the header declares" if levels else "a sid may have 1 to"

    def describe(row: int) -> str:
        return f"{rows.where(row)}: item {rows.ids[row]!r}: sid has {rows.lengths[row]} levels; {limited_by} {limit}"

    problems.add_rows(np.flatnonzero(rows.lengths > limit), describe)
    depth = min(int(rows.lengths.max()), limit)
    if depth < len(levels):
        raise HeaderMismatch(f"the header declares {len(levels)} levels, but the longest sid has {depth}")
    return depth


def _report(
    rows: Rows, problems: Problems, number: int, spelled: np.ndarray, inverse: np.ndarray, faults: dict[int, str]
) -> None:
    """One problem for each item whose token at this level is at fault."""

    def describe(row: int) -> str:
        fault = faults[int(inverse[np.searchsorted(spelled, row)])]
        return f"{rows.where(row)}: item {rows.ids[row]!r}: level {number}: {fault}"

    if faults:
        problems.add_rows(spelled[np.isin(inverse, list(faults))], describe)


def _report_lost(
    rows: Rows, problems: Problems, lost: list[tuple[int, np.ndarray, np.ndarray, dict[int, str]]]
) -> None:
    """Items with tokens that the tokenizer lacks, by level: each, or if they are more than are listed all as one."""
    items = [spelled[np.isin(inverse, list(faults))] for _, spelled, inverse, faults in lost]
    count = np.unique(np.concatenate(items)).size if items else 0
    if count <= MAX_PROBLEMS:
        for one in lost:
            _report(rows, problems, *one)
        return
    different = sum(len(faults) for *_, faults in lost)
    example = next(fault for *_, faults in lost for fault in faults.values())
    text = (
        f"SIDs of {count} items have tokens that the tokenizer lacks, {different} of all levels: {example}, and others"
    )
    problems.add_rows(np.array([-1]), lambda _: f"{problems.name}: {text}; {ADD_TOKENS}")  # before those of rows


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values ascending, and the place of each value among them. Hashed: a sort of all values takes longer."""
    encoded = pa.array(values).dictionary_encode()
    found = encoded.dictionary.to_numpy()
    order = np.argsort(found)
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    return found[order], place[encoded.indices.to_numpy()]
