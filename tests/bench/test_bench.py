"""The benchmarks' own arithmetic: verdicts, tables, floors and phases."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import breakdown
import compare
import floor
import kernels
import matrix
import offline
import peers
import pytest
import report
import torch
from random_checkpoint import write_checkpoint
from timing import behind, graph_of

from widebeam.plan.shapes import SHAPES
from widebeam.plan.work import Prompt, Shape, Work, phase_ms

TINY = Shape(hidden=32, layers=3, heads=4, kv_heads=2, head_dim=16, intermediate=48, vocab=64)


def timed(**cases: float) -> dict[str, Any]:
    return {"cases": {name: {"total_ms": ms, "floor": {"total_ms": 1.0}} for name, ms in cases.items()}}


ACCURATE = {
    "cases": {
        "a": {
            "float32": {"prompts": 4, "top1": 1.0, "overlap": 0.9, "overlap_min": 0.8, "exact_sets": 0.25},
            "scores": {"p99": 0.01, "max": 0.02, "sequences": 64},
        }
    },
    "recall": {"asked": {"recall@10": 0.2, "standard_error": 0.01, "ndcg@10": 0.1}},
}


def accurate(**figures: float) -> dict[str, Any]:
    """A report of accuracy.py, as it was but for the figures given."""

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        return {key: changed(value) if isinstance(value, dict) else figures.get(key, value)
                for key, value in part.items()}  # fmt: skip

    return changed(ACCURATE)


@pytest.mark.parametrize(
    ("old", "new", "verdicts", "status"),
    [
        (timed(a=100.0), timed(a=102.9), ["ok"], 0),
        (timed(a=100.0), timed(a=103.1), ["slower"], 1),
        (timed(a=100.0), timed(a=50.0), ["ok"], 0),
        (timed(a=100.0), timed(a=100.0, b=1.0), ["ok", "new"], 0),
        (timed(a=100.0, b=1.0), timed(a=100.0), ["ok", "missing"], 1),
        (timed(a=100.0), {"cases": {"a": {"error": "out of memory"}}}, ["missing"], 1),
        ({"cases": {"a": {"error": "out of memory"}}}, {"cases": {"a": {"error": "out of memory"}}}, ["missing"], 1),
        (timed(), timed(), [], 1),
        (accurate(), accurate(), ["ok"] * 8, 0),
        (accurate(), accurate(overlap=0.91, p99=0.0101, max=0.01), ["ok"] * 8, 0),
        ({"cases": {"a": {"float32": {"top1": 1.0}}}}, {"cases": {"a": {"float32": None}}}, ["missing"], 1),
        ({"cases": ACCURATE["cases"]}, accurate(), ["ok"] * 6 + ["new"] * 2, 0),
        (accurate(), {"cases": ACCURATE["cases"]}, ["ok"] * 6 + ["missing"] * 2, 1),
    ],
)  # fmt: skip
def test_compare_fails_on_what_became_worse(
    old: dict[str, Any], new: dict[str, Any], verdicts: list[str], status: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert [row.verdict for row in compare.compare(old, new)] == verdicts
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, one in zip(files, (old, new), strict=True):
        path.write_text(json.dumps(one))
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, files)])
    assert compare.main() == status
    assert all(verdict in capsys.readouterr().out for verdict in verdicts[:1])


def test_compare_names_what_differs_and_refuses_other_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = timed(a=1.0) | {"arguments": {"width": "64", "catalog": "None"}, "machine": "x"}
    other = timed(a=1.0) | {"arguments": {"width": "256", "catalog": "None", "later": "1"}, "machine": "y"}
    files = {"one": one, "other": other, "load": {"levels": []}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path / "one"), str(tmp_path / "other")])
    assert compare.main() == 0
    out = capsys.readouterr().out
    assert "Not the same option width: 64 and 256." in out and "catalog" not in out and "later" not in out
    assert "Not the same machine: x and y." in out
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path / "one"), str(tmp_path / "load")])
    with pytest.raises(SystemExit):
        compare.main()


@pytest.mark.parametrize(
    ("name", "worse"),
    [("top1", 0.99), ("overlap", 0.8999), ("overlap_min", 0.79), ("exact_sets", 0.24), ("recall@10", 0.1999),
     ("ndcg@10", 0.0999), ("p99", 0.01011), ("max", 0.0203)],
)  # fmt: skip
def test_no_accuracy_figure_may_fall(name: str, worse: float) -> None:
    rows = compare.compare(accurate(), accurate(**{name: worse}))
    assert [row.figure.split(": ")[1] for row in rows if not row.passes] == [name]
    assert all(row.verdict == "less accurate" for row in rows if not row.passes)


def test_overlap_counts_common_sequences_of_the_longer_list() -> None:
    a, b, c = (1, 2), (1, 3), (2, 2)
    assert peers.overlap([a, b], [b, a]) == 1.0
    assert peers.overlap([a, b], [a, c]) == 0.5
    assert peers.overlap([a], [a, b, c, (5, 5)]) == 0.25
    assert peers.overlap([a], []) == 0.0
    assert peers.overlap([], []) == 1.0


def test_agreement_leaves_out_what_failed() -> None:
    good, other = peers.Answer(1.0, [(1,), (2,)], []), peers.Answer(1.0, [(2,), (3,)], [])
    failed = peers.Answer(1.0, [], [], "503")
    alike = peers.agreement([good, good, failed], [good, other, good])
    assert alike == {"prompts": 2, "top1": 0.5, "overlap": 0.75, "overlap_min": 0.5, "exact_sets": 0.5}
    assert peers.agreement([failed], [good]) is None


def offline_report(shape: str | None, catalog: str, quantization: str, width: str = "256") -> dict[str, Any]:
    names = ("total_ms", "p90_ms", "prefill_ms", "prefill_p90_ms", "levels_ms", "levels_p90_ms")
    found = dict(zip(names, (130.0, 131.0, 110.0, 111.0, 20.0, 21.0), strict=True))
    given = {"checkpoint": "build/x", "catalog": catalog, "quantization": quantization, "width": width}
    return {
        "machine": "a GPU", "date": "2026-01-01", "shape": shape, "dtype": "bfloat16", "fallbacks": 0,
        "arguments": given | {"tokens": "3", "repeats": "11"},
        "cases": {
            "5000x4": found | {"floor": {"total_ms": 104.0}, "over_floor": 1.25, "replays": 7.0, "fallbacks": 0,
                               "peak_memory_bytes": 3 << 30},
            "1000x1x5000x3": {"error": "out of memory"},
        },
    }  # fmt: skip


def rows_of(markdown: str) -> dict[str, dict[str, str]]:
    """Cells of the first table by case and column; of two columns of one name, the last."""
    lines = [*itertools.takewhile(bool, markdown[markdown.index("\n| ") + 1 :].splitlines())]
    del lines[1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[1:]}


def test_offline_table_has_aims_and_peers_where_they_compare() -> None:
    rows = rows_of(matrix.markdown(offline_report("qwen3-1.7b", "None", "None")))
    row = rows["5000x4"]
    assert (row["total"], row["prefill"], row["levels"], row["floor"]) == ("130.0", "110.0", "20.00", "104.0")
    assert (row["total / floor"], row["graph replays"], row["fallbacks"]) == ("1.25", "7.00", "0")
    assert row["peak GiB"] == "3.00"
    assert (row["aim (limit)"], row["SID-GR, H200"], row["SID-GR, H100"]) == ("122 (131)", "169.3", "154.2")
    assert rows["1000x1x5000x3"]["total"] == "out of memory"
    row = rows_of(matrix.markdown(offline_report("qwen3-1.7b", "items.parquet", "fp8")))["5000x4"]
    assert (row["aim (limit)"], row["SID-GR, H200"]) == ("88 (96)", "169.3")
    row = rows_of(matrix.markdown(offline_report("qwen3-1.7b", "items.parquet", "None")))["5000x4"]
    assert "aim (limit)" not in row
    row = rows_of(matrix.markdown(offline_report("qwen3-0.6b", "None", "None")))["1000x1x5000x3"]
    assert row["SGLang, H200"] == "158"
    for report_ in (offline_report(None, "None", "None"), offline_report("qwen3-1.7b", "None", "None", width="64")):
        assert not {"aim (limit)", "SID-GR, H200"} & rows_of(matrix.markdown(report_))["5000x4"].keys()


def test_offline_measures_a_matrix_and_writes_both_files(checkpoint: Path, tmp_path: Path) -> None:
    chosen = offline.options("").parse_args(
        [str(checkpoint), "--cases", "20x1", "16x2x8x2", "--width", "4", "--repeats", "2"]
    )
    chosen.floor = True
    made = offline.run(chosen)
    report.save(tmp_path / "made.json", made, matrix.markdown(made))
    read = json.loads((tmp_path / "made.json").read_text())
    assert [case["returned"] for case in read["cases"].values()] == [4, 8]
    assert all(case["fallbacks"] == 0 and case["total_ms"] > 0 for case in read["cases"].values())
    assert all(case["replays"] == 0 for case in read["cases"].values())  # nothing is captured on a CPU
    assert all(case["floor"]["total_ms"] > 0 for case in read["cases"].values())
    assert set(rows_of((tmp_path / "made.md").read_text())) == {"20x1", "16x2x8x2"}


@pytest.mark.gpu
def test_offline_counts_the_graphs_that_a_wave_replays(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3-tiny", tmp_path / "model")
    chosen = offline.options("").parse_args(
        [str(folder), "--cases", "20x1", "16x2x8x4", "9000x3x8x2", "--width", "4", "--repeats", "2"]
    )
    chosen.floor = False
    replays = {name: case["replays"] for name, case in offline.run(chosen)["cases"].items()}
    # two for each group of prompts, a selection for each token with a forward between two, one that packs
    assert replays == {"20x1": 2 + 5 + 1, "16x2x8x4": 2 + 7 + 1, "9000x3x8x2": 2 * 2 + 3 + 1}


def test_offline_compares_policies(checkpoint: Path) -> None:
    policies = ['{"name": "scheduled", "widths": [2, 6, 3]}', '{"name": "diverse", "cap": 1}']
    chosen = offline.options("").parse_args(
        [str(checkpoint), "--cases", "20x2", "--width", "4", "--repeats", "1", "--policy", *policies]
    )
    chosen.floor = False
    returned = {name: case["returned"] for name, case in offline.run(chosen)["cases"].items()}
    assert returned == {"20x2 scheduled": 3, "20x2 diverse": 4}
    with pytest.raises(SystemExit):
        offline.options("").parse_args([str(checkpoint), "--policy", '{"name": 3}'])


def test_a_case_takes_what_it_does_not_say_from_the_options() -> None:
    assert matrix.Case.parse("5000x4") == (5000, 4, 256, 3)
    assert matrix.Case.parse("5000x4", 32, 5) == (5000, 4, 32, 5)
    assert matrix.Case.parse("1000x1x5000", 32, 5) == (1000, 1, 5000, 5)
    assert matrix.Case.parse("1000x1x5000x16", 32, 5) == (1000, 1, 5000, 16)


def test_a_floor_is_the_sum_of_its_parts() -> None:
    found = floor.floor(matrix.Case(context=16, requests=2, width=4, tokens=3), TINY, codes=8)
    parts = found["parts"]
    assert found["total_ms"] == pytest.approx(sum(part["ms"] * part["times"] for part in parts))
    assert found["prefill_ms"] + found["levels_ms"] == pytest.approx(found["total_ms"])
    assert len(found["level_ms"]) == 2
    assert {part["phase"] for part in parts} == {"prefill", "level 1", "level 2"}
    assert {part["times"] for part in parts if part["name"] == "gate_up"} == {TINY.layers - 1, TINY.layers}
    assert found["copy_tb_s"] > 0 and "copy, TB/s" in floor.markdown({"16x2": found})


def test_levels_are_timed_behind_prefill() -> None:
    """Each of their parts anew, although the same were timed alone before."""
    case, ran = matrix.Case(context=16, requests=2, width=4, tokens=2), []
    floor.floor(case, TINY, codes=8)
    with behind(lambda: ran.append(1)):
        first = kernels.product_ms(8, 64, 32)
        assert ran and kernels.product_ms(8, 64, 32) == first
    count = len(ran)
    assert kernels.product_ms(8, 64, 32) == kernels.product_ms(8, 64, 32) and len(ran) == count
    layers = kernels.layers_of(3, TINY.products.values(), 2, 16, TINY.heads, TINY.kv_heads, TINY.head_dim, fp8=False)
    assert layers() is not None
    found = floor.floor(case, TINY, codes=8, behind_prefill=True)
    assert {part["phase"] for part in found["parts"]} == {"prefill", "level 1"} and found["level_ms"][0] > 0


@pytest.mark.gpu
def test_a_graph_holds_what_it_reads() -> None:
    y = torch.zeros(1 << 20, device="cuda")
    replay = graph_of([partial(torch.add, torch.ones_like(y), torch.ones_like(y), out=y)])
    others = [torch.full_like(y, -1.0) for _ in range(4)]
    replay()
    assert bool((y == 2).all()) and len(others) == 4


def test_bytes_between_products_are_those_of_a_fused_layer() -> None:
    _, passes = Work(TINY, kernels).layer(10)
    assert passes == {
        "norm before qkv": 10 * (32 + 32) * 2,  # the residual read, its norm written
        "rotation": 10 * 2 * (64 + 32) * 2,  # q and k read and written
        "norm before gate_up": 10 * (32 + 32) * 2,
        "activation": 10 * (48 + 48 + 48) * 2,  # gate and up read, their product written
    }


class NoTime:
    """A timer to which everything takes as many ms as bytes, or none; products in float8 are the faster ones."""

    def copy_ms(self, nbytes: int) -> float:
        return float(nbytes)

    def fp8_product_ms(self, rows: int, n: int, k: int) -> float:
        return -1.0

    def product_ms(self, *sizes: int) -> float:
        return 0.0

    head_ms = prefill_attention_ms = context_attention_ms = product_ms


def test_bytes_of_float8_and_of_a_wave() -> None:
    _, passes = Work(TINY, NoTime(), fp8=True).layer(1)
    assert passes == {
        "norm before qkv": 32 * 3, "rotation": 2 * 96 * 2, "norm before gate_up": 32 * 3, "activation": 48 * 5,
        "float8 for o": 64 * 3,
    }  # fmt: skip
    parts = Work(TINY, NoTime(), codes=8).wave([Prompt(10)] * 2, width=4, tokens=3)
    layer = 2 * (2 * 64 + 2 * 96 + 3 * 48)
    last = 20 * (2 * 32 + 2 * 32) * 2  # the norm, and k rotated
    beams = [level * 2 * 32 * 2 for level in (1, 2)]
    assert phase_ms(parts) == {
        "prefill": 2 * 20 * layer + last + 2 * 8 * 4,
        **{f"level {n + 1}": 3 * 8 * (layer + own) + 8 * 8 * 4 for n, own in enumerate(beams)},
    }


def test_the_profiled_prefill_is_over_the_floor() -> None:
    """Pointwise kernels of 5000 x 4 in bf16 (bench/results/2026-11-30-h200-breakdown-bf16.md) took 9.54 ms."""
    passes = Work(Shape.of(SHAPES["qwen3-1.7b"]), NoTime()).layer(20_000)[1]
    assert 0.8 * 9.54 < 27 * sum(passes.values()) / 4.17e9 < 9.54


def test_copies_of_all_sizes_are_timed() -> None:
    """Less than a number, a few, and more than is ever copied at once."""
    assert all(kernels.copy_ms(nbytes) > 0 for nbytes in (1, 1000, 8 * kernels.COPY_BYTES))


def test_a_report_knows_no_paths_of_its_machine() -> None:
    given = {
        "checkpoint": "/a/b/model/", "serve": ["--catalog", "x=/a/y.parquet", "z=rel/z.parquet"], "cases": ["5x4"],
        "url": "http://127.0.0.1:80/x", "catalog": Path("/a/b.parquet"), "save": Path("/a/c.json"),
    }  # fmt: skip
    found = report.header(argparse.Namespace(**given))["arguments"]
    assert found == {
        "checkpoint": "model", "serve": "['--catalog', 'x=y.parquet', 'z=rel/z.parquet']", "cases": "['5x4']",
        "url": "http://127.0.0.1:80/x", "catalog": "b.parquet",
    }  # fmt: skip


def event(name: str, cat: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": 1, "args": args}


def test_a_kernel_belongs_to_the_phase_that_launched_it() -> None:
    """The host is ahead: it has launched the levels, as one graph, while prefill still runs."""
    trace = [
        *(event(breakdown.MARK, "user_annotation", ts, 1) for ts in (0, 20, 40)),
        event("cudaLaunchKernel", "cuda_runtime", 5, 1, 1),
        event("cudaGraphLaunch", "cuda_runtime", 25, 1, 2),
        event("cudaMemcpyAsync", "cuda_runtime", 45, 1, 3),
        event("nvjet_tst_128x256", "kernel", 1000, 500, 1),
        event("flashinfer::PrefillWithKVCacheKernel<cutlass>", "kernel", 1500, 100, 1),
        event("nvjet_tst_64x64", "kernel", 1700, 100, 2),
        event("triton_poi_fused_cos_mul_select_sin_unsqueeze_2", "kernel", 1750, 150, 2),  # to select is a view
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "kernel", 1900, 40, 2),
        event("void at::native::bitonicSort", "kernel", 2000, 50, 2),
        event("Memcpy DtoH", "gpu_memcpy", 2050, 10, 3),
        event("mystery", "kernel", 2060, 40, 3),
    ]
    phases = breakdown.split(breakdown.kernels_of({"traceEvents": trace}))
    used = {phase: {kind: ms for kind, ms in kinds.items() if ms} for phase, kinds in phases.items()}
    assert used == {
        "prefill": {"GEMM": 0.5, "attention": 0.1, "span": 0.6},
        "levels": {
            "collectives": 0.04, "GEMM": 0.1, "pointwise": 0.15, "selection": 0.05, "gaps": pytest.approx(0.16),
            "span": pytest.approx(0.45),
        },
        "collect": {"copies": 0.01, "other": 0.04, "span": pytest.approx(0.05)},
    }  # fmt: skip


def test_a_wave_is_broken_down(checkpoint: Path) -> None:
    chosen = offline.options("").parse_args([str(checkpoint), "--cases", "16x2x8"])
    bench = offline.prepare(chosen)
    found = breakdown.breakdown(bench.runtime, bench.waves["16x2x8"][1], 1)
    assert set(found["phases"]) == {"prefill", "levels", "collect"}
    assert found["phases"]["levels"]["GEMM"] > 0
    assert "| levels" in breakdown.markdown({"16x2x8": found})
