"""The command line as a user types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from widebeam.catalogs import Inspect, Validate
from widebeam.cli import OPENMP, main
from widebeam.config import ELSEWHERE, Config, EngineConfig, ServerConfig
from widebeam.constraints.assign import Assign
from widebeam.constraints.build import Build
from widebeam.oneshot import Request
from widebeam.plan.command import Plan
from widebeam.reference import document
from widebeam.settings import parse

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Done:
    """What a command printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


def widebeam(*arguments: object, env: dict[str, str] | None = None) -> Done:
    """A process of its own, which takes seconds to import what it needs: for what that makes different."""
    done = subprocess.run(
        [sys.executable, "-m", "widebeam", *map(str, arguments)], cwd=ROOT, text=True, capture_output=True, check=False,
        timeout=100, env=env,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


Command = Callable[..., Done]


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Command:
    """The same in this process."""

    def run(*arguments: object) -> Done:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        return Done(int(caught.value.code or 0), *capfd.readouterr())

    return run


def test_generate_recommends(checkpoint: Path, catalog_file: Path) -> None:
    done = widebeam(
        "generate", checkpoint, "--catalog", catalog_file, "--history", "item-1", "item-2,item-3", "--n", 3,
        "--fields", "title", "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "widebeam: 1 history item is not in the catalog: ['item-2,item-3']\n"
    items = json.loads(done.stdout)
    assert len(items) == 3 and all(item["metadata"]["title"].startswith("Title ") for item in items)
    assert items[0]["score"] >= items[1]["score"] >= items[2]["score"]


def test_generate_without_a_catalog_gives_text(checkpoint: Path, here: Command) -> None:
    done = here("generate", checkpoint, "--prompt", "watched <a_1>", "--n=2", "--max-new-tokens=2", "--device=cpu")
    assert done.returncode == 0, done.stderr
    sequences = json.loads(done.stdout)
    assert [len(s["token_ids"]) for s in sequences] == [2, 2] and sequences[0]["text"]


def test_bad_requests_and_starts_are_one_line(checkpoint: Path, tmp_path: Path, here: Command) -> None:
    done = widebeam("generate", checkpoint, "--input-ids", 9999, "--device", "cpu")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1) and "9999" in done.stderr
    done = widebeam("serve", tmp_path / "nothing", "--port", 0)
    begun, why = done.stderr.splitlines()
    assert done.returncode == 2 and "listening on" in begun and why.startswith("widebeam: ") and "nothing" in why
    done = here("serve")
    assert done.returncode == 2 and "no model" in done.stderr
    done = here("srve")
    assert done.returncode == 2 and "srve" in done.stderr


@pytest.mark.parametrize(
    ("own", "spins"), [({}, False), ({"OMP_WAIT_POLICY": "ACTIVE"}, True), ({"OMP_NUM_THREADS": "2"}, True)]
)
def test_waiting_threads_of_a_server_sleep(own: dict[str, str], spins: bool, tmp_path: Path) -> None:
    """Asked of the OpenMP that torch brings, GNU's, once the server has loaded it."""
    rest = {name: value for name, value in os.environ.items() if name not in OPENMP}
    done = widebeam("serve", tmp_path / "nothing", "--port", 0, env=rest | own | {"OMP_DISPLAY_ENV": "VERBOSE"})
    shown = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if shown is None:
        pytest.skip("torch brings another OpenMP")
    assert (int(shown[1]) > 0) == spins


def test_catalog_inspect_and_validate(checkpoint: Path, catalog_file: Path, tmp_path: Path, here: Command) -> None:
    done = here("catalog", "inspect", catalog_file, "--model", checkpoint)
    assert done.returncode == 0 and "60 under" in done.stdout, done.stderr
    assert here("catalog", "validate", catalog_file).returncode == 0
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"item_id": 1, "sid": [1]}\n{"item_id": 2, "sid": "x"}\n{"item_id": 3}\n')
    done = here("catalog", "validate", bad, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["fine"], found["more"]) == (1, False, 0)
    assert [(one["file"], one["line"]) for one in found["problems"]] == [(str(bad), 2), (str(bad), 3)]
    done = here("catalog", "inspect", bad)
    assert done.returncode == 2 and "bad.jsonl:2" in done.stderr and "bad.jsonl:3" in done.stderr


def test_one_is_no_plural(tmp_path: Path, here: Command) -> None:
    for name, count, words in (("one", 1, "1 item under 1 SID"), ("two", 2, "2 items under 2 SIDs")):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(f'{{"item_id": {i}, "sid": [{i}]}}\n' for i in range(count)))
        assert f"{words}\n" in here("catalog", "validate", file).stdout
    report = here("catalog", "inspect", tmp_path / "one.jsonl").stdout
    assert not re.search(r"\b1 \w+s\b", report.replace("1 bytes", "")), report


def test_a_reader_that_has_seen_enough_gets_no_traceback(catalog_file: Path) -> None:
    """As `| head -1`: the pipe is closed before anything is written."""
    for command in (["--help"], ["catalog", "inspect", str(catalog_file)]):
        process = subprocess.Popen(
            [sys.executable, "-m", "widebeam", *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 1), command
        process.stderr.close()


def test_a_catalog_is_built_and_grows(tmp_path: Path, here: Command) -> None:
    """Every command as a user types it; a bar is shown on a terminal only."""
    vectors = np.random.default_rng(0).normal(size=(90, 6))
    np.save(tmp_path / "items.npy", vectors)
    np.save(tmp_path / "new.npy", vectors[:3])
    arguments = ["--embeddings", tmp_path / "items.npy", "--output", tmp_path / "out", "--levels=2", "--codes=8"]
    done = widebeam("catalog", "build", *arguments, "--balanced", "--dedup")
    assert (done.returncode, done.stderr) == (0, "") and "90 of 6 dimensions" in done.stdout
    file = tmp_path / "out" / "items.parquet"
    report = json.loads(here("catalog", "inspect", file, "--json").stdout)
    assert (report["items"], report["sids"]) == (90, 90) and report["device_bytes"] > 90 * 20
    done = here("catalog", "validate", file)
    assert done.returncode == 0 and "90 items under 90 SIDs" in done.stdout
    assign = ("catalog", "assign", "--codebooks", tmp_path / "out", "--embeddings", tmp_path / "new.npy")
    done = here(*assign)
    assert (done.returncode, done.stdout) == (2, "") and "--ids is needed: new.npy has no ids" in done.stderr
    (tmp_path / "ids.txt").write_text("0\n1\n200\n")
    done = here(*assign, "--ids", tmp_path / "ids.txt")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["item_id"] for row in rows] == [0, 1, 200] and {len(row["sid"]) for row in rows} == {3}


def test_levels_of_too_few_codes_are_warned_of(tmp_path: Path, here: Command) -> None:
    np.save(tmp_path / "items.npy", np.random.default_rng(0).normal(size=(60, 4)))
    build = ("catalog", "build", "--embeddings", tmp_path / "items.npy", "--output")
    done = here(*build, tmp_path / "many", "--codes", 50, "--backend", "scikit-learn")
    books = [level["codes"] for level in json.loads((tmp_path / "many" / "build.json").read_text())["levels"]]
    assert done.returncode == 0 and books[0] == 50 and 50 > books[1] > books[2] > 1
    assert (
        "level 0" not in done.stderr
        and f"level 1 has {books[1]} codes, level 2 has {books[2]} codes in place" in done.stderr
    )
    assert "--codes" in done.stderr and "--levels" in done.stderr
    assert not here(*build, tmp_path / "few", "--codes", 4, "--backend", "scikit-learn").stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage: widebeam catalog"),
        (["buid"], "usage: widebeam catalog"),
        (["inspect"], "no file: widebeam catalog inspect FILE"),
        (["validate", "--json"], "no file: widebeam catalog validate FILE"),
        (["inspect", "x.jsonl", "--hidden-size", "8"], "--hidden-size"),
        (["build", "--embeddings", "x.npy", "--levels", "0"], "levels"),
        (["build", "--embeddings", "x.npy", "--codes", "1"], "codes"),
        (["build", "--embeddings", "no/x.npy"], "cannot read no/x.npy"),
        (["build"], "embeddings"),
        (["assign", "--codebooks", "no", "--embeddings", "x.npy"], "no is no folder of"),
    ],
)  # fmt: skip
def test_bad_catalog_commands_are_told(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["catalog", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_check_names_what_is_missing() -> None:
    done = widebeam("check")
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} >= {"python", "torch", "cpu", "flashinfer", "triton"}
    assert "cpu fp8" in done.stdout and "widebeam[" not in done.stdout
    assert widebeam("check", "--nothing").returncode == 2


def test_check_tells_what_a_model_can_run_in(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from widebeam.check import check
    from widebeam.model import fp8

    capabilities = {0: (9, 0), 1: (8, 0), 2: (7, 5)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(fp8, "_trial", lambda product, device: None)
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in check(str(checkpoint)).splitlines())
    assert str(checkpoint) in rows["model"]
    assert all(rows[f"cpu {name}"].startswith("yes") for name in ("bfloat16", "float16", "float32", "fp8", "fp8 KV"))
    assert rows["cuda:0 bfloat16"].startswith("yes, but attention in plain PyTorch")  # its heads are too small
    assert rows["cuda:0 fp8"].startswith("yes, with bfloat16")
    assert rows["cuda:0 fp8 KV"].startswith("no: FlashInfer")
    assert rows["cuda:1 fp8 KV"].startswith("no: ") and "sm_80" in rows["cuda:1 fp8 KV"]
    assert rows["cuda:1 fp8"].startswith("no: ") and "sm_80" in rows["cuda:1 fp8"]
    assert rows["cuda:2 bfloat16"].startswith("no: ") and rows["cuda:2 float16"].startswith("yes")


def test_help_and_version() -> None:
    import widebeam as package

    assert "serve MODEL" in widebeam("--help").stdout
    assert widebeam("--version").stdout.strip() == package.__version__


def test_help_names_every_setting_of_the_command(here: Command) -> None:
    serve, generate, check = (here(command, "--help") for command in ("serve", "generate", "check"))
    assert (serve.returncode, generate.returncode, check.returncode) == (0, 0, 0)
    flags = [set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)) for text in (serve.stdout, generate.stdout)]
    engine, server, request = (
        {f"--{name.replace('_', '-')}" for name in kind.__struct_fields__}
        for kind in (EngineConfig, ServerConfig, Request)
    )
    assert flags == [engine | server, engine | request]
    for words in ("--config FILE", "WIDEBEAM_MAX_BEAM_WIDTH", "--max-context-len, --max-model-len INT"):
        assert words in serve.stdout
    assert "None" not in serve.stdout and "(1 to 512; default 512)" in serve.stdout
    assert len(check.stdout.splitlines()) > 5


@pytest.mark.parametrize(
    ("command", "kind"),
    [("plan", Plan), ("catalog build", Build), ("catalog assign", Assign), ("catalog inspect FILE", Inspect),
     ("catalog validate FILE", Validate)],
)  # fmt: skip
def test_help_of_flags_alone_reads_as_that_of_settings(
    command: str, kind: type[msgspec.Struct], capsys: pytest.CaptureFixture[str]
) -> None:
    for asked in ("--help", "-h"):
        with pytest.raises(SystemExit) as left:
            main([*command.split(), asked])
        assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: widebeam {command} [flags]\n") and "None" not in text and "|STR" not in text
    shown = re.findall(r"^  --([a-z-]+)", text.partition("\nusage:")[0], re.MULTILINE)
    assert sorted(shown) == sorted(name.replace("_", "-") for name in kind.__struct_fields__)


def test_the_document_of_settings_is_that_of_the_code(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    assert text == document(), "python -m widebeam.reference > docs/settings.md"
    names = [*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__]
    ours, _, others = text.partition("## Flags of vLLM and SGLang")
    assert re.findall(r"^\| `(--[a-z-]+)`", others, re.MULTILINE) == [*ELSEWHERE]
    assert sorted(re.findall(r"^\| `--([a-z-]+)`", ours, re.MULTILINE)) == sorted(n.replace("_", "-") for n in names)
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "example.toml").write_text(example)
    config = parse(Config, ["--config", str(tmp_path / "example.toml")], "widebeam serve", {})
    assert (config.engine.max_beam_width, config.server.log_format) == (256, "json")


def test_one_request_searches_one_catalog(checkpoint: Path, here: Command) -> None:
    done = here("generate", checkpoint, "--catalog", "a", "--catalog", "b", "--history", "x")
    assert done.returncode == 2 and "--catalog once" in done.stderr
