"""Small random checkpoints and catalogs, written in the formats that users have. Everything is seeded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

LEVELS, CODES = 3, 16
WORDS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "[UNK]",
    "system",
    "user",
    "assistant",
    "watched",
    "next",
    "a",
    "b",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def sid_tokens(levels: int = LEVELS, codes: int = CODES) -> list[str]:
    """`<a_0>, <a_1>, .., <b_0>, ..`: the SID tokens in vocabulary order, level by level."""
    return [f"<{'abcdefgh'[level]}_{code}>" for level in range(levels) for code in range(codes)]


def save_tokenizer(folder: Path, levels: int = LEVELS, codes: int = CODES) -> int:
    """A word-level tokenizer with SID tokens and a chat template; returns its vocabulary size."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in sid_tokens(levels, codes)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="[UNK]"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def save_checkpoint(
    folder: Path,
    *,
    kind: str = "qwen3",
    seed: int = 0,
    scale: float = 0.5,
    levels: int = LEVELS,
    codes: int = CODES,
    max_shard_size: str = "5GB",
    **overrides: object,
) -> Path:
    """A random Qwen3 or Qwen2 of a few thousand weights, saved by transformers with tokenizer and chat template.

    `scale` is the spread of the random weights: wide enough that probabilities differ clearly.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = save_tokenizer(folder, levels, codes)
    fields: dict[str, object] = {
        "vocab_size": vocab_size + 5,  # padded, as real checkpoints are
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 0,
    }
    if kind == "qwen3":
        fields["head_dim"] = 16  # not hidden / heads, as in Qwen3 0.6B
    fields |= overrides
    torch.manual_seed(seed)
    if kind == "qwen3":
        model: torch.nn.Module = Qwen3ForCausalLM(Qwen3Config(**fields))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**fields))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, scale)
            if "norm" in name:
                weight.add_(1.0)
    model.save_pretrained(folder, max_shard_size=max_shard_size)  # type: ignore[operator]
    return folder


def save_catalog(
    path: Path, *, num_items: int = 60, first_codes: int = 6, seed: int = 0, levels: int = LEVELS, codes: int = CODES
) -> Path:
    """A JSONL catalog of token-string SIDs with titles, few first codes, some shared SIDs, and a header beside it."""
    rng = np.random.default_rng(seed)
    roots = rng.choice(codes, size=first_codes, replace=False)
    rows = []
    for item in range(num_items):
        sid_codes = [int(rng.choice(roots)), *(int(c) for c in rng.integers(0, codes, levels - 1))]
        if item and item % 10 == 0:  # the SID of the item before: two items under one SID
            sid = rows[-1]["sid"]
        else:
            sid = [f"<{'abcdefgh'[level]}_{code}>" for level, code in enumerate(sid_codes)]
        rows.append({"item_id": f"item-{item}", "sid": sid, "title": f"Title {item}", "popularity": int(item * 7 % 13)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    header = {
        "sid": "tokens",
        "order": {"column": "popularity", "descending": True},
        "template": {"prefix": "watched ", "item": "{sid}", "separator": " ", "suffix": " next", "max_items": 20},
    }
    (path.parent / "catalog.json").write_text(json.dumps(header))
    return path
