"""What legality costs at one level of a search, in this engine and done as two others do it, and what those lose.

"Legality and candidate gathering" is what stands between the logits of a level and its selection: which children the
rows have, their log-probabilities and cumulative scores. Here that is `catalog_candidates` as the engine compiles it,
given logits in the place of a network, and the look-up of those that selection takes. Beside it:

- a dictionary of children for each prefix and a dense mask of rows and vocabulary, filled in Python: NVIDIA's way;
- each row's best 2n codes, of which the legal ones stay: FlashRec's way. What stands further back is lost.

Letters: R rows, C codes of a level, V vocabulary, M candidate slots, P places, K kept codes of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matrix import Case
from offline import make_jobs
from timing import CUDA, DEVICE, distinct, launch_ms
from torch import Tensor

from widebeam.constraints.arena import MASK_BYTES, NODE_BYTES, CatalogArena, DeviceTrie, MaskPool, num_places
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.filters import ItemMask
from widebeam.constraints.trie import Masks, TrieLevel
from widebeam.engine.scoring import catalog_candidates
from widebeam.engine.selection import Candidates, rank
from widebeam.engine.shapes import LevelShape
from widebeam.engine.staging import Places
from widebeam.engine.wave import Wave

SPREAD = 2.0
"""Standard deviation of logits. Random ones know nothing of the catalog: a trained model's are likelier legal."""

PLACES = Places(DEVICE)


class Given:
    """In the place of a network: the hidden states are the logits."""

    head_VH = torch.empty(1 << 18, 1, device=DEVICE)

    @staticmethod
    def logits(hidden: Tensor, head: Tensor) -> Tensor:
        padding = head.shape[0] - hidden.shape[1]
        return F.pad(hidden, (0, padding)) if padding else hidden


def on_device(catalog: Catalog) -> DeviceTrie:
    """The catalog in an arena of its own."""
    arena = CatalogArena(num_places(catalog) * NODE_BYTES, DEVICE)
    arena.reserve(catalog)
    arena.upload(catalog)
    return arena.trie(catalog)


def masks_of(mask: ItemMask, requests: int) -> Masks:
    """On the device, the same one for so many requests."""
    pool = MaskPool(ItemMask.places_for(mask.num_items) * MASK_BYTES, DEVICE)
    pool.put([mask], 0)
    return Masks(torch.zeros(requests + 1, dtype=torch.int64, device=DEVICE), pool.words, pool.before)


class Rows(NamedTuple):
    """The live rows of one request at a level, padded as the engine pads them, with random logits."""

    logits_RC: Tensor
    cum_R: Tensor
    node_R: Tensor
    first_row_B1: Tensor
    limit_B1: Tensor
    order_P: Tensor


def shape_of(catalog: Catalog, level: int, rows: int) -> LevelShape:
    """The sizes that the engine gives the level of a search of that width."""
    (job,) = make_jobs(Case(1, 1, rows, catalog.depth), catalog, 1 << 31)
    return Wave([job.search], max(job.search.rows, 1)).shapes[level]


def random_rows(catalog: Catalog, level: int, rows: int, codes: int, seed: int) -> Rows:
    """Random prefixes of that length; `limit_B1` has their number."""
    shape, index = shape_of(catalog, level, rows), catalog.index
    rng = np.random.default_rng(seed)
    nodes = random_nodes(catalog, level, rows, rng)
    live = len(nodes)
    children = int((index.first_child[nodes + 1] - index.first_child[nodes]).sum())
    node_R, cum_R = np.zeros(shape.rows_in, np.int64), np.full(shape.rows_in, -np.inf, np.float32)
    node_R[:live], cum_R[:live] = nodes, -rng.random(live)
    put = partial(torch.as_tensor, device=DEVICE)
    return Rows(
        logits_RC=SPREAD * torch.randn(shape.rows_in, codes, device=DEVICE),
        cum_R=put(cum_R),
        node_R=put(node_R),
        first_row_B1=put([0] + [live] * shape.requests),
        limit_B1=put([rows] + [0] * shape.requests),
        order_P=put(rng.integers(0, children, shape.ranked)),
    )


def random_nodes(catalog: Catalog, level: int, rows: int, rng: np.random.Generator) -> np.ndarray:
    """So many different nodes of that depth, or all, in random order; among them the one with most children."""
    count = catalog.index.nodes_at(level)
    places = rng.choice(count, min(rows, count), replace=False)
    widest = widest_place(catalog, level)
    if widest not in places:
        places[0] = widest
    return catalog.index.level_start[level] + places


@lru_cache(maxsize=1)
def widest_place(catalog: Catalog, level: int) -> int:
    """Which node of that depth has most children."""
    first, last = catalog.index.level_start[level : level + 2]
    return int(np.diff(catalog.index.first_child[first : last + 1]).argmax())


def gather(
    rows: Rows, trie: TrieLevel, num_slots: int, masks: Masks | None, place_R: Tensor | None
) -> tuple[Tensor, ...]:
    """All that the engine computes before and behind `segment_top`; that itself is replaced by a given order."""
    found, lse_R = _candidates(rows, trie, num_slots, masks, place_R)
    return found.start_B1, found.score_M, lse_R, *(each[rows.order_P] for each in found[1:] if each is not None)


def select(
    rows: Rows, trie: TrieLevel, num_slots: int, masks: Masks | None, place_R: Tensor | None
) -> tuple[Tensor, ...]:
    """The same with selection."""
    found, lse_R = _candidates(rows, trie, num_slots, masks, place_R)
    return lse_R, *rank(found, rows.limit_B1, rows.order_P.shape[0])


def _candidates(
    rows: Rows, trie: TrieLevel, num_slots: int, masks: Masks | None, place_R: Tensor | None
) -> tuple[Candidates, Tensor]:
    model: Any = Given
    return catalog_candidates(
        model, rows.logits_RC, rows.cum_R, rows.node_R, rows.first_row_B1, trie, "level", num_slots, masks, place_R
    )


def top_then_filter(rows: Rows, edge_E: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's best codes, the illegal ones at -inf: (score, node, code), all [R, K]."""
    C = rows.logits_RC.shape[1]
    logprob_RK, code_RK = rows.logits_RC.log_softmax(-1).topk(min(kept, C))
    edge_RK = rows.node_R[:, None] * C + code_RK
    place_RK = torch.searchsorted(edge_E, edge_RK).clamp_max(edge_E.shape[0] - 1)
    score_RK = torch.where(edge_E[place_RK] == edge_RK, rows.cum_R[:, None] + logprob_RK, -torch.inf)
    return score_RK, place_RK + 1, code_RK


def edges(catalog: Catalog, codes: int) -> Tensor:
    """int64, ascending: parent * C + code of each node but the root. Edge e leads to node e + 1, breadth first."""
    index = catalog.index
    parents = np.repeat(np.arange(index.num_nodes), np.diff(index.first_child))
    return torch.from_numpy(parents * codes + index.code[1:]).to(DEVICE)


class DictTrie:
    """A dictionary of children for each prefix, and a mask of rows and vocabulary that Python fills row by row."""

    def __init__(self, sids: np.ndarray, first_tokens: list[int], vocab: int) -> None:
        started = time.perf_counter()
        self.first_tokens, self.vocab = first_tokens, vocab
        self.root: dict[int, Any] = {}
        for sid in sids.tolist():
            node = self.root
            for code in sid:
                node = node.setdefault(code, {})
        self.build_s = time.perf_counter() - started

    def mask(self, prefixes: list[list[int]]) -> Tensor:
        """bool [R, V], True for tokens that may follow."""
        mask_RV = np.zeros((len(prefixes), self.vocab), bool)
        for row, prefix in enumerate(prefixes):
            node = self.root
            for code in prefix:
                node = node[code]
            mask_RV[row, self.first_tokens[len(prefix)] + np.fromiter(node, np.int64, len(node))] = True
        return torch.from_numpy(mask_RV).to(DEVICE)

    def apply_ms(self, prefixes: list[list[int]]) -> float:
        """Median milliseconds from prefixes to masked logits."""
        logits_RV = torch.randn(len(prefixes), self.vocab, device=DEVICE)
        times = []
        for _ in range(3):
            started = time.perf_counter()
            logits_RV.masked_fill(~self.mask(prefixes), -torch.inf)
            if CUDA:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - started) * 1e3)
        return median(times)


def row_sets(catalog: Catalog, level: int, rows: int, codes: int) -> list[Rows]:
    """As many as exceed the device's cache together."""
    return [random_rows(catalog, level, rows, codes, seed) for seed in range(distinct(rows * codes * 4))]


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As the engine compiles it; `launch_ms` captures it."""
    torch.fx.experimental._config.use_duck_shape = False
    return torch.compile(function, fullgraph=True, dynamic=True) if CUDA else function


def level_costs(
    catalog: Catalog, trie: DeviceTrie, level: int, rows: int, codes: int, mask: ItemMask | None = None
) -> dict[str, Any]:
    """Milliseconds of one level's legality and gathering, and with selection; slots, and the children they are for."""
    shape, sets = shape_of(catalog, level, rows), row_sets(catalog, level, rows, codes)
    nodes = sets[0].node_R[sets[0].cum_R > -torch.inf].cpu().numpy()
    masks, place_R = None, None
    if mask is not None:
        masks = masks_of(mask, shape.requests)
        place_R = torch.zeros(shape.rows_in, dtype=torch.int64, device=DEVICE)

    def timed(function: Callable[..., Any]) -> float:
        run = compiled(function)
        return launch_ms(
            [partial(run, one, trie.level(level, PLACES), shape.candidates, masks, place_R) for one in sets]
        )

    return {
        "level": level,
        "rows": rows,
        "slots": shape.candidates,
        "children": int((catalog.index.first_child[nodes + 1] - catalog.index.first_child[nodes]).sum()),
        "gathering_ms": timed(gather),
        "with_selection_ms": timed(select),
    }


def top_then_filter_ms(catalog: Catalog, level: int, rows: int, codes: int, edge_E: Tensor) -> float:
    """Milliseconds of the best 2n codes of each of n rows, and of looking them up."""
    run, sets = compiled(top_then_filter), row_sets(catalog, level, rows, codes)
    return launch_ms([partial(run, one, edge_E, 2 * rows) for one in sets])


def prefixes_of(catalog: Catalog, level: int, rows: int) -> list[list[int]]:
    """Codes of random prefixes of that length."""
    nodes = random_nodes(catalog, level, rows, np.random.default_rng(0))
    return catalog._codes[:level, catalog.index.item_lo[nodes]].T.tolist()


def hashed_logits(prefix_R: Tensor, codes: int) -> Tensor:
    """float32 [R, C], about normal, of each prefix (as a number) and code: whoever asks, and when, gets the same."""
    x = prefix_R[:, None] * codes + torch.arange(codes, device=prefix_R.device)
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, 0x1B03738712FAD5C9), (33, 0x2545F4914F6CDD1D)):
        x = (x ^ (x >> shift)) * factor
    sums = sum((x >> part & 0xFFFF).float() / 65536 for part in (0, 16, 32, 48))
    return SPREAD * (sums - 2) * 3**0.5


def found_by(catalog: Catalog, trie: DeviceTrie, width: int, codes: int, pick: Callable[..., Any]) -> set[int]:
    """SIDs, as numbers, of a whole search of that width whose levels `pick` decides: (score, row, node), best first."""
    prefix_R = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    cum_R, node_R = torch.zeros(1, device=DEVICE), prefix_R
    for level in range(catalog.depth):
        bounds = torch.tensor([0, len(node_R)], device=DEVICE)
        limit = torch.tensor([width, 0], device=DEVICE)
        rows = Rows(hashed_logits(prefix_R, codes), cum_R, node_R, bounds, limit, node_R.new_zeros(width))
        score, row, node = pick(level, rows)
        real = score > -torch.inf
        cum_R, node_R = score[real], node[real]
        prefix_R = prefix_R[row[real]] * codes + trie.level(level, PLACES).code(node_R)
    return set(prefix_R.tolist())


def shares(catalog: Catalog, trie: DeviceTrie, width: int, codes: int, edge_E: Tensor) -> dict[str, Any]:
    """How many results exact search has, and the share of them that others find."""

    def exact(level: int, rows: Rows) -> Iterator[Tensor]:
        slots = catalog.index.widest(level, len(rows.node_R))
        found = rank(_candidates(rows, trie.level(level, PLACES), slots, None, None)[0], rows.limit_B1, width)
        return iter((torch.where(found.real_P, found.score_P, -torch.inf), found.row_P, found.node_P))

    def filtered(level: int, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        score_RK, node_RK, _ = top_then_filter(rows, edge_E, 2 * width)
        best = score_RK.flatten().topk(min(width, score_RK.numel()))
        return best.values, best.indices // score_RK.shape[1], node_RK.flatten()[best.indices]

    wanted, found = (found_by(catalog, trie, width, codes, pick) for pick in (exact, filtered))
    return {"width": width, "exact": len(wanted), "top_then_filter": len(wanted & found) / len(wanted)}
