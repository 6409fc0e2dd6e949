"""`widebeam plan`: memory against the real network's, queues against theory, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from widebeam.cli import main
from widebeam.model.config import load_model_config
from widebeam.model.weights import weight_bytes
from widebeam.plan import estimate
from widebeam.plan.gpus import GPUS, Rates
from widebeam.plan.replica import Job, Limits, Replica, open_loop
from widebeam.plan.shapes import SHAPES
from widebeam.plan.waves import WaveModel, WaveTime
from widebeam.plan.work import Prompt

ROOT = Path(__file__).resolve().parents[2]
ASKED = ["--model", "qwen3-1.7b", "--context", "5000", "--width", "256", "--qps", "100"]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_weights_take_what_the_network_takes(name: str, fp8: bool) -> None:
    real = weight_bytes(SHAPES[name], torch.bfloat16, fp8=fp8)
    assert estimate.weight_bytes(SHAPES[name], fp8=fp8) == pytest.approx(real, rel=1e-5)


def test_only_what_is_new_of_a_prompt_is_computed() -> None:
    waves = WaveModel(SHAPES["qwen3-1.7b"], GPUS["h200"], 256, 3)
    cold, warm = waves.time([Prompt(5000)] * 4), waves.time([Prompt(5000, 4900)] * 4)
    assert warm.prefill < cold.prefill / 8 and warm.levels == cold.levels
    whole, continued = [Prompt(5000)] * 2, [Prompt(5000, 4900)] * 2
    assert warm.prefill < waves.time(whole + continued).prefill < cold.prefill
    apart = waves.work.prefill(whole)[:-2] + waves.work.prefill(continued)[:-2]  # as the engine runs them, then a head
    assert waves.work.prefill([*continued, *whole]) == apart + waves.work.prefill(continued * 2)[-2:]


def test_slower_gpus_and_float8() -> None:
    h200, h100, a100 = (Rates(GPUS[name]) for name in ("h200", "h100", "a100"))
    assert h200.product_ms(5000, 4096, 2048) == h100.product_ms(5000, 4096, 2048) < a100.product_ms(5000, 4096, 2048)
    assert h200.copy_ms(1 << 30) < h100.copy_ms(1 << 30)
    assert h200.fp8_product_ms(5000, 4096, 2048) < h200.product_ms(5000, 4096, 2048)
    assert a100.fp8_product_ms(5000, 4096, 2048) == math.inf


def test_one_replica_waits_as_a_queue_with_fixed_service() -> None:
    """Waves of one: M/D/1, whose mean wait is rho * service / (2 * (1 - rho)) (Pollaczek and Khinchine)."""
    service_s, rho = 0.02, 0.7
    replica = Replica(Limits(1, 10**6, 10**6, 1), lambda prompts: WaveTime(15.0, 5.0))
    latencies = open_loop(replica, rho / service_s, Prompt(100), 100_000)
    assert sum(latencies) / len(latencies) - service_s == pytest.approx(rho * service_s / (2 * (1 - rho)), rel=0.05)


def test_waves_gather_the_oldest_that_fit_when_the_last_has_left_its_prefill() -> None:
    replica = Replica(Limits(3, 1000, 100, 10), lambda prompts: WaveTime(10.0, 5.0, 1.0))
    jobs = [Job(0.0, tokens) for tokens in (2000, 600, 500, 300, 100)]
    for job in jobs:
        replica.add(job)
    assert replica.cut(0.0) == jobs[:1]  # over the limit, so alone
    assert (replica.next_cut, jobs[0].ended) == (pytest.approx(0.010), pytest.approx(0.016))
    assert replica.cut(0.010) == [jobs[1], jobs[3], jobs[4]]  # 500 does not fit, what is behind it does
    assert jobs[1].ended == pytest.approx(0.015 + 0.015 + 0.001)  # behind the first one on the device
    assert replica.queue == [jobs[2]]


def asked(*flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *ASKED, *flags])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_a_plan_as_json_and_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--quantization", "fp8", "--kv-cache-dtype", "fp8", "--items", "1000000", "--users", "1000"]
    _, out, _ = asked("--json", *more, capsys=capsys)
    found: dict[str, Any] = json.loads(out)
    room, fleet = found["memory"], found["speed"]
    assert sum(room["gib"].values()) == pytest.approx(0.9 * GPUS["h200"].memory_gib)
    assert room["host_gib"] == pytest.approx(1000 * room["history_mib"] / 1024)
    assert room["history_mib"] * 2**20 == 2 * 28 * 8 * 128 * 79 * 64  # 79 pages of float8
    assert fleet["full_wave_requests"] == 4 and fleet["closed_by"] == "--max-wave-tokens"
    assert fleet["replicas"] == math.ceil(100 / (0.7 * fleet["requests_per_s"]))
    assert fleet["utilization"] <= 0.7 and fleet["p50_ms"] < fleet["p99_ms"]
    _, bf16, _ = asked("--json", capsys=capsys)
    assert json.loads(bf16)["memory"]["history_mib"] == 2 * room["history_mib"]
    _, out, _ = asked("--gpu", "l40s", "--width", "32", capsys=capsys)
    assert "NOT measured" in out and "requests/s" in out
    assert "the whole vocabulary" in out and "1.25 GiB, which is taken without a catalog, too" in out


def test_a_checkpoint_folder_is_read(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if load_model_config(checkpoint).dtype == "float32":
        code, _, err = asked("--model", str(checkpoint), "--context", "100", capsys=capsys)
        assert code == 2 and "--model" in err and "float32" in err
    code, out, err = asked("--model", str(ROOT / "examples/movielens/checkpoint"), "--context", "100", capsys=capsys)
    assert code == 0 and "movielens" in out, err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "b200"], ["--gpu", "b200", "h200"]),
        (["--gpu", "a100", "--quantization", "fp8"], ["--quantization fp8", "a100"]),
        (["--gpu", "a100", "--kv-cache-dtype", "fp8"], ["--kv-cache-dtype fp8", "a100"]),
        (["--gpu", "l40s", "--model", "qwen3-8b", "--max-wave-rows", "60000"], ["GiB are missing", "--max-wave-rows"]),
        (["--context", "50000"], ["--context 50000", "40960"]),
        (["--context", "5000", "--max-context-len", "5000"], ["--context", "--max-context-len"]),
        (["--width", "5000", "--max-wave-rows", "4096"], ["--width 5000", "--max-wave-rows"]),
        (["--width", "5001"], ["width"]),
        (["--cached", "5000"], ["--cached 5000"]),
        (["--qps", "0"], ["qps"]),
        (["--model", "qwen9"], ["--model qwen9", "qwen3-tiny, qwen3-0.6b", "did you mean 'qwen3-8b'?"]),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_by_its_flag(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = asked(*flags, capsys=capsys)
    assert code == 2 and all(word in err for word in words), err
