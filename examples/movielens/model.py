"""The recommender: a Qwen3 of about a million weights, and the exact score of every item under it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def new_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, positions: int
) -> Qwen3ForCausalLM:
    """A Qwen3 with tied embeddings and random weights (torch's seed decides them)."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def add_dropout(model: Qwen3ForCausalLM, rate: float) -> list[torch.utils.hooks.RemovableHandle]:
    """Dropout behind the embedding, each attention and each MLP, which Qwen3 itself does not have.

    Active in training mode only; `remove()` the handles to be left with the plain model.
    """

    def drop(module: torch.nn.Module, _: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> object:
        if isinstance(output, tuple):
            return F.dropout(output[0], rate, module.training), *output[1:]
        return F.dropout(output, rate, module.training)

    parts = [model.model.embed_tokens]
    for layer in model.model.layers:
        parts += [layer.self_attn, layer.mlp]
    return [part.register_forward_hook(drop) for part in parts]


class ExactScorer:
    """Log-probability of every item after a prompt, without any search: what a beam of unlimited width would find.

    All SID prefixes of the catalog are appended to the prompt at once. A prefix attends to the prompt and to its own
    ancestors only (a tree-shaped attention mask), so that one forward pass yields the distribution behind every
    prefix. Each level is normalised over the codes that occur at that level, as the engine does by default.
    """

    def __init__(self, token_ids: np.ndarray) -> None:
        """`token_ids`: int [items, levels], the SID of every item in tokens."""
        self.levels = token_ids.shape[1]
        nodes: dict[tuple[int, ...], int] = {}
        for depth in range(1, self.levels):
            for prefix in np.unique(token_ids[:, :depth], axis=0).tolist():
                nodes[tuple(prefix)] = len(nodes)
        self.tokens = torch.tensor([prefix[-1] for prefix in nodes], dtype=torch.long)
        self.depth = torch.tensor([len(prefix) for prefix in nodes], dtype=torch.long)
        self.sees = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
        for prefix, node in nodes.items():
            self.sees[node, [nodes[prefix[:depth]] for depth in range(1, len(prefix) + 1)]] = True
        # position 0 is the end of the prompt, position 1 + node the prefix `node`
        self.read_at = np.array(
            [[0, *(1 + nodes[tuple(sid[:depth])] for depth in range(1, self.levels))] for sid in token_ids.tolist()]
        )
        self.books = [np.unique(token_ids[:, level]) for level in range(self.levels)]
        self.code = np.stack([np.searchsorted(book, token_ids[:, i]) for i, book in enumerate(self.books)], axis=1)

    @torch.inference_mode()
    def __call__(self, model: Qwen3ForCausalLM, prompts: Sequence[list[int]], batch: int = 16) -> np.ndarray:
        """float32 [prompts, items]; prompts of any lengths. Leaves the model in eval mode."""
        model.eval()
        parts = [self._score(model, prompts[start : start + batch]) for start in range(0, len(prompts), batch)]
        return np.concatenate(parts)

    def _score(self, model: Qwen3ForCausalLM, prompts: Sequence[list[int]]) -> np.ndarray:
        longest, nodes = max(map(len, prompts)), len(self.tokens)
        total = longest + nodes
        ids = torch.zeros(len(prompts), total, dtype=torch.long)
        positions = torch.zeros(len(prompts), total, dtype=torch.long)
        mask = torch.eye(total, dtype=torch.bool).repeat(len(prompts), 1, 1, 1)  # padding attends to itself
        ids[:, longest:] = self.tokens
        mask[:, 0, longest:, longest:] = self.sees
        for i, prompt in enumerate(prompts):
            start = longest - len(prompt)
            ids[i, start:longest] = torch.tensor(prompt)
            positions[i, start:longest] = torch.arange(len(prompt))
            positions[i, longest:] = len(prompt) - 1 + self.depth
            mask[i, 0, start:longest, start:longest] = torch.ones(len(prompt), len(prompt), dtype=torch.bool).tril()
            mask[i, 0, longest:, start:longest] = True
        output = model.model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
        logits = model.lm_head(output.last_hidden_state[:, longest - 1 :]).float()
        scores = torch.zeros(len(prompts), len(self.code))
        for level, book in enumerate(self.books):
            logprobs = logits[:, :, torch.from_numpy(book)].log_softmax(dim=-1)
            scores += logprobs[:, self.read_at[:, level], self.code[:, level]]
        return scores.numpy()
