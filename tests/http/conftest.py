"""Engines behind servers, for all tests of this folder: with a catalog, without one, and with catalogs that change."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx

from tests import tiny
from tests.http.hostile import GOOD, unharmed
from tests.http.service import Service, running_service
from tests.http.subject import LIMITS, Subject


@pytest.fixture(scope="session")
def shared_service(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    with running_service(checkpoint, catalog_file) as service:
        yield service


@pytest.fixture(scope="session")
def shared_bare_service(checkpoint: Path) -> Iterator[Service]:
    with running_service(checkpoint, None) as service:
        yield service


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """With a catalog. Afterwards nothing may be left behind in the engine."""
    yield shared_service
    shared_service.check()


@pytest.fixture
def bare_service(shared_bare_service: Service) -> Iterator[Service]:
    """Without a catalog. Afterwards nothing may be left behind in the engine."""
    yield shared_bare_service
    shared_bare_service.check()


@pytest.fixture(scope="session")
def shared_impatient(checkpoint: Path, catalog_file: Path) -> Iterator[Service]:
    limits = {"body_timeout_s": 0.3, "keepalive_timeout_s": 0.5, "max_body_bytes": 10_000}
    with running_service(checkpoint, catalog_file, **limits) as service:
        service.post("/v1/recommend", GOOD)  # what is made once is made now
        yield service


@pytest.fixture
def impatient(shared_impatient: Service) -> Iterator[Service]:
    """With short limits, and a good client that it serves throughout."""
    with unharmed(shared_impatient) as service:
        yield service


@pytest.fixture
def patient(shared_service: Service) -> Iterator[Service]:
    """With the ordinary limits of time and size, and a good client that it serves throughout."""
    with unharmed(shared_service) as service:
        yield service


@pytest.fixture
def sock(impatient: Service) -> Iterator[socket.socket]:
    """A connection to `impatient`."""
    with socket.create_connection(impatient.address, timeout=15) as connection:
        yield connection


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that catalogs may be loaded from, with items.jsonl."""
    folder = tmp_path_factory.mktemp("root")
    tiny.save_catalog(folder / "items.jsonl")
    return folder


@pytest.fixture(scope="module")
def live(checkpoint: Path, root: Path) -> Iterator[Service]:
    """With small limits, and a catalog root."""
    with running_service(checkpoint, root / "items.jsonl", catalog_root=str(root), **LIMITS) as service:
        yield service
        service.check()


@pytest.fixture
def subject(live: Service, root: Path) -> Subject:
    return Subject(live, root)


@pytest.fixture(scope="module", autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """A call from our code that blocks an event loop raises."""
    with blockbuster_ctx("widebeam"):
        yield
