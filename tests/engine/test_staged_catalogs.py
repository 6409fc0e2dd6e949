"""Two-phase changes of a catalog: what is staged is nobody's until it is committed, and then everybody's at once."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from widebeam import Engine
from widebeam.constraints.catalog import Catalog
from widebeam.engine.request import SearchParams
from widebeam.errors import CatalogError, Conflict

Write = Callable[..., Path]
NUMBERS = count()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A file of the first items, and a header with a version if one is given."""
    lines = tiny.save_catalog(tmp_path / "all.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "catalog.json").unlink()

    def file(items: int, version: int | None = None) -> Path:
        path = tmp_path / f"{items}-{version}.jsonl"
        path.write_text("".join(lines[:items]))
        if version is not None:
            path.with_suffix(".catalog.json").write_text(json.dumps({"version": version}))
        return path

    return file


@pytest.fixture(scope="module")
async def shared(checkpoint: Path) -> AsyncIterator[Engine]:
    async with Engine(str(checkpoint), device="cpu") as engine:
        yield engine
        await engine.check_integrity()


@dataclass
class Subject:
    """A catalog of its own for a test, at version 3."""

    engine: Engine
    name: str

    async def served(self) -> tuple[int | None, int]:
        """Version and number of sequences of a search that finds all."""
        result = await self.engine.submit([7, 11], SearchParams(n=80, beam_width=80, catalog=self.name))
        return result.catalog_version, len(result.sequences)

    async def stage(self, path: Path, version: int | None = None) -> Catalog:
        return await self.engine.staged.stage(path, self.name, version)

    async def commit(self, version: int) -> Catalog:
        return await self.engine.staged.commit(self.name, version)


@pytest.fixture
async def subject(shared: Engine, write: Write) -> Subject:
    name = f"catalog-{next(NUMBERS)}"
    await shared.load_catalog(write(60, 3), name)
    return Subject(shared, name)


async def test_what_is_staged_is_searched_once_it_is_committed(subject: Subject, write: Write) -> None:
    before, engine = await subject.served(), subject.engine
    staged = await subject.stage(write(20, 5))
    assert (staged.version, staged.num_items) == (5, 20)
    assert await subject.served() == before and before[0] == 3
    assert engine.live.stats.outcomes[subject.name, "staged"] == 1
    for _ in range(2):  # whoever did not hear that it was done may say it again
        assert (await subject.commit(5)).version == 5
        assert await subject.served() == (5, staged.num_sids)
    assert [one.version for one in engine.catalogs.earlier(subject.name)] == [3]
    assert (await engine.live.roll_back(subject.name, 3)).version == 3 and await subject.served() == before


async def test_a_new_name_is_not_there_before_its_commit(shared: Engine, write: Write) -> None:
    await shared.staged.stage(write(20), "other", version=1)
    assert "other" not in shared.catalogs.names()
    await shared.staged.commit("other", 1)
    assert "other" in shared.catalogs.names()


@pytest.mark.parametrize(
    ("wrong", "version", "error", "words"),
    [
        (b'{"item_id": "half', 6, CatalogError, "jsonl:1"),
        (b'{"item_id": 1, "sid": ["<a_1>", "<nothing>", "<c_1>"]}', 6, CatalogError, "no token"),
        (None, 3, Conflict, "is at version 3: 3 is not newer"),
        (None, 2, Conflict, "is at version 3: 2 is not newer"),
        (None, None, Conflict, "not declared"),
    ],
)
async def test_a_stage_that_fails_changes_nothing(
    subject: Subject, write: Write, wrong: bytes | None, version: int | None, error: Any, words: str
) -> None:
    before, path = await subject.served(), write(20)
    if wrong is not None:
        path.write_bytes(wrong)
    with pytest.raises(error, match=words):
        await subject.stage(path, version)
    with pytest.raises(Conflict) as refused:
        await subject.commit(6)
    assert refused.value.code == "not_staged"
    assert await subject.served() == before


async def test_only_what_is_staged_is_committed(subject: Subject, write: Write) -> None:
    """Not what was staged before it, nor what was discarded, nor what another version has overtaken."""
    staged = subject.engine.staged
    await subject.stage(write(20, 5))
    await subject.stage(write(30, 6))
    with pytest.raises(Conflict, match="version 5 of catalog"):
        await subject.commit(5)
    staged.discard(subject.name)
    staged.discard("nothing")
    with pytest.raises(Conflict, match="not staged"):
        await subject.commit(6)
    await subject.stage(write(30, 6))
    await subject.engine.live.load(write(40, 7), subject.name)
    with pytest.raises(Conflict) as overtaken:
        await subject.commit(6)
    assert overtaken.value.code == "version_not_newer"
    assert (await subject.served())[0] == 7
    staged.discard(subject.name)


async def test_what_was_not_committed_leaves_the_device(subject: Subject, write: Write) -> None:
    used = await in_use(subject)
    for version in range(5, 9):
        await subject.stage(write(60, version))
    assert await in_use(subject) > used
    subject.engine.staged.discard(subject.name)
    assert await in_use(subject) == used


async def in_use(subject: Subject) -> int:
    """Bytes on the device, once those that nobody holds are taken back."""
    await asyncio.wrap_future(subject.engine._worker.call(lambda runtime: None))  # it lets go of what it ran before
    gc.collect()
    await asyncio.wrap_future(subject.engine._worker.call(lambda runtime: runtime.core.catalogs.free_dropped()))
    return subject.engine.stats().catalog_bytes_in_use


async def test_a_committed_file_is_watched(subject: Subject, write: Write) -> None:
    files, path = subject.engine.live.loader.files, write(20, 5)
    await subject.stage(path)
    assert files[subject.name][0].given != str(path)
    await subject.commit(5)
    assert files[subject.name][0].given == str(path)
