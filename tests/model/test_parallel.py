"""The parts that ranks load and work on: together they are the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.model.test_quantization import CPU, save_per_channel, weights
from widebeam.errors import ConfigError
from widebeam.model.config import load_model_config
from widebeam.model.parallel import Shard
from widebeam.model.weights import load_model

SIZE = 2


@pytest.mark.parametrize(
    ("size", "count", "unit"), [(2, 10, 1), (2, 300, 128), (4, 5, 1), (8, 9, 1), (3, 1, 128), (2, 151_936, 128)]
)
def test_parts_cover_all_once(size: int, count: int, unit: int) -> None:
    parts = [Shard(rank, size).part(count, unit) for rank in range(size)]
    covered = [place for part in parts if not part.spare for place in range(part.first, part.first + part.size)]
    assert covered == list(range(count))
    assert all(0 < part.size <= part.room and part.first + part.size <= count for part in parts)


@pytest.mark.parametrize("fp8", [False, True, "stored"], ids=["wide", "quantised at load", "stored as float8"])
@pytest.mark.parametrize(
    ("kind", "more"), [("qwen3", {"attention_bias": True, "tie_word_embeddings": False}), ("qwen2", {})]
)
def test_the_ranks_weights_are_those_of_the_whole(kind: str, more: Any, fp8: Any, tmp_path: Path) -> None:
    """Bit for bit, scales of float8 outputs too; a bias of a sum is the first rank's."""
    folder = tiny.save_checkpoint(tmp_path / "wide", kind=kind, seed=3, **more)
    if fp8 == "stored":
        folder = save_per_channel(folder, tmp_path / "stored")
    config = load_model_config(folder)
    whole = weights(load_model(folder, config, torch.float32, CPU, fp8=fp8 is True))
    shards = [Shard(rank, SIZE) for rank in range(SIZE)]
    parts = [
        weights(load_model(folder, shard.config(config), torch.float32, CPU, fp8=fp8 is True, shard=shard))
        for shard in shards
    ]
    q, kv = config.num_heads * config.head_dim // SIZE, config.num_kv_heads * config.head_dim // SIZE
    pieces = {"qkv_proj": [q, kv, kv], "gate_up_proj": [config.intermediate_size // SIZE] * 2}
    for name, expected in whole.items():
        own = [part[name] for part in parts]
        leaf, _, what = name.rpartition(".")
        leaf = leaf.rpartition(".")[2]
        if leaf in pieces:
            axis = 2 if what == "scale" else 1
            assert torch.equal(expected, fused(own, pieces[leaf], axis)), name
        elif leaf in ("o_proj", "down_proj") and what == "weight":
            assert torch.equal(expected, torch.cat(own, -1)), name
        elif leaf == "o_proj" and what == "bias":
            assert torch.equal(expected, own[0]) and not own[1].any()
        else:
            assert all(torch.equal(expected, part) for part in own), name


def fused(parts: list[Tensor], sizes: list[int], axis: int) -> Tensor:
    """Fused outputs of all ranks, one kind behind the other."""
    pieces = zip(*(part.split(sizes, axis) for part in parts), strict=True)
    return torch.cat([piece for ranks in pieces for piece in ranks], axis)


def test_what_does_not_divide_is_refused(checkpoint: Path) -> None:
    model = load_model_config(checkpoint)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 does not divide the model's num_heads, 4"):
        Shard(size=3).config(model)
    with pytest.raises(ConfigError, match="num_kv_heads, 2"):
        Shard(size=4).config(model)
