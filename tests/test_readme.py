"""What the README shows is run as it stands, with the example's checkpoint and made-up titles."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "movielens"
sys.path.insert(0, str(EXAMPLE))  # its scripts import each other by their plain names

pytest.importorskip("sklearn")
import catalog  # noqa: E402
from data import Movie  # noqa: E402

from tests.http.service import ask  # noqa: E402
from widebeam.cli import main  # noqa: E402

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
PYTHON = [code for language, code in BLOCKS if language == "python"]
BASH = [code for language, code in BLOCKS if language == "bash"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's root as `make demo` leaves it, with the files that the README speaks of."""
    folder = tmp_path_factory.mktemp("readme")
    data = folder / "examples" / "movielens" / "data"
    data.mkdir(parents=True)
    (data.parent / "checkpoint").symlink_to(EXAMPLE / "checkpoint")
    sids = catalog.read_sids(EXAMPLE / "sids.csv")
    movies = [Movie(item_id, f"Title {item_id}", "1977", ["Drama"]) for item_id in sids]
    max_items = json.loads((EXAMPLE / "metrics.json").read_text())["recipe"]["max_items"]
    catalog.write_catalog(data, movies, sids, max_items)
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
    assert [one.count("Title ") for one in printed[:-1]] == [3, 3]
    assert not re.search(r"Title (50|172)\b", "".join(printed)), "what was seen came back"


def test_generate_example(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = (code for code in BASH if code.startswith("widebeam generate"))
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit):
        main(shlex.split(command.replace("\\\n", ""))[1:])
    assert [item["metadata"].keys() for item in json.loads(capsys.readouterr().out)] == [{"title"}] * 3


def test_server_examples(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (command,) = (code for code in BASH if code.startswith("widebeam serve"))
    (path, body) = next(
        re.findall(r"curl -s localhost:8000(/\S+) -d '(.*)'", code)[0] for code in BASH if "curl" in code
    )
    server = subprocess.Popen(
        [sys.executable, "-m", *command.split(), "--port", str(port)], cwd=folder,
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}/ready")
        (code,) = [code for code in PYTHON if "Client" in code]
        assert run(code.replace(":8000", f":{port}"), folder).count("Title ") == 3
        answer = ask(("127.0.0.1", port), "POST", path, body.encode())
        assert (answer.status, answer.json["warnings"]) == (200, [])  # its items are known
        assert [item["metadata"].keys() for item in answer.json["items"]] == [{"title"}] * 3
        assert not {50, 172} & {item["id"] for item in answer.json["items"]}
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


def test_header_and_row_are_those_of_the_example(folder: Path) -> None:
    row, header = (json.loads(code) for language, code in BLOCKS if language == "json")
    data = folder / "examples" / "movielens" / "data"
    made = {one["item_id"]: one for one in map(json.loads, (data / "movies.jsonl").read_text().splitlines())}
    assert set(row) == set(made[row["item_id"]]) and row["sid"] == made[row["item_id"]]["sid"]
    assert header == json.loads((data / "catalog.json").read_text())


def test_files_named_in_the_documents_exist() -> None:
    for document in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "THREAT_MODEL.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_nothing_is_installed_from_an_index_that_lacks_it() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        assert "widebeam[" not in document.read_text(), f"{document.name}: WideBeam is on no package index"


def test_structure_names_every_source_file() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    missing = [
        path.name for path in sorted((ROOT / "widebeam").rglob("*.py"))
        if not path.name.startswith("__") and f"`{path.name}`" not in text
    ]  # fmt: skip
    assert not missing, f"docs/structure.md does not name {missing}"
