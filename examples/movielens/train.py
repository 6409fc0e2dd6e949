"""Train the demonstration's recommender from scratch: SIDs, weights, tokenizer, metrics. Under ten minutes on 2 cores.

    python examples/movielens/train.py

Writes checkpoint/, sids.csv and metrics.json beside this file.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import baselines
import data
import metrics
import numpy as np
import torch
import torch.nn.functional as F
from catalog import build_tokenizer, read_sids, write_catalog, write_sids
from model import ExactScorer, add_dropout, new_model
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from widebeam.constraints.catalog import Catalog
from widebeam.constraints.sid import build_sids, cooccurrence_embeddings
from widebeam.model.tokenizer import Tokenizer

HERE = Path(__file__).parent
IGNORED = -100
"""Label of a position without a loss."""
POSITIONS = 1024
"""Longest context that the checkpoint declares."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, beside the data."""

    seed: int = 0
    codes: int = 64
    """Codes per level of the SIDs, at 3 levels."""
    embedding_dim: int = 64
    window: int = 5
    """Movies of a history that count as neighbours when co-occurrences are counted."""
    hidden: int = 192
    layers: int = 2
    heads: int = 6
    kv_heads: int = 2
    mlp: int = 640
    max_items: int = 64
    """Newest movies of a history that the model sees, in training and in serving."""
    epochs: int = 16
    batch: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.1
    skip: float = 0.2
    """Movies are left out of a training history at a rate drawn between 0 and this."""
    validations: int = 3
    """How often the model is validated; the last time is at the end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder of checkpoint/, sids.csv and metrics.json")
    parser.add_argument("--pip-args", type=shlex.split, default=[], help="further options of `pip download`")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()  # saving two megabytes needs none beside the training's own
    log = data.load(data.fetch(pip_args=arguments.pip_args))
    result = run(log, Recipe(), arguments.output, data.DATA)
    print(metrics.table(result["test"]))


def run(log: data.Log, recipe: Recipe, output: Path, work: Path) -> dict[str, object]:
    """Build SIDs, train, save the best checkpoint, evaluate what was saved. `work` receives the catalog with titles."""
    started = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    embeddings = cooccurrence_embeddings(log.train(), len(log.movies), recipe.embedding_dim, recipe.window, recipe.seed)
    table = build_sids(embeddings, levels=3, codes=recipe.codes, seed=recipe.seed, unique=True)
    write_sids(output / "sids.csv", log.movies, table)
    tokenizer = build_tokenizer([len(book) for book in table.codebooks])
    path = write_catalog(work, log.movies, read_sids(output / "sids.csv"), recipe.max_items)
    folder = output / "checkpoint"
    tokenizer.save_pretrained(folder)
    prompts = Prompts(log, path, folder)
    validation = fit(log, recipe, prompts, tokenizer, folder)
    minutes = (time.perf_counter() - started) / 60

    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    result: dict[str, object] = {
        "data": "MovieLens-100K, all ratings as views, each user's last movie held out for test, the one before it for "
        "validation",
        "protocol": "the whole catalog is ranked, movies already watched are removed for every method; the model's "
        "scores are exact (every movie scored), from the saved weights in float32",
        "recipe": asdict(recipe),
        "parameters": sum(weight.numel() for weight in saved.parameters()),
        "minutes": round(minutes, 1),
        "validation": validation,
        "test": {"WideBeam model": evaluate(saved, prompts, *log.test()), **baselines.evaluate(log)},
    }
    (output / "metrics.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


class Prompts:
    """Histories to token ids, by the same template and code that the server uses."""

    def __init__(self, log: data.Log, catalog_file: Path, tokenizer_folder: Path) -> None:
        self._tokenizer = Tokenizer(tokenizer_folder)
        self._catalog = Catalog.load(catalog_file, token_id=self._tokenizer.token_id, vocab_size=len(self._tokenizer))
        self._item_ids = np.array([movie.item_id for movie in log.movies])
        rows = [self._catalog.row_of(item_id) for item_id in self._item_ids.tolist()]
        self.token_ids = np.array([self._catalog.token_ids(row) for row in rows])
        """int64 [movies, levels]; the SID of every movie in tokens."""

    def __call__(self, history: np.ndarray) -> list[int]:
        """`history`: rows of the log's movies, oldest first."""
        item_ids = self._item_ids[history].tolist()
        return self._catalog.template.render(self._catalog, item_ids, self._tokenizer.encode, POSITIONS).token_ids


def windows(log: data.Log, recipe: Recipe, rng: np.random.Generator) -> list[list[np.ndarray]]:
    """One epoch of batches of training histories of at most `max_items` movies each, holding every event once.

    The order of events with one time stamp is not known, so it is drawn anew; movies are left out at random; the cuts
    between windows move. Windows of like length share a batch, so that little is padded.
    """
    found: list[np.ndarray] = []
    for history, times in zip(log.train(), log.times, strict=True):
        shuffled = history[np.lexsort((rng.random(len(history)), times[:-2]))]
        kept = shuffled[rng.random(len(history)) >= recipe.skip * rng.random()]
        offset = int(rng.integers(1, recipe.max_items + 1)) if len(kept) > recipe.max_items else recipe.max_items
        found += [part for part in np.split(kept, np.arange(offset, len(kept), recipe.max_items)) if part.size]
    order = np.lexsort((rng.random(len(found)), [len(part) for part in found]))
    starts = rng.permutation(np.arange(0, len(order), recipe.batch))
    return [[found[i] for i in order[start : start + recipe.batch]] for start in starts]


def plan(log: data.Log, recipe: Recipe) -> list[list[np.ndarray]]:
    """The batches of all epochs, one after another."""
    rng = np.random.default_rng(recipe.seed)
    return [batch for _ in range(recipe.epochs) for batch in windows(log, recipe, rng)]


def fit(
    log: data.Log, recipe: Recipe, prompts: Prompts, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> dict[str, float]:
    """Next-token training on whole histories; saves the weights with the best NDCG@10 on the validation events."""
    torch.manual_seed(recipe.seed)
    model = new_model(
        tokenizer,
        hidden=recipe.hidden,
        layers=recipe.layers,
        heads=recipe.heads,
        kv_heads=recipe.kv_heads,
        mlp=recipe.mlp,
        positions=POSITIONS,
    )
    add_dropout(model, recipe.dropout)
    optimizer = _optimizer(model, recipe)
    steps = plan(log, recipe)
    checks = {math.ceil(len(steps) * (i + 1) / recipe.validations) for i in range(recipe.validations)}
    best: dict[str, float] = {}
    with tqdm(steps, desc="training", unit="batch") as bar:
        for number, histories in enumerate(bar, start=1):
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(recipe, number, len(steps))
            loss = _step(model.train(), optimizer, [prompts(history) for history in histories])
            bar.set_postfix(loss=f"{loss:.3f}", val=best.get("ndcg@10", "-"), refresh=False)
            if number in checks:
                found = evaluate(model, prompts, *log.validation())
                if not best or found["ndcg@10"] > best["ndcg@10"]:
                    best = {**found, "epoch": round(number / len(steps) * recipe.epochs)}
                    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    return best


def evaluate(
    model: Qwen3ForCausalLM, prompts: Prompts, histories: Sequence[np.ndarray], targets: np.ndarray
) -> dict[str, float]:
    """Recall@10 and NDCG@10 with the exact score of every movie."""
    scores = ExactScorer(prompts.token_ids)(model, [prompts(history) for history in histories])
    return metrics.summary(metrics.ranks_of(metrics.rankings_of(scores), histories, targets))


def _step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, prompts: list[list[int]]) -> float:
    """One update on the mean cross-entropy of every token behind the prefix; returns it."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)  # on the right
    logits = model(input_ids=ids[:, :-1].clamp(min=0), use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _optimizer(model: Qwen3ForCausalLM, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; norms are not decayed."""
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98))


def _learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to 2%."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return recipe.learning_rate * min(1.0, step / recipe.warmup_steps, max(0.02, cosine))


if __name__ == "__main__":
    main()
