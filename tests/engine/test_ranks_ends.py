"""How several ranks end: what goes wrong on one of them is said, and ends all."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import tiny
from widebeam.config import EngineConfig
from widebeam.engine import runtime
from widebeam.engine.engine import Engine
from widebeam.engine.ranks import Place, Ranks
from widebeam.engine.request import SearchParams
from widebeam.engine.spawn import Followers
from widebeam.errors import ConfigError, EngineDead, StartupError

pytestmark = pytest.mark.usefixtures("one_thread", "no_groups_are_left")
SETTINGS: dict[str, Any] = {"device": "cpu", "tensor_parallel_size": 2, "hang_timeout_s": 30.0}


@pytest.fixture
def no_groups_are_left() -> Iterator[None]:
    """A process whose engine has died goes; this one goes on, and torch must number its groups from 0 again."""
    yield
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def statuses(engine: Engine) -> list[int]:
    """Of the other ranks, once they have ended."""
    assert engine._followers is not None
    return [process.wait(20) for process in engine._followers._processes]


async def test_ranks_of_other_weights_do_not_start(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them end, and the first to notice says why: the leader, or a follower through the leader's log."""
    other, start = tiny.save_checkpoint(tmp_path, scale=0.3, seed=1), Followers.start

    def start_with_other(followers: Followers) -> None:
        followers._folder = other
        start(followers)

    monkeypatch.setattr(Followers, "start", start_with_other)
    engine, difference = Engine(str(checkpoint), **SETTINGS), "the ranks differ in the checkpoint's weights"
    with pytest.raises(StartupError) as raised:
        await engine.start()
    assert all(statuses(engine))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert difference in str(raised.value) or f"rank 1: --tensor-parallel-size: {difference}" in said


async def test_a_wave_that_runs_out_of_memory_ends_the_engine(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks run it, and wait for this one."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = Engine(str(checkpoint), **SETTINGS)
    await engine.start()
    params = SearchParams(beam_width=4, max_new_tokens=2, ignore_eos=True)
    assert (await engine.submit([5, 6, 7], params)).sequences
    monkeypatch.setattr(runtime, "launch_wave", full)
    with pytest.raises(EngineDead):
        await engine.submit([5, 6, 7], params)
    assert engine.died.is_set() and engine.state == "dead"
    await engine.stop()
    assert all(statuses(engine))


def test_a_port_that_is_taken(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun would set it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"--tensor-parallel-size: the ranks do not meet: .*in use"):
            Ranks(Place(0, 2, None), EngineConfig(model=str(checkpoint), **SETTINGS), cuda=False)
