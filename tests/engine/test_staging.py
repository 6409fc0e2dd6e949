"""What waves bring lies where graphs look for it, and graphs are known by where that is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from widebeam.constraints.trie import Masks
from widebeam.engine.staging import Places, Staged, to_device
from widebeam.engine.state import PackedPrompts, fixed_of

CPU = torch.device("cpu")
DEVICES = pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
Shapes = list[tuple[int, ...]]
TYPES = (np.int64, np.int32, np.float64, np.bool_)
shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


def arrays_of(sizes: Shapes, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"array {i}": rng.integers(0, 2, shape).astype(TYPES[i % len(TYPES)]) * (seed + 1)
        for i, shape in enumerate(sizes)
    }


def assert_holds(found: dict[str, Tensor], arrays: dict[str, np.ndarray]) -> None:
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].shape == array.shape and found[name].cpu().numpy().dtype == array.dtype
        assert found[name].is_contiguous() and found[name].tolist() == array.tolist()
        assert found[name].data_ptr() % 16 == 0, "compiled code copies what is not aligned"


@given(shapes, shapes)
def test_the_same_sizes_lie_in_the_same_place(sizes: Shapes, others: Shapes) -> None:
    assume(others != sizes)
    places = Places(CPU)
    first = places.put(arrays_of(sizes, 1))
    assert_holds(first, arrays_of(sizes, 1))
    beside = places.put(arrays_of(others, 2))
    again = places.copy(Staged.of(arrays_of(sizes, 3), CPU))
    assert_holds(again, arrays_of(sizes, 3))
    assert fixed_of(tuple(first.values())) == fixed_of(tuple(again.values()))
    assert_holds(first, arrays_of(sizes, 3))
    assert_holds(beside, arrays_of(others, 2))
    assert_holds(to_device(arrays_of(sizes, 4), CPU), arrays_of(sizes, 4))
    assert_holds(again, arrays_of(sizes, 3))


@given(shapes, shapes, shapes)
def test_what_lies_behind_moves_nothing(sizes: Shapes, one: Shapes, other: Shapes) -> None:
    places, found = Places(CPU), []
    for seed, behind in enumerate((one, other, [], one)):
        arrays = arrays_of(sizes, seed)
        more = {f"behind {name}": array for name, array in arrays_of(behind, seed + 9).items()}
        found.append(places.put(arrays, more))
        assert_holds(found[-1], arrays | more)
    assert len({fixed_of(tuple(views[name] for name in arrays)) for views in found}) == 1
    assert fixed_of(tuple(found[0].values())) == fixed_of(tuple(found[3].values()))


@DEVICES
def test_promises_are_made_of_each_place_once(name: str) -> None:
    places, promised = Places(torch.device(name)), []
    places.put(arrays_of([(3,)], 0))
    places.promise(promised.append)
    views = [places.put(arrays_of([(3,), (2, 2)], seed)) for seed in range(3)]
    assert [view.data_ptr() for view in promised] == [view.data_ptr() for view in views[0].values()]
    zeros = places.zeros("table", (2, 3), np.bool_)
    zeros[1, 2] = True
    assert not places.zeros("table", (2, 3), np.bool_).any() and len(promised) == 3


def prompts(rows: int) -> PackedPrompts:
    return PackedPrompts(*(torch.zeros(size) for size in (rows, 3, 2, 2, 2, (2, 4), ())))


def test_graphs_are_told_apart_by_places_sizes_and_numbers() -> None:
    one = prompts(5)
    masks = Masks(torch.zeros(3), torch.zeros(9), torch.zeros(9))
    same = replace(one)
    keys = [
        fixed_of((given, number, mask))
        for given in (one, prompts(5), replace(one, tokens_T=one.tokens_T[:4]), replace(one, tokens_T=one.tokens_T[1:]))
        for number in (16, 32, "level")
        for mask in (None, masks, masks._replace(words=masks.words[:8]))
    ]
    assert len(set(keys)) == len(keys)
    assert fixed_of((same, 16, masks)) == fixed_of((one, 16, Masks(*masks))) == keys[1]
    one.tokens_T[0] = 7.0
    assert fixed_of((replace(one), 16, masks)) == keys[1], "what lies there is data"
