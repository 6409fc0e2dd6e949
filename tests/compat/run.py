"""The benchmark clients of SGLang and vLLM, unchanged, against a real server: none of their requests may fail.

    make compat

Runs in an environment that has WideBeam and requirements.txt. The server has a tiny random checkpoint and a catalog,
and asks for an API key. Exits non-zero if a client fails, or counts a failed request or other tokens than were asked
for, and if the server answered a search with anything but 200.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tiny import LEVELS, save_catalog, save_checkpoint

STUBS = Path(__file__).parent / "stubs"
KEY = "a-key-of-the-compat-run"
REQUESTS, WIDTH, TEXT = 40, 16, 12
SEARCHES = ("/generate", "/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True)
class Case:
    """One run of a client. `tokens` is what it has to count for each request, over all sequences."""

    client: str
    backend: str
    title: str
    body: dict[str, Any]
    length: int
    tokens: int
    flags: tuple[str, ...] = ()


BEAMS = {"n": WIDTH, "beam_width": WIDTH}
WIDE = LEVELS, LEVELS * WIDTH
TEXTS = TEXT, TEXT
CASES = [
    Case("sglang", "sglang", "beams", {"sampling_params": BEAMS}, *WIDE, ("--tokenize-prompt", "--flush-cache")),
    Case("sglang", "sglang", "beams of early forks", {"sampling_params": {"use_beam_search": True, "n": WIDTH}}, *WIDE,
         ("--tokenize-prompt", "--disable-stream", "--return-logprob")),
    Case("sglang", "sglang", "text", {"catalog": "none"}, *TEXTS),
    Case("sglang", "sglang-oai", "beams", BEAMS, LEVELS, LEVELS),  # it cannot read usage, and counts what it asks for
    Case("sglang", "sglang-oai-chat", "beams", BEAMS | {"stream_options": {"include_usage": True}}, *WIDE),
    Case("vllm", "openai", "beams", BEAMS, *WIDE),
    Case("vllm", "openai", "text", {"catalog": "none", "ignore_eos": True}, *TEXTS),
    Case("vllm", "openai-chat", "beams", BEAMS, *WIDE),
]  # fmt: skip


def command(case: Case, url: str, model: Path, result: Path) -> list[str]:
    """The client's command line, as its users write it."""
    if case.client == "sglang":
        return [
            sys.executable, "-m", "sglang.bench_serving", "--backend", case.backend, "--base-url", url,
            "--dataset-name", "random-ids", "--random-input-len", "400", "--random-output-len", str(case.length),
            "--random-range-ratio", "1.0", "--num-prompts", str(REQUESTS), "--max-concurrency", "8", "--disable-tqdm",
            "--extra-request-body", json.dumps(case.body), "--output-file", str(result), "--output-details",
            *case.flags,
        ]  # fmt: skip
    route = "/v1/chat/completions" if case.backend == "openai-chat" else "/v1/completions"
    return [
        str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", case.backend, "--base-url", url,
        "--endpoint", route, "--model", str(model), "--dataset-name", "random", "--random-input-len", "400",
        "--random-output-len", str(case.length), "--num-prompts", str(REQUESTS), "--max-concurrency", "8",
        "--extra-body", json.dumps(case.body), "--save-result", "--save-detailed", "--result-filename", str(result),
        "--disable-tqdm", *case.flags,
    ]  # fmt: skip


def complaints(case: Case, url: str, model: Path, folder: Path) -> list[str]:
    """Run the client; what is wrong with what it reports."""
    result = folder / f"{CASES.index(case)}.json"
    environment = os.environ | {"PYTHONPATH": str(STUBS), "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command(case, url, model, result), cwd=folder, env=environment, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode or not result.exists():
        return [f"status {done.returncode}", *done.stdout.splitlines()[-30:]]
    report = json.loads(result.read_text().splitlines()[-1])
    found = [f"{len(report['errors'])} requests made"] if len(report["errors"]) != REQUESTS else []
    found += sorted({error for error in report["errors"] if error})
    if report["completed"] != REQUESTS or report.get("failed"):
        found.append(f"{report['completed']} completed, {report.get('failed', 'unknown')} failed")
    if set(report["output_lens"]) != {case.tokens}:
        found.append(f"generated {sorted(set(report['output_lens']))} tokens a request, not {case.tokens}")
    return found


@contextmanager
def serving(model: Path, catalog: Path, key_file: Path, log: Path) -> Iterator[str]:
    """URL of a server process."""
    with log.open("w") as stderr:
        server = subprocess.Popen(
            [sys.executable, "-m", "widebeam", "serve", str(model), "--catalog", str(catalog), "--port", "0",
             "--device", "cpu", "--api-key-file", str(key_file)],
            stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if line.startswith("ready on "):
                    yield line.removeprefix("ready on ").strip()
                    break
            else:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
        finally:
            server.terminate()
            status = server.wait(timeout=60)
    if status:
        raise SystemExit(f"the server ended with status {status}:\n{log.read_text()[-3000:]}")


def outcomes(url: str) -> dict[tuple[str, str], int]:
    """Requests so far by route and outcome, as the server counts them."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        text = response.read().decode()
    counts = {}
    for labels, count in re.findall(r"^widebeam_requests_total{(.*)} (\S+)$", text, re.MULTILINE):
        found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        counts[found["route"], found["outcome"]] = int(float(count))
    return counts


def run(folder: Path) -> int:
    model = save_checkpoint(folder / "model", max_position_embeddings=2048)
    catalog = save_catalog(folder / "items.jsonl")
    key_file = folder / "keys"
    key_file.write_text(KEY + "\n")
    key_file.chmod(0o600)
    failed = 0
    with serving(model, catalog, key_file, folder / "server.log") as url:
        for case in CASES:
            found = complaints(case, url, model, folder)
            name = f"{case.client} --backend {case.backend}, {case.title}"
            print(
                f"{name}: {'FAILED' if found else f'{REQUESTS} requests, 0 failed'}", *found, sep="\n    ", flush=True
            )
            failed += bool(found)
        counts = outcomes(url)
    print("\nas the server counts:")
    for (route, outcome), count in sorted(counts.items()):
        print(f"    {route}: {count} {outcome}")
    return int(failed > 0 or any(route in SEARCHES and outcome != "ok" for route, outcome in counts))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(run(Path(temporary)))
