"""What the README shows is run as it stands."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
PYTHON = [code for language, code in BLOCKS if language == "python"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, catalog_file: Path) -> Path:
    """A working directory with the files that the README speaks of: model, items.jsonl, catalog.json."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(checkpoint, folder / "model")
    shutil.copy(catalog_file, folder / "items.jsonl")
    shutil.copy(catalog_file.with_name("catalog.json"), folder)
    return folder


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=folder, env=ENVIRONMENT,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_engine_examples(folder: Path) -> None:
    """Each by itself, in one process, which takes seconds to start."""
    examples = [code for code in PYTHON if "Engine" in code]
    each = f"for code in {examples!r}: exec(code, {{'__name__': '__main__'}}); print('---', flush=True)"
    printed = run(each, folder).split("---\n")
    assert len(examples) == len(printed) - 1 == 2
    assert all(re.search(r"-\d+\.\d+", one) for one in printed[:-1]), "no score was printed"


def test_client_example(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = next(code for language, code in BLOCKS if language == "bash" and code.startswith("widebeam serve"))
    server = subprocess.Popen(
        [sys.executable, "-m", *command.split(), "--port", str(port)], cwd=folder,
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}/ready")
        (code,) = [code for code in PYTHON if "Client" in code]
        assert run(code.replace(":8000", f":{port}"), folder).count("Title ") == 3
    finally:
        server.terminate()
        assert server.wait(timeout=30) == 0


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(300):
        assert server.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError("the server never became ready")


def test_header_and_row_are_those_of_the_tests(folder: Path) -> None:
    """The catalog shown has the fields of the one that the examples run on."""
    row, header = (json.loads(code) for language, code in BLOCKS if language == "json")
    assert set(row) == set(json.loads((folder / "items.jsonl").read_text().splitlines()[0]))
    assert header == json.loads((folder / "catalog.json").read_text())


def test_files_named_in_the_documents_exist() -> None:
    for document in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "THREAT_MODEL.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_structure_names_every_source_file() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    missing = [
        path.name for path in sorted((ROOT / "widebeam").rglob("*.py"))
        if not path.name.startswith("__") and f"`{path.name}`" not in text
    ]  # fmt: skip
    assert not missing, f"docs/structure.md does not name {missing}"
