"""The judges of accuracy.py against independent ones, and it and peers.py from end to end on a tiny model."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import accuracy
import compare
import numpy as np
import peers
import pytest
import torch
from judges import HuggingFace, Rules
from random_checkpoint import write_checkpoint

from tests import hf, oracle, tiny
from tests.http.service import running_service

ROOT = Path(__file__).parents[2]


def sids_of(items: int) -> np.ndarray:
    """Token ids of random items; level l owns 16 tokens from 11 + 16 l on, as in tiny's vocabulary."""
    rng = np.random.default_rng(0)
    return rng.integers(0, tiny.CODES, (items, tiny.LEVELS)) + 11 + np.arange(tiny.LEVELS) * tiny.CODES


@pytest.mark.parametrize("items", [None, 40])
def test_the_judge_searches_and_scores_as_the_oracle(items: int | None, checkpoint: Path) -> None:
    prompt, width = [3, 20, 30, 45], 12
    sids = None if items is None else sids_of(items)
    vocab = range(hf.load(checkpoint).config.vocab_size)

    def logprobs(prefix: oracle.Prefix) -> list[float]:
        book = None if sids is None else np.unique(sids[:, len(prefix)]).tolist()
        return hf.normalised(hf.logits(checkpoint, (*prompt, *prefix)), book)

    legal = None if sids is None else set(map(tuple, sids.tolist()))
    expected = oracle.beam_search(logprobs, vocab, (width,) * 3, width, items=legal)
    judge, rules = HuggingFace(checkpoint, torch.float64, torch.device("cpu")), Rules(sids)
    found = judge.beams(prompt, width, 3, rules)
    assert found == [one.tokens for one in expected.found]
    assert judge.scores(prompt, found, rules) == pytest.approx([one.score for one in expected.found], abs=1e-5)


def accuracy_report(arguments: list[str], scratch: Path) -> dict[str, Any]:
    chosen = accuracy.options().parse_args(arguments)
    return accuracy.run(chosen, accuracy.Task(chosen, scratch))


def test_the_engine_is_accurate_on_a_random_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    made = accuracy_report([str(checkpoint), "--cases", "12x2x8x2"], tmp_path)
    found = made["cases"]["12x2x8x2"]
    compared = {"repeated", "other places", "alone", "float32", "Hugging Face", "Hugging Face to float32"}
    assert set(found) == compared | {"eager", "scores"}
    for name in compared:
        assert found[name] == {"prompts": 2, "top1": 1.0, "overlap": 1.0, "overlap_min": 1.0, "exact_sets": 1.0}
    assert found["scores"]["sequences"] == 16 and found["scores"]["max"] < 1e-4
    assert {row.verdict for row in compare.compare(made, made)} == {"ok"}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in accuracy.markdown(made).splitlines()]
    assert ["12x2x8x2", "repeated", "2", *["1.00"] * 4] in rows
    assert ["12x2x8x2", "eager", "not applicable: runs eager anyway", *["-"] * 4] in rows


@pytest.mark.gpu
def test_graphs_are_compared_with_eager(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3-tiny", tmp_path / "model")
    found = accuracy_report([str(folder), "--cases", "50x4x32"], tmp_path)["cases"]["50x4x32"]
    assert all(found[name]["prompts"] == 4 for name in ("eager", *accuracy.WAYS) if name != accuracy.ASKED)
    assert found["eager"]["overlap"] > 0.9 and found["repeated"]["overlap"] > 0.9
    given = accuracy_report([str(folder), "--cases", "50x4x32", "--enforce-eager"], tmp_path)["cases"]["50x4x32"]
    assert given["eager"] == accuracy.EAGER_ANYWAY


def test_float8_pages_are_compared_with_plain_ones(checkpoint: Path, tmp_path: Path) -> None:
    made = accuracy_report([str(checkpoint), "--cases", "12x2x8x2", "--kv-cache-dtype", "fp8"], tmp_path)
    found = made["cases"]["12x2x8x2"]
    assert set(found) == {
        "repeated", "other places", "alone", "eager", "float32", "plain KV", "Hugging Face", "Hugging Face to float32",
        "scores",
    }  # fmt: skip
    assert found["alone"]["overlap"] == 1.0 and found["plain KV"] == found["float32"]
    assert 1e-4 < found["scores"]["max"] < 0.5
    assert "KV cache fp8" in accuracy.markdown(made) and "Recall@10" not in accuracy.markdown(made)
    made["recall"] = {"asked": {"recall@10": 0.25, "standard_error": 0.01, "ndcg@10": 0.125}}
    assert "| asked      | 0.25      | 0.01           | 0.125   |" in accuracy.markdown(made)


def test_what_float8_is_compared_with() -> None:
    def variants(*options: str) -> dict[str, dict[str, str]]:
        return accuracy.variants_of(accuracy.options().parse_args(["x", *options]), {})

    q, kv = {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}
    float32 = {"float32": accuracy.REFERENCE}
    assert variants() == {"asked": {}} | float32
    assert variants("--quantization=fp8") == {"asked": q, "unquantised": {}} | float32
    assert variants("--kv-cache-dtype=fp8") == {"asked": kv, "plain KV": {}} | float32
    both = variants("--quantization=fp8", "--kv-cache-dtype=fp8")
    assert both == {"asked": q | kv, "plain KV": q, "unquantised": {}} | float32


def test_the_engine_is_accurate_on_a_table_of_sids(tmp_path: Path) -> None:
    folder = tiny.save_checkpoint(tmp_path / "checkpoint", scale=0.3)
    codes = sids_of(30) - 11 - np.arange(tiny.LEVELS) * tiny.CODES
    lines = ["item_id,a,b,c", *(",".join(map(str, [item, *sid])) for item, sid in enumerate(codes.tolist()))]
    (tmp_path / "sids.csv").write_text("\n".join(lines) + "\n")
    found = accuracy_report([str(folder), "--cases", "12x2x8"], tmp_path)["cases"]["12x2x8"]
    assert all(values["overlap"] == 1.0 for name, values in found.items() if name not in ("scores", "eager"))
    assert found["scores"]["max"] < 1e-4


def test_two_servers_are_asked_in_their_own_dialects(checkpoint: Path) -> None:
    with running_service(checkpoint, None) as service:
        chosen = argparse.Namespace(
            urls=[service.url, f"{service.url}/"], checkpoint=None, dialects=["sglang", "n"], requests=3,
            context=10, vocab=50, prompts=None, width=4, tokens=2, concurrency=2, warm_up=1, timeout_s=30.0,
        )  # fmt: skip
        made = asyncio.run(peers.run(chosen))
        refused = asyncio.run(peers.ask_all(service.url, [[1, 2]], {"unknown": 1}, 1, 30.0))
    assert [(server["answered"], server["errors"]) for server in made["servers"]] == [(3, 0), (3, 0)]
    assert made["agreement"] == {"prompts": 3, "top1": 1.0, "overlap": 1.0, "overlap_min": 1.0, "exact_sets": 1.0}
    assert refused[0][0].error is not None and refused[0][0].error.startswith("400")
    assert "| p99_ms" in peers.markdown(made)


def test_a_server_of_its_own_is_compared_with_a_peer(checkpoint: Path, tmp_path: Path) -> None:
    saved = tmp_path / "peers.json"
    options = ["--requests", "3", "--context", "10", "--vocab", "50", "--width", "4", "--tokens", "2", "--warm-up", "1"]
    with running_service(checkpoint, None) as service:
        command = [sys.executable, "bench/peers.py", service.url, "--checkpoint", str(checkpoint), *options]
        command += ["--save", str(saved), "--", "--device", "cpu"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=100)
    made = json.loads(saved.read_text())
    assert [server["answered"] for server in made["servers"]] == [3, 3]
    assert made["servers"][0]["url"] != made["servers"][1]["url"] == service.url
    assert made["agreement"]["overlap"] == 1.0


def test_two_servers_are_compared_never_one_or_three() -> None:
    for flags in (["x"], ["x", "y", "z"], ["x", "y", "--checkpoint", "c"], ["x", "y", "--", "--device", "cpu"]):
        with pytest.raises(SystemExit):
            peers.parse(flags)
    assert peers.parse(["x", "--checkpoint", "c", "--", "--device", "cpu"]).serve == ["--device", "cpu"]
