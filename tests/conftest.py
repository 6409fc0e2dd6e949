"""Fixtures that the whole suite shares."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))  # its scripts have no package
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `from tests import tiny`
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of tiny models threads would mostly wait for each other
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests import tiny

settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")  # a slow machine fails no test
gc.disable()  # until all tests are imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Logs may hold what clients sent, such as a lone surrogate; workers cannot send that."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_collection_finish() -> None:
    """What imports have made stays, and is most of all objects: no collection of garbage need look at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with a tokenizer, as transformers saves it."""
    return tiny.save_checkpoint(tmp_path_factory.mktemp("qwen3"), scale=0.3)


@pytest.fixture(scope="session")
def catalog_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL catalog whose SIDs the checkpoint's tokenizer knows, with a history template."""
    return tiny.save_catalog(tmp_path_factory.mktemp("catalog") / "items.jsonl")


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> Iterator[None]:
    """Engines hold gigabytes, and lie in cycles that collections of their own would meet late."""
    yield
    gc.collect()
