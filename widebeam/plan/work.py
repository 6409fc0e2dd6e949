"""What a wave computes and moves, part by part: products, attention and the passes between them that no fusion avoids.

bench/floor.py has the parts timed on a machine, `widebeam plan` by the rates of a GPU. Imports no torch.

Products are whole ones, as of cuBLAS, and attention is FlashInfer's: both read all that they take from memory and leave
there what they give. A pass is then what has to be done to a product's outputs before the next kernel can read them, by
one kernel that reads each element once and writes each once. Not counted, as a product can do it while it writes: to
add to the residual, and to put values in their place among pages. Nor is what a better layout could spare (keys that
are written a second time, so that attention over whole prompts has them in one piece), nor what happens once a wave or
for few rows: embedding, the final norm, scales, positions, page tables.

Letters: B requests, T packed prompt tokens to compute, R rows, H hidden, Q query heads, K key/value heads, D head size,
I MLP size, N layers, C columns of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from widebeam.engine.shapes import rung
from widebeam.model.config import ModelConfig

BF16, FP32 = 2, 4


class Shape(NamedTuple):
    """What of a model decides its speed."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, model: ModelConfig) -> Shape:
        return cls(
            model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim,
            model.intermediate_size, model.vocab_size,
        )  # fmt: skip

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of a layer's four products."""
        H, _, Q, K, D, I, _ = self  # noqa: E741
        return {"qkv": ((Q + 2 * K) * D, H), "o": (H, Q * D), "gate_up": (2 * I, H), "down": (H, I)}


class Prompt(NamedTuple):
    """Tokens of a prompt, and how many of its first ones the prefix cache has."""

    context: int
    cached: int = 0


class Part(NamedTuple):
    """One line of the sum."""

    phase: str
    name: str
    ms: float
    times: int


class Timer(Protocol):
    """Milliseconds of one launch of each kind of work."""

    def product_ms(self, rows: int, n: int, k: int) -> float:
        """[rows, k] x [k, n] in bf16."""

    def fp8_product_ms(self, rows: int, n: int, k: int) -> float:
        """The same from fp8 operands; infinite where it cannot run."""

    def head_ms(self, rows: int, columns: int, hidden: int) -> float:
        """Bf16 operands to float32 logits."""

    def prefill_attention_ms(self, requests: int, context: int, Q: int, K: int, D: int) -> float:
        """Causal attention of whole prompts in one layer."""

    def context_attention_ms(self, requests: int, width: int, context: int, Q: int, K: int, D: int) -> float:
        """`width` rows of each request over its context, in pages, in one layer."""

    def copy_ms(self, nbytes: int) -> float:
        """One pass of a kernel over so many bytes, read and written together."""


class Work:
    """Parts of waves of a model. `codes`: size of a level's codebook; without it the head is the whole vocabulary.

    A product in fp8 is taken where the timer says that it is faster. With `max_rows` a level has as many places as the
    engine would give it (engine/shapes.py), else as many as it has rows.
    """

    def __init__(
        self, shape: Shape, timer: Timer, *, fp8: bool = False, codes: int | None = None, max_rows: int | None = None
    ) -> None:
        self.shape, self.timer, self.fp8, self.max_rows = shape, timer, fp8, max_rows
        self.columns = codes or shape.vocab

    def wave(self, prompts: Sequence[Prompt], width: int, tokens: int) -> list[Part]:
        """Prefill with the head of level 0, then the levels behind it."""
        return self.prefill(prompts) + self.levels(prompts, width, tokens)

    def levels(self, prompts: Sequence[Prompt], width: int, tokens: int) -> list[Part]:
        """All levels behind prefill."""
        B, contexts = len(prompts), sum(prompt.context for prompt in prompts)
        rows = B * min(width, self.columns)
        return [part for level in range(1, tokens) for part in self.level(level, rows, B, contexts // B)]

    def prefill(self, prompts: Sequence[Prompt]) -> list[Part]:
        """Of the prompts without a prefix in the cache, and then of those with one: each kind goes by itself through
        the layers, and all have the head together."""
        kinds = ([prompt for prompt in prompts if (prompt.cached > 0) == found] for found in (False, True))
        layers = [part for alike in kinds if alike for part in self._prompt_layers(alike)]
        return layers + self._head("prefill", len(prompts))

    def _prompt_layers(self, prompts: Sequence[Prompt]) -> list[Part]:
        """All layers but the last over all T tokens; of the last, k and v of all, the rest for the prompts' ends."""
        H, N, Q, K, D, _, _ = self.shape
        B, T = len(prompts), sum(prompt.context - prompt.cached for prompt in prompts)
        mean_context = sum(prompt.context for prompt in prompts) // B
        products, passes = self.layer(T)
        ends, _ = self.layer(B)
        kv_ms, operand = self._product(T, 2 * K * D, H)
        kv_passes = [T * H * (BF16 + operand), T * 2 * K * D * BF16]  # the norm; keys normed and rotated
        # FlashInfer's kernel stands for `row_attention`, which reads the same
        ends_ms = self.timer.context_attention_ms(B, 1, mean_context, Q, K, D)
        return [
            *(Part("prefill", name, ms, N - 1) for name, ms in products.items()),
            Part("prefill", "attention", self._prompt_attention_ms(prompts), N - 1),
            *self._bytes("prefill", passes, N - 1),
            Part("prefill", "last layer: k and v of all", kv_ms, 1),
            Part("prefill", "last layer: bytes", sum(map(self.timer.copy_ms, kv_passes)), 1),
            Part("prefill", "last layer: products of the ends", sum(ends.values()), 1),
            Part("prefill", "last layer: attention of the ends", ends_ms, 1),
        ]

    def level(self, level: int, R: int, requests: int, context: int) -> list[Part]:
        """All layers over the newest token of every row, which has `level` tokens of its own to look back on."""
        _, N, Q, K, D, _, _ = self.shape
        phase = f"level {level}"
        places = R if self.max_rows is None else rung(R, self.max_rows)
        products, passes = self.layer(places)
        passes["beams"] = R * level * 2 * K * D * BF16  # their own keys and values, shared with no other
        attention = self.timer.context_attention_ms(requests, R // requests, context, Q, K, D)
        return [
            *(Part(phase, name, ms, N) for name, ms in products.items()),
            Part(phase, "attention", attention, N),
            *self._bytes(phase, passes, N),
            *self._head(phase, places),
        ]

    def layer(self, rows: int) -> tuple[dict[str, float], dict[str, int]]:
        """Milliseconds of a layer's four products, and the bytes of each pass between them.

        Those are, for each row: twice the residual read and its norm written; q and k read, normed and rotated, and
        written; gate and up read, what becomes of them written. What an fp8 product reads has one byte an element, and
        the output of attention has to be read and written to become that.
        """
        H, _, Q, K, D, I, _ = self.shape  # noqa: E741
        products = {name: self._product(rows, n, k) for name, (n, k) in self.shape.products.items()}
        element = {name: size for name, (_, size) in products.items()}
        passes = {
            "norm before qkv": H * (BF16 + element["qkv"]),
            "rotation": 2 * (Q + K) * D * BF16,
            "norm before gate_up": H * (BF16 + element["gate_up"]),
            "activation": I * (2 * BF16 + element["down"]),
        }
        if element["o"] < BF16:
            passes["float8 for o"] = Q * D * (BF16 + element["o"])
        return {name: ms for name, (ms, _) in products.items()}, {name: rows * size for name, size in passes.items()}

    def _bytes(self, phase: str, passes: dict[str, int], layers: int) -> list[Part]:
        return [Part(phase, f"bytes: {name}", self.timer.copy_ms(size), layers) for name, size in passes.items()]

    def _product(self, rows: int, n: int, k: int) -> tuple[float, int]:
        """Milliseconds of the best known product, and the bytes of an element that it reads."""
        ways = [(self.timer.product_ms(rows, n, k), BF16)]
        if self.fp8:
            ways.append((self.timer.fp8_product_ms(rows, n, k), 1))
        return min(ways)

    def _prompt_attention_ms(self, prompts: Sequence[Prompt]) -> float:
        """New tokens over themselves, and over what the cache has before them, for prompts of mean length."""
        _, _, Q, K, D, _, _ = self.shape
        cached = sum(prompt.cached for prompt in prompts) // len(prompts)
        new = sum(prompt.context for prompt in prompts) // len(prompts) - cached
        ms = self.timer.prefill_attention_ms(len(prompts), new, Q, K, D)
        return ms + (self.timer.context_attention_ms(len(prompts), new, cached, Q, K, D) if cached else 0.0)

    def _head(self, phase: str, R: int) -> list[Part]:
        """Float32 logits, written by the product and read once."""
        return [
            Part(phase, "head", self.timer.head_ms(R, self.columns, self.shape.hidden), 1),
            Part(phase, "logits read", self.timer.copy_ms(R * self.columns * FP32), 1),
        ]


def phase_ms(parts: Sequence[Part]) -> dict[str, float]:
    """Sums of the phases, in their order."""
    sums: dict[str, float] = {}
    for part in parts:
        sums[part.phase] = sums.get(part.phase, 0.0) + part.ms * part.times
    return sums
