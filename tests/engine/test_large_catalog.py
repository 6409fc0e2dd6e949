"""A million items, three levels of 8192 codes: candidates and beams are those of a plain search in numpy.

The reference knows no tree. It sorts the SIDs as numbers and finds what may follow a prefix between two binary
searches; which items are allowed is a bool for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.engine.table_search import Table, run
from tests.oracle import beam_search
from widebeam.constraints.arena import MASK_BYTES, NODE_BYTES, CatalogArena, DeviceTrie, MaskPool, num_places
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filters import ItemMask
from widebeam.constraints.trie import Masks
from widebeam.engine.scoring import catalog_candidates
from widebeam.engine.selection import rank
from widebeam.engine.staging import Places
from widebeam.engine.wave import Search, narrowed
from widebeam.engine.widths import bound_widths, join_factor

CODES, ITEMS = 8192, 1_000_000
CPU = torch.device("cpu")
Sid = tuple[int, ...]


class Plain:
    """SIDs as ascending numbers, and whether each is allowed."""

    def __init__(self, sids: np.ndarray, allowed: np.ndarray | None = None) -> None:
        numbers = sids.astype(np.int64) @ CODES ** np.arange(3)[::-1]
        order = np.argsort(numbers, kind="stable")
        self.numbers = numbers[order]
        self.allowed = np.ones(len(sids), bool) if allowed is None else allowed[order]

    def children(self, prefix: Sid) -> np.ndarray:
        """Codes, ascending, behind which there is an allowed item."""
        below = CODES ** (3 - len(prefix))
        start = sum(code * CODES ** (2 - level) for level, code in enumerate(prefix))
        first, last = np.searchsorted(self.numbers, [start, start + below])
        return np.unique(self.numbers[first:last][self.allowed[first:last]] % below // (below // CODES))


def lse_of(logits: torch.Tensor) -> torch.Tensor:
    """Summed in float64, as the engine's."""
    most = logits.amax(-1)
    return (most.double() + (logits - most[..., None]).exp().double().sum(-1).log()).float()


@pytest.fixture(scope="module")
def sids() -> np.ndarray:
    """Half of them uniform, half under sixteen first codes."""
    rng = np.random.default_rng(5)
    drawn = rng.integers(0, CODES, (ITEMS, 3)).astype(np.int32)
    drawn[: ITEMS // 2, 0] %= 16
    return drawn


@pytest.fixture(scope="module")
def catalog(sids: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return load(tmp_path_factory.mktemp("large") / "items.parquet", sids)


def load(path: Path, sids: Any) -> Catalog:
    """By way of a file; item i has id i. All levels have the same 8192 tokens, so that codes are token ids."""
    header = b'{"sid": "token_ids", "levels": [%s]}' % b",".join([b'{"first_token_id": 0, "codes": 8192}'] * 3)
    table = pa.table({"item_id": np.arange(len(sids)), "sid": column_of(sids)})
    pq.write_table(table.replace_schema_metadata({b"widebeam": header}), path)
    return Catalog.load(path)


def column_of(sids: Any) -> pa.Array:
    if isinstance(sids, np.ndarray):
        return pa.FixedSizeListArray.from_arrays(pa.array(sids.ravel()), sids.shape[1])
    return pa.array(sids)


def mask_of(catalog: Catalog, allowed: np.ndarray) -> ItemMask:
    return ItemMask.of_rows(catalog.rows_of(np.flatnonzero(allowed).tolist()), catalog.num_items)


@pytest.fixture(scope="module")
def trie(catalog: Catalog) -> DeviceTrie:
    arena = CatalogArena(num_places(catalog) * NODE_BYTES, CPU)
    arena.reserve(catalog)
    arena.upload(catalog)
    return arena.trie(catalog)


def prefixes(sids: np.ndarray, level: int, rows: int, rng: np.random.Generator) -> list[Sid]:
    """Different ones, in random order."""
    some = sids[rng.choice(len(sids), 4 * rows), :level]
    return [tuple(prefix) for prefix in rng.permutation(np.unique(some, axis=0))[:rows].tolist()]


def node_of(catalog: Catalog, prefix: Sid) -> int:
    node, index = 0, catalog.index
    for code in prefix:
        first, last = index.first_child[node : node + 2]
        node = first + int(np.searchsorted(index.code[first:last], code))
        assert index.code[node] == code
    return node


@pytest.mark.parametrize("share", [None, 0.5, 0.001], ids=["all items", "half", "a thousandth"])
@pytest.mark.parametrize(("level", "rows"), [(0, 1), (1, 1), (1, 37), (1, 500), (2, 1024)])
def test_candidates_are_the_children(
    level: int, rows: int, share: float | None, sids: np.ndarray, catalog: Catalog, trie: DeviceTrie
) -> None:
    """All of them, in order, at their scores; and the best of them are those that sorting all finds."""
    rng = np.random.default_rng([level, rows])
    allowed = None if share is None else rng.random(ITEMS) < share
    plain, given = Plain(sids, allowed), prefixes(sids, level, rows, rng)
    R = len(given)
    logits_RC = np.round(rng.normal(0, 2, (R, CODES)).astype(np.float32), 1)  # with ties
    cum_R = -np.round(rng.random(R).astype(np.float32), 1)
    live_R = rng.random(R) < 0.9
    live_R[0] = True
    lse_R = lse_of(torch.from_numpy(logits_RC)).numpy()

    masks, place_R = None, None
    if allowed is not None:
        pool = MaskPool(ItemMask.places_for(ITEMS) * MASK_BYTES, CPU)
        pool.put([mask_of(catalog, allowed)], 0)
        masks, place_R = Masks(torch.zeros(2, dtype=torch.int64), pool.words, pool.before), torch.zeros(R).long()
    model: Any = SimpleNamespace(head_VH=torch.zeros(CODES, 1), logits=lambda hidden, head: hidden)
    found, _ = catalog_candidates(
        model, torch.from_numpy(logits_RC), torch.from_numpy(np.where(live_R, cum_R, -np.inf).astype(np.float32)),
        torch.tensor([node_of(catalog, prefix) for prefix in given]), torch.tensor([0, R]),
        trie.level(level, Places(CPU)), "level",
        catalog.index.widest(level, R) + 5, masks, place_R,
    )  # fmt: skip

    expected: list[tuple[np.float32, int, int]] = []
    for row in np.flatnonzero(live_R).tolist():
        for code in plain.children(given[row]).tolist():
            expected.append((cum_R[row] + (logits_RC[row, code] - lse_R[row]), row, code))
    real = found.score_M > -torch.inf
    assert found.score_M[real].tolist() == [score for score, _, _ in expected]
    assert found.row_M[real].tolist() == [row for _, row, _ in expected]
    assert found.token_M[real].tolist() == [code for _, _, code in expected]

    for width in (1, 100, 2000):
        best = sorted(expected, key=lambda one: (-one[0], one[1], one[2]))[:width]
        ranked = rank(found, torch.tensor([width, 0]), width)
        chosen = [array[ranked.real_P].tolist() for array in (ranked.score_P, ranked.row_P, ranked.token_P)]
        assert list(zip(*chosen, strict=True)) == best


class Repeated(Table):
    """Logits of 8192 tokens for any prefix; coarse values make ties common."""

    def __init__(self, seed: int) -> None:
        super().__init__(CODES, seed)
        self.head_VH = torch.empty(CODES, 0)

    def logits(self, hidden: torch.Tensor, head: torch.Tensor | None = None) -> torch.Tensor:
        return hidden  # every level's codebook is the whole vocabulary


def plain_search(table: Table, plain: Plain, widths: tuple[int, ...]) -> list[tuple[Sid, np.float32]]:
    """Each level sorts every child of every beam."""
    beams: list[tuple[Sid, np.float32]] = [((), np.float32(0))]
    for width in widths:
        scores, parents, codes = [], [], []
        for number, (prefix, cum) in enumerate(beams):
            logits = table.row(prefix)
            children = plain.children(prefix)
            scores.append(cum + (logits - lse_of(logits)).numpy()[children])
            parents.append(np.full(len(children), number))
            codes.append(children)
        score, parent, code = (np.concatenate(arrays) for arrays in (scores, parents, codes))
        best = np.lexsort((code, parent, -score))[:width]
        beams = [((*beams[parent[i]][0], int(code[i])), score[i]) for i in best]
    return beams


def search_of(catalog: Catalog, widths: tuple[int, ...]) -> Search:
    return Search(
        request_id="x", token_ids=np.zeros(1, np.int32), widths=bound_widths(widths, catalog, CODES),
        num_returned=widths[-1], catalog=catalog, normalizer="level", stop_token_ids=(), length_penalty=1.0,
        join=join_factor(catalog, greedy=False, has_stops=False),
    )  # fmt: skip


def test_beams_are_those_of_a_plain_search(sids: np.ndarray, catalog: Catalog) -> None:
    """In one wave: narrow and wide beams, schedules either way, with and without filters."""
    rng = np.random.default_rng(1)
    half = rng.random(ITEMS) < 0.5
    few = np.zeros(ITEMS, bool)
    few[rng.choice(ITEMS, 20, replace=False)] = True
    plans = [((1, 1, 1), None), ((64, 200, 16), None), ((3, 90, 120), half), ((150, 20, 150), None), ((90,) * 3, few)]
    tables = [Repeated(seed) for seed in range(len(plans))]
    searches = [search_of(catalog, widths) for widths, _ in plans]
    masked = [
        search if allowed is None else narrowed(search, mask_of(catalog, allowed))
        for search, (_, allowed) in zip(searches, plans, strict=True)
    ]
    for found, table, (widths, allowed) in zip(run(tables, masked, catalog), tables, plans, strict=True):
        expected = plain_search(table, Plain(sids, allowed), widths)
        assert [(one.tokens, np.float32(one.cum)) for one in found] == expected
        if allowed is few:
            assert len(found) == 20


def adversarial() -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(2)
    wide = np.stack([np.zeros(CODES), np.arange(CODES), rng.integers(0, CODES, CODES)], 1)
    narrow = np.stack([np.arange(1, 4000), rng.integers(0, CODES, 3999), rng.integers(0, CODES, 3999)], 1)
    yield "skewed", np.concatenate([wide, narrow]).astype(np.int32)
    yield "one SID", np.full((5000, 3), 8191, np.int32)
    yield "one item", np.array([[0, 8191, 17]], np.int32)
    yield "a chain at the end", np.concatenate([wide[:300], wide[:1] + [[0, 0, 1]]]).astype(np.int32) % CODES


@pytest.mark.parametrize(("name", "sids"), list(adversarial()), ids=lambda value: value if type(value) is str else "")
def test_adversarial_catalogs(name: str, sids: np.ndarray, tmp_path: Path) -> None:
    catalog, plain = load(tmp_path / "items.parquet", sids), Plain(sids)
    plans = [(40, 300, 64), (200, 7, 90), (1, 1, 1)]
    tables = [Repeated(seed) for seed in range(len(plans))]
    for found, table, widths in zip(
        run(tables, [search_of(catalog, widths) for widths in plans], catalog), tables, plans, strict=True
    ):
        expected = plain_search(table, plain, widths)
        assert [(one.tokens, np.float32(one.cum)) for one in found] == expected
        assert expected


def test_mixed_depths_over_large_codebooks(tmp_path: Path) -> None:
    """Some SIDs go on behind others; the oracle enumerates every candidate."""
    rng = np.random.default_rng(3)
    items = {
        tuple(sid[:length]) for sid, length in zip(rng.integers(0, 9, (900, 3)).tolist(), [1, 2, 3] * 300, strict=True)
    }
    items |= {(8191, int(second)) for second in rng.choice(CODES, 500, replace=False)} | {(8191, 8191, 8191)}
    catalog = load(tmp_path / "items.parquet", [list(sid) for sid in sorted(items)])
    plans = [(5, 40, 64), (300, 300, 300), (1, 2, 1)]
    tables = [Repeated(seed) for seed in range(len(plans))]

    def expected(table: Table, widths: tuple[int, ...]) -> list[tuple[Sid, float, str]]:
        def logprobs(prefix: Sid) -> list[Any]:
            logits = table.row(prefix)
            return list((logits - lse_of(logits)).numpy())

        def final(cum: Any, length: int) -> Any:
            return np.float32(cum) / np.float32(length)

        zero: Any = np.float32(0)
        answer = beam_search(logprobs, range(CODES), widths, widths[-1], items=items, final_score=final, zero=zero)
        return [(one.tokens, one.cum, one.reason) for one in answer.found]

    searches = [search_of(catalog, widths) for widths in plans]
    for found, table, widths in zip(run(tables, searches, catalog), tables, plans, strict=True):
        assert [(one.tokens, np.float32(one.cum), one.reason) for one in found] == expected(table, widths)
