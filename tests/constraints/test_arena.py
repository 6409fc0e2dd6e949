"""The arena gives no place twice and loses none, whoever lets go of a catalog and whenever."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from widebeam.constraints import arena as arena_module
from widebeam.constraints.arena import MASK_BYTES, NODE_BYTES, CatalogArena, MaskPool, num_places
from widebeam.constraints.filters import ItemMask
from widebeam.constraints.index import CatalogIndex
from widebeam.constraints.trie import Masks
from widebeam.engine import staging
from widebeam.engine.scoring import catalog_candidates
from widebeam.engine.staging import Places
from widebeam.errors import CatalogError
from widebeam.model.layers import float32_linear
from widebeam.model.parallel import WHOLE

CPU = torch.device("cpu")
PLACES = 120


class Version:
    """What the arena looks at in a catalog."""

    def __init__(self, seed: int, items: int) -> None:
        codes = np.random.default_rng(seed).integers(0, 5, (items, 2)).astype(np.int32)
        self.name, self.index = f"version {seed}", CatalogIndex.build(codes)[0]
        self.level_token_ids = [np.arange(5), np.arange(3, 8)]


def nodes_of(arena: CatalogArena, version: Any) -> list[np.ndarray]:
    """A version's arrays, as the device holds them."""
    level = arena.trie(version).level(0, Places(CPU))
    base = int(level.base)
    sizes = [num_places(version), *[version.index.num_nodes] * 4]
    return [array[base : base + size].numpy() for array, size in zip(level.nodes, sizes, strict=True)]


def expected(version: Any) -> list[np.ndarray]:
    index = version.index
    return [index.first_child, index.code, index.item_lo, index.item_lo + index.num_terminal, index.item_hi]


class ArenaMachine(RuleBasedStateMachine):
    """Versions come and go, against a plain array of owners."""

    def __init__(self) -> None:
        super().__init__()
        gc.freeze()  # a refusal collects garbage: it need not look at all that tests have made
        self.arena: Any = CatalogArena(PLACES * NODE_BYTES, CPU)
        self.held: list[Version] = []

    def owners(self) -> np.ndarray:
        owned = np.zeros(PLACES, int)
        for version in self.held:
            base = self.arena.trie(version).lease.base
            owned[base : base + num_places(version)] += 1  # type: ignore[arg-type]
        return owned

    @rule(seed=st.integers(0, 10**6), items=st.integers(1, 60))
    def load(self, seed: int, items: int) -> None:
        version, owned = Version(seed, items), self.owners()
        places = num_places(version)  # type: ignore[arg-type]
        if any(not owned[i : i + places].any() for i in range(PLACES - places + 1)):
            self.arena.reserve(version)
            self.arena.upload(version)
            self.held.append(version)
        else:
            with pytest.raises(CatalogError, match=f"{version.name}.*missing.*--catalog-memory-gib"):
                self.arena.reserve(version)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), elsewhere=st.booleans())
    def let_go(self, data: st.DataObject, elsewhere: bool) -> None:
        """On this thread or on another one."""
        gone = [self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))]
        if elsewhere:
            thread = threading.Thread(target=gone.clear)
            thread.start()
            thread.join()

    @invariant()
    def each_version_has_its_nodes(self) -> None:
        assert self.owners().max() <= 1
        for version in self.held:
            for mine, own in zip(nodes_of(self.arena, version), expected(version), strict=True):
                assert np.array_equal(mine, own)

    def teardown(self) -> None:
        self.held.clear()
        gc.collect()
        self.arena.check_integrity()
        assert (self.arena.used, len(self.arena)) == (0, 0)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=30)


def test_long_arrays_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE", 7)
    arena: Any = CatalogArena(500 * NODE_BYTES, CPU)
    versions = [Version(seed, 60) for seed in range(3)]
    for version in versions:
        arena.reserve(version)
    with pytest.raises(RuntimeError, match="not been uploaded"):
        arena.trie(versions[0])
    threads = [threading.Thread(target=arena.upload, args=(version,)) for version in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for version in versions:
        for mine, own in zip(nodes_of(arena, version), expected(version), strict=True):
            assert np.array_equal(mine, own)


def test_a_version_that_only_a_cycle_holds_makes_room() -> None:
    first, second = Version(0, 60), Version(1, 60)
    arena: Any = CatalogArena((num_places(first) + 5) * NODE_BYTES, CPU)  # type: ignore[arg-type]
    arena.reserve(first)
    first.itself = first  # type: ignore[attr-defined]
    gc.disable()
    try:
        del first
        arena.reserve(second)
    finally:
        gc.enable()
    assert len(arena) == 1


def test_masks_count_alike_wherever_they_lie() -> None:
    rng = np.random.default_rng(0)
    masks = [ItemMask.of_bits(rng.integers(0, 2, items).astype(np.uint8)) for items in (64, 200, 1)]
    pool = MaskPool(40 * MASK_BYTES, CPU)
    lease = [pool.acquire(count) for count in (11, sum(mask.places for mask in masks))][1]
    assert lease is not None
    pool.put(masks, lease.base)
    place = lease.base
    for mask in masks:
        lo, hi = np.sort(rng.integers(0, mask.num_items + 1, (2, 300)), axis=0)
        on_device = Masks(torch.tensor([-1]), pool.words, pool.before)
        rows = (torch.from_numpy(lo), torch.from_numpy(hi))
        assert on_device.any_among(torch.full((300,), place), *rows).tolist() == (mask.count(lo, hi) > 0).tolist()
        assert on_device.any_among(torch.full((300,), -1), *rows).all()
        place += mask.places
    with pytest.raises(CatalogError, match="--filter-memory-gib"):
        pool.check_room(SimpleNamespace(name="x", num_items=64 * 40))  # type: ignore[arg-type]
    pool.check_room(SimpleNamespace(name="x", num_items=64 * 39))  # type: ignore[arg-type]


@pytest.mark.parametrize("normalizer", ["level", "legal", "vocab"])
def test_padding_of_a_codebook_changes_no_bit(normalizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the codebook as it is; what fills it up are tokens of high logits."""
    rng, vocab_size, rows = np.random.default_rng(1), 400, 9
    version = Version(3, 20)
    version.level_token_ids = [np.arange(200, 205), np.arange(230, 400, 7)[:23]]
    head_VH = torch.eye(vocab_size)
    model: Any = SimpleNamespace(
        head_VH=head_VH,
        shard=WHOLE,
        logits=lambda hidden, head=None: float32_linear(hidden, head_VH if head is None else head),
    )
    arena: Any = CatalogArena(1 << 14, CPU)
    arena.reserve(version)
    arena.upload(version)
    hidden_RH = torch.from_numpy(rng.normal(0, 3, (rows, vocab_size))).float()
    hidden_RH[:, 0] = 50.0  # token 0, of the padding
    level = arena.trie(version).level(1, Places(CPU))
    assert (len(level.codebook_C), int(level.num_codes)) == (256, 23)
    node_R = torch.arange(1, 1 + rows) % 5 + 1
    arguments = (torch.zeros(rows), node_R, torch.tensor([0, rows]))
    padded, lse = catalog_candidates(model, hidden_RH, *arguments, level, normalizer, 64)
    exact = level._replace(codebook_C=level.codebook_C[:23])
    bare, bare_lse = catalog_candidates(model, hidden_RH, *arguments, exact, normalizer, 64)
    assert torch.equal(lse, bare_lse)
    for one, two in zip(padded, bare, strict=True):
        assert one is two is None or torch.equal(one, two)
    assert padded.score_M.isfinite().any()


def test_codebooks_are_padded_with_real_tokens() -> None:
    for size in (1, 255, 256, 257, 8192):
        book = arena_module.padded_book(np.arange(5, 5 + size))
        assert len(book) % 256 == 0 and len(book) - size < 256
        assert book[:size].tolist() == list(range(5, 5 + size)) and not book[size:].any()
