"""After every engine of a test: nothing may be held when it is left. Threads of tiny waves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.warm_waves import pretending
from widebeam import Engine


@pytest.fixture(autouse=True, scope="session")
def engines_leave_nothing_behind() -> Iterator[None]:
    """Each `async with Engine(..)` ends with an integrity check, while its GPU thread still lives."""
    leave = Engine.__aexit__

    async def checked(engine: Engine, *error: Any) -> None:
        try:
            if engine.state in ("ready", "draining"):
                await engine.check_integrity()
        finally:
            await leave(engine, *error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__aexit__", checked)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For hundreds of tiny waves, in which threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
async def engine(request: pytest.FixtureRequest, checkpoint: Path, catalog_file: Path) -> AsyncIterator[Engine]:
    """Over the tiny model and its catalog, in float32; wide enough for beams that hold everything. A file that
    parametrizes it indirectly says on which device.

    On a GPU it runs as served, but uncompiled: FlashInfer has no float32 kernels, and attention in plain PyTorch is in
    no graph. That compiled functions give what these do, in float32 too, is for test_compiled_level.
    """
    async with Engine(
        str(checkpoint), catalog=str(catalog_file), device=getattr(request, "param", "cpu"), dtype="float32",
        max_wave_rows=512, max_beam_width=256, max_total_tokens=20_480, warmup="none",
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Runtimes warm up as on a GPU, with functions that run as they are."""
    with pretending(lambda function: function):
        yield
