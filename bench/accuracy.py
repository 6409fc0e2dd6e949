"""Does the engine return what it should? Agreement with float32, with Hugging Face and with other servers, and scores.

    python bench/accuracy.py CHECKPOINT --cases 200x8x64 [--enforce-eager] [--quantization fp8] [--save FILE.json]
    python bench/accuracy.py examples/movielens/checkpoint --cases 97x32x64 [--kv-cache-dtype fp8] [--recall 200]

A case is CONTEXTxPROMPTS[xWIDTH[xTOKENS]]. The engine, as the options say, is compared with itself: asked the same
before (`repeated`), in the opposite order, so that prompts had other places in their waves (`other places`), and one
prompt at a time (`alone`); without compiled functions and graphs, where it has them (`eager`: by the time of the
answers that are compared, graphs replay; on a CPU and with --enforce-eager there is nothing to compare, and the row
says so); without float8 projections or pages if it has any. Then with itself in float32 and plain PyTorch; with a plain
beam search over Hugging Face's network in the same dtype, without any cache; and with --url, an SGLang-compatible
server. Which prompts share a wave is up to time, also where they are repeated. `top1` is the share of prompts with the
same best sequence, `overlap` the mean share of common sequences, `exact_sets` the share of prompts with exactly the
same ones. Every returned score is compared with teacher-forced rescoring in float32.

Prompts are random token ids. With SIDs (--sids; by default sids.csv beside the checkpoint, as in the MovieLens example)
or a parquet --catalog of token ids, they are histories of random items, and only items are legal.

--recall also finds the last movie of so many users of the MovieLens example, by its own checkpoint, with the engine as
the options say, without float8 and in float32: Recall@10 and NDCG@10 at width 64.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from judges import HuggingFace, Rules
from matrix import Case
from peers import DIALECTS, Answer, agreement, ask_all, sampling_params
from report import header, save, table
from transformers import AutoTokenizer

from widebeam import Engine, SearchParams
from widebeam.model.config import load_model_config

HISTORY = "<|history|>"
"""What a prompt of the MovieLens example begins with."""
REFERENCE = {"dtype": "float32", "attention_backend": "torch", "enforce_eager": True}
MOST_TOKENS = 1 << 22
"""Prefix tokens that the Hugging Face judges compute for one case; they leave out a larger one, and say so."""
WAVE_TOKENS = 20_480
ASKED = "asked"
WAYS = ("repeated", "other places", ASKED, "alone")
"""How an engine is asked, one after the other: before what is compared, the same twice, so that it comes from graphs
that were captured, not from what compiles or captures them."""
EAGER_ANYWAY = "not applicable: runs eager anyway"
"""In the place of a comparison with eager."""

Answers = dict[str, list[Answer]]
"""Answers to a case's prompts, by who gave them."""


class Task:
    """What is asked: prompts for each case, and which sequences are legal."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self.folder = Path(arguments.checkpoint)
        vocab_size = load_model_config(self.folder).vocab_size
        beside = self.folder.resolve().parent / "sids.csv"
        start: list[int] = []
        sids: np.ndarray | None = None
        self.catalog: Path | None = arguments.catalog
        if arguments.catalog is not None:
            column = pq.read_table(arguments.catalog, columns=["sid"])["sid"].combine_chunks()
            sids = column.flatten().to_numpy().reshape(len(column), -1)
        elif arguments.sids or beside.exists():
            sids, start = read_sids(arguments.sids or beside, self.folder)
            self.catalog = write_catalog(scratch / "items.parquet", sids)
        self.rules = Rules(sids)
        self.cases = {name: Case.parse(name, arguments.width, arguments.tokens) for name in arguments.cases}
        if sids is not None:
            self.cases = {name: case._replace(tokens=sids.shape[1]) for name, case in self.cases.items()}
        rng = np.random.default_rng(0)
        self.prompts: dict[str, list[list[int]]] = {}
        for name, case in self.cases.items():
            size = (case.requests, case.context - len(start))
            tokens = rng.integers(0, vocab_size, size)
            if sids is not None:
                items = rng.integers(0, len(sids), (case.requests, -(-size[1] // sids.shape[1])))
                tokens = sids[items].reshape(case.requests, -1)[:, -size[1] :]
            self.prompts[name] = [[*start, *row] for row in tokens.tolist()]


def read_sids(path: Path, folder: Path) -> tuple[np.ndarray, list[int]]:
    """Token ids [items, levels] of a table `item_id,a,b,..` of codes, and the tokens that begin a prompt."""
    with path.open(newline="") as file:
        (_, *letters), *rows = csv.reader(file)
    names = [[f"<{letter}_{code}>" for letter, code in zip(letters, codes, strict=True)] for _, *codes in rows]
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    start = [vocabulary[HISTORY]] if HISTORY in vocabulary else []
    return np.array([[vocabulary[name] for name in sid] for sid in names]), start


def write_catalog(path: Path, sids: np.ndarray) -> Path:
    column = pa.FixedSizeListArray.from_arrays(pa.array(sids.ravel()), sids.shape[1])
    pq.write_table(pa.table({"item_id": np.arange(len(sids)), "sid": column}), path)
    return path


async def search(task: Task, settings: dict[str, Any], ways: Sequence[str]) -> dict[str, Answers]:
    """What one engine returns for all prompts of each case, by the way that they are asked, of WAYS."""
    longest = max(case.context + case.tokens for case in task.cases.values())
    found: dict[str, Answers] = {way: {} for way in ways}
    async with Engine(
        str(task.folder), catalog=None if task.catalog is None else str(task.catalog), max_context_len=longest + 1,
        max_wave_tokens=WAVE_TOKENS, max_total_tokens=2 * max(WAVE_TOKENS, longest), max_levels=16,
        warmup="none", **settings,
    ) as engine:  # fmt: skip
        for name, case in task.cases.items():
            params = SearchParams(n=case.width, beam_width=case.width, max_new_tokens=case.tokens, ignore_eos=True)
            for way in ways:
                found[way][name] = await asked_by(way, engine, task.prompts[name], params)
    return found


async def asked_by(way: str, engine: Engine, prompts: list[list[int]], params: SearchParams) -> list[Answer]:
    """One of WAYS; answers in the order of the prompts."""
    if way == "alone":
        results = [await engine.submit(prompt, params) for prompt in prompts]
    else:
        order = -1 if way == "other places" else 1
        results = (await asyncio.gather(*(engine.submit(prompt, params) for prompt in prompts[::order])))[::order]
    return [
        Answer(
            result.timing_ms.total,
            [tuple(sequence.token_ids) for sequence in result.sequences],
            [sequence.score for sequence in result.sequences],
        )
        for result in results
    ]


def searched(task: Task, settings: dict[str, Any], ways: Sequence[str] = (ASKED,)) -> dict[str, Answers]:
    """The same, with the device's memory given back."""
    found = asyncio.run(search(task, settings, ways))
    release()
    return found


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def judged(task: Task, dtype: torch.dtype, device: torch.device) -> Answers:
    """What Hugging Face's network would return, in the cases that are small enough."""
    model = HuggingFace(task.folder, dtype, device)
    answers: Answers = {}
    for name, case in task.cases.items():
        if small(case):
            beams = [model.beams(prompt, case.width, case.tokens, task.rules) for prompt in task.prompts[name]]
            answers[name] = [Answer(0.0, sequences, []) for sequences in beams]
        else:
            print(f"{name}: more than {MOST_TOKENS} tokens for Hugging Face, neither searched nor rescored")
    return answers


def small(case: Case) -> bool:
    return case.context * case.requests * case.width * case.tokens <= MOST_TOKENS


def score_errors(task: Task, answers: Answers, device: torch.device) -> dict[str, dict[str, float]]:
    """How far returned scores are from teacher-forced ones in float32, over all sequences of a case."""
    model = HuggingFace(task.folder, torch.float32, device)
    errors = {}
    for name, given in answers.items():
        if small(task.cases[name]):
            pairs = zip(task.prompts[name], given, strict=True)
            away = [np.subtract(one.scores, model.scores(prompt, one.sequences, task.rules)) for prompt, one in pairs]
            every = np.abs(np.concatenate(away))
            errors[name] = {"p99": float(np.quantile(every, 0.99)), "max": float(every.max()), "sequences": every.size}
    return errors


def run(arguments: argparse.Namespace, task: Task) -> dict[str, Any]:
    """Every comparison of every case."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    automatic = load_model_config(task.folder).dtype if device.type == "cuda" else "float32"
    dtype = automatic if arguments.dtype == "auto" else arguments.dtype
    plain = {"dtype": dtype, "attention_backend": arguments.attention_backend, "enforce_eager": arguments.enforce_eager}
    variants = variants_of(arguments, plain)
    settings = variants[ASKED]
    others = searched(task, settings, WAYS)
    ours = others.pop(ASKED)
    if compiles := device.type == "cuda" and not arguments.enforce_eager:
        others["eager"] = searched(task, settings | {"enforce_eager": True})[ASKED]
    others |= {name: searched(task, variant)[ASKED] for name, variant in variants.items() if name != ASKED}
    others["Hugging Face"] = judged(task, getattr(torch, dtype), device)
    release()
    if arguments.url:
        others["server"] = {name: asked(arguments, task, name) for name in task.cases}
    cases: dict[str, dict[str, Any]] = {}
    for name in task.cases:
        cases[name] = {other: agreement(ours[name], found[name]) for other, found in others.items() if name in found}
        if name in others["Hugging Face"]:
            cases[name]["Hugging Face to float32"] = agreement(others["Hugging Face"][name], others["float32"][name])
        if not compiles:
            cases[name]["eager"] = EAGER_ANYWAY
    for name, errors in score_errors(task, ours, device).items():
        cases[name]["scores"] = errors
    report = header(arguments) | {"dtype": dtype, "cases": cases}
    if arguments.recall:
        report["recall"] = recalls(arguments.recall, variants)
    return report


def variants_of(arguments: argparse.Namespace, plain: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The engine's settings as asked, and those that it is compared with: in float32, and without what is float8."""
    quantized = plain if arguments.quantization is None else plain | {"quantization": arguments.quantization}
    variants = {ASKED: quantized, "float32": REFERENCE}
    if quantized != plain:
        variants["unquantised"] = plain
    if arguments.kv_cache_dtype is not None:
        variants |= {ASKED: quantized | {"kv_cache_dtype": arguments.kv_cache_dtype}, "plain KV": quantized}
    return variants


def recalls(users: int, variants: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How well each variant recommends to users of the MovieLens example."""
    import quality

    quality.data.fetch()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        task = quality.Task.load(Path(scratch), users)
        for name, variant in variants.items():
            (result,) = asyncio.run(quality.measure(task, [quality.Case("fixed", 64)], warmup="none", **variant))
            found[name] = {figure: result[figure] for figure in ("recall@10", "standard_error", "ndcg@10")}
            release()
    return found


def asked(arguments: argparse.Namespace, task: Task, name: str) -> list[Answer]:
    """The server's answers to a case."""
    params = sampling_params(arguments.dialect, task.cases[name].width, task.cases[name].tokens)
    answers, _ = asyncio.run(ask_all(arguments.url, task.prompts[name], params, arguments.concurrency, 600.0))
    if errors := [answer.error for answer in answers if answer.error is not None]:
        print(f"{name}: {len(errors)} of {len(answers)} requests to {arguments.url} failed: {errors[0]}")
    return answers


def markdown(report: dict[str, Any]) -> str:
    """One row for each comparison of each case, and one for the scores."""
    columns = ("prompts", "top1", "overlap", "overlap_min", "exact_sets")
    given, rows, scores = report["arguments"], [], []
    for name, comparisons in report["cases"].items():
        for other, values in comparisons.items():
            if other == "scores":
                scores.append((name, values["sequences"], values["p99"], values["max"]))
            elif values == EAGER_ANYWAY:
                rows.append((name, other, values, *(None for _ in columns[1:])))
            else:
                rows.append((name, other, *((values or {}).get(column) for column in columns)))
    recall = [(name, *values.values()) for name, values in report.get("recall", {}).items()]
    lists = [table([f"{given['recall']} users", "Recall@10", "standard error", "NDCG@10"], recall)] if recall else []
    return "\n".join([
        f"{given['checkpoint']}, {report['dtype']}, quantization {given['quantization']}, "
        f"KV cache {given['kv_cache_dtype']}, eager: {given['enforce_eager']}",
        f"{report['machine']}, {report['date']}", "", table(["case", "compared with", *columns], rows), "",
        table(["case", "sequences", "score error, 99th percentile", "largest"], scores),
        *["" for _ in lists], *lists,
    ])  # fmt: skip


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--cases", nargs="+", default=["200x8x64"])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--sids", type=Path, help="table of SID codes that the checkpoint's tokenizer knows")
    parser.add_argument("--catalog", type=Path, help="parquet file with token ids in the column sid")
    parser.add_argument("--enforce-eager", action="store_true", help="neither compiled functions nor graphs")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", help="as in `widebeam serve`, such as fp8")
    parser.add_argument("--kv-cache-dtype", help="as in `widebeam serve`, such as fp8")
    parser.add_argument("--recall", type=int, metavar="USERS", help="for the MovieLens example's checkpoint")
    parser.add_argument("--url", help="an SGLang-compatible server of the same checkpoint")
    parser.add_argument("--dialect", choices=DIALECTS, default="sglang", help="see peers.py")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time to the server")
    parser.add_argument("--save", type=Path, help="JSON file; its tables go beside it, as .md")
    return parser


if __name__ == "__main__":
    chosen = options().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report = run(chosen, Task(chosen, Path(scratch)))
    print(markdown(report))
    save(chosen.save, report, markdown(report))
