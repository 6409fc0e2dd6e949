"""The files that the engine is started with: SID table, tokenizer, and the catalog with titles.

The SID table (item numbers and codes, nothing of MovieLens itself) is shipped beside the weights that were trained on
it. The catalog adds titles, years and genres, and is written at run time.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from data import Movie
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from widebeam.constraints.sid import LEVEL_LETTERS, SidTable, sid_token, sid_tokens

PAD, EOS, UNKNOWN, HISTORY = "<|pad|>", "<|endoftext|>", "<|unknown|>", "<|history|>"
Sids = dict[int, list[str]]
"""Item id to its SID as token strings."""


def write_sids(path: Path, movies: Sequence[Movie], table: SidTable) -> None:
    """CSV with a column of codes per level: `item_id,a,b,c`."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["item_id", *LEVEL_LETTERS[: table.codes.shape[1]]])
        writer.writerows([movie.item_id, *codes] for movie, codes in zip(movies, table.codes.tolist(), strict=True))


def read_sids(path: Path) -> Sids:
    with path.open(newline="") as file:
        _, *rows = csv.reader(file)
    return {int(item): [sid_token(level, int(code)) for level, code in enumerate(codes)] for item, *codes in rows}


def build_tokenizer(codebook_sizes: Sequence[int]) -> PreTrainedTokenizerFast:
    """A vocabulary of four special tokens and one token per code of each level."""
    special = [PAD, EOS, UNKNOWN, HISTORY]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(special)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in sid_tokens(codebook_sizes)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)


def write_catalog(folder: Path, movies: Sequence[Movie], sids: Sids, max_items: int) -> Path:
    """`movies.jsonl` with one movie per line, and its header `catalog.json`, which holds the prompt template."""
    path = folder / "movies.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for movie in movies:
            row = {
                "item_id": movie.item_id,
                "sid": sids[movie.item_id],
                "title": movie.title,
                "year": movie.year,
                "genres": movie.genres,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    template = {"prefix": HISTORY, "item": "{sid}", "separator": "", "suffix": "", "max_items": max_items}
    header = {"sid": "tokens", "template": template}
    (folder / "catalog.json").write_text(json.dumps(header, indent=2) + "\n")
    return path
