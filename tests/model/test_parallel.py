"""The parts that ranks load and work on: together they are the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.model.test_model import prefill_logits
from tests.model.test_quantization import CPU, save_per_channel, weights
from widebeam.engine.kv_scales import choose_scales
from widebeam.errors import ConfigError
from widebeam.model.attention import Plans
from widebeam.model.config import load_model_config
from widebeam.model.parallel import Shard
from widebeam.model.reference import TorchBackend
from widebeam.model.weights import load_model

SIZE = 2


class Meeting:
    """Where ranks that are threads put down what they have, and see what all have."""

    def __init__(self) -> None:
        self._barrier, self._given = threading.Barrier(SIZE, timeout=60), dict[int, Tensor]()

    def of_all(self, rank: int, x: Tensor) -> Tensor:
        self._given[rank] = x
        self._barrier.wait()
        found = torch.stack([self._given[other] for other in range(SIZE)])
        self._barrier.wait()
        return found


@dataclass(frozen=True)
class ThreadShard(Shard):
    """A rank that is a thread of this process."""

    meeting: Meeting | None = None

    def gather(self, x_RX: Tensor) -> Tensor:
        assert self.meeting is not None
        return self.meeting.of_all(self.rank, x_RX)

    def _reduced(self, x: Tensor, how: str) -> Tensor:
        parts = self.gather(x)
        return parts.sum(0) if how == "sum" else parts.amax(0)


def on_all_ranks(function: Callable[[Shard], Any]) -> list[Any]:
    meeting = Meeting()
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: function(ThreadShard(rank, SIZE, meeting=meeting)), range(SIZE)))


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


def test_ranks_round_float8_rows_no_coarser_than_one_process(tmp_path: Path) -> None:
    """The scale of a part of a row is no larger than the row's. Errors of rounding are as good as random: those of
    single networks came out at 0.95 to 1.05 of one process's, so 1.05 is much for the mean of five."""
    ratios = []
    for seed in range(5):
        folder = tiny.save_checkpoint(tmp_path / str(seed), scale=0.3, seed=seed)
        prompts = [torch.randint(0, 60, (length,)).tolist() for length in (33, 1, 200)]
        exact, whole = prefill_logits(folder, prompts), prefill_logits(folder, prompts, fp8=True)
        one, two = on_all_ranks(
            lambda shard, folder=folder, prompts=prompts: prefill_logits(folder, prompts, fp8=True, shard=shard)
        )
        assert torch.equal(one, two) and not torch.equal(one, whole)
        ratios.append(float((one - exact).square().mean() / (whole - exact).square().mean()) ** 0.5)
    assert sum(ratios) / len(ratios) < 1.05, ratios


def test_ranks_choose_one_process_s_scales_for_float8_pages(checkpoint: Path) -> None:
    """Each sees keys and values of its own heads only."""

    def scales(shard: Shard) -> Any:
        config = shard.config(load_model_config(checkpoint))
        model = load_model(checkpoint, config, torch.float32, CPU, shard=shard)
        return choose_scales(model, Plans(TorchBackend(config, 8, 8, torch.float32, CPU)), 300)

    assert on_all_ranks(scales) == [scales(Shard())] * SIZE
