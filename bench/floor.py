"""This machine's own floor for a case: its products, attention and unavoidable bytes, each alone at its best speed.

    python bench/floor.py qwen3-1.7b --cases 1000x1 5000x4 [--fp8] [--codes 8192] [--save FILE.json]

A case is CONTEXTxREQUESTS[xWIDTH[xTOKENS]]. Products: cuBLAS, or for fp8 `torch._scaled_mm` with row-wise scales where
that is faster. Attention: FlashInfer, ragged for prompts and paged for beams. Bytes that the work between them cannot
avoid: at the speed of a large copy. Selection adds nothing but reading the logits once. See kernels.py for how each
part is timed; offline.py divides by the sum.

Letters: B requests, T packed prompt tokens, R rows, H hidden, Q query heads, K key/value heads, D head size, I MLP
size, N layers, C columns of the head.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import kernels
from kernels import context_attention_ms, copy_ms, head_ms, prefill_attention_ms
from random_checkpoint import HEAD_DIM, SHAPES, VOCAB_SIZE
from report import header, save, table

BF16, FP32 = 2, 4


class Case(NamedTuple):
    """Prompts of one length, prefilled together and searched as one wave."""

    context: int
    requests: int
    width: int
    tokens: int

    @classmethod
    def parse(cls, text: str, width: int = 256, tokens: int = 3) -> Case:
        """CONTEXTxREQUESTS[xWIDTH[xTOKENS]]"""
        context, requests, *rest = map(int, text.split("x"))
        return cls(context, requests, *rest, *(width, tokens)[len(rest) :])


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
    def named(cls, name: str) -> Shape:
        """One of random_checkpoint.py's."""
        hidden, layers, heads, kv_heads, intermediate, _ = SHAPES[name]
        return cls(hidden, layers, heads, kv_heads, HEAD_DIM, intermediate, VOCAB_SIZE)


class Part(NamedTuple):
    """One line of the sum."""

    phase: str
    name: str
    ms: float
    times: int


def floor(case: Case, shape: Shape, *, fp8: bool = False, codes: int | None = None) -> dict[str, Any]:
    """Milliseconds of prefill (with the head of level 0), of the levels behind it, and of all, with their parts.

    `codes` is the size of a level's codebook; without it the head is the whole vocabulary.
    """
    C = codes or shape.vocab
    parts = _prefill(case, shape, fp8, C)
    for level in range(1, case.tokens):
        parts += _level(level, case.requests * min(case.width, C), case, shape, fp8, C)
    sums: dict[str, float] = {}
    for part in parts:
        sums[part.phase] = sums.get(part.phase, 0.0) + part.ms * part.times
    prefill, *levels = sums.values()
    return {
        "prefill_ms": prefill, "levels_ms": sum(levels), "level_ms": levels, "total_ms": prefill + sum(levels),
        "parts": [part._asdict() for part in parts],
    }  # fmt: skip


def _prefill(case: Case, shape: Shape, fp8: bool, C: int) -> list[Part]:
    """All layers but the last over all T tokens; of the last, k and v of all, and the rest for the prompts' ends."""
    H, N, Q, K, D, _, _ = shape
    B, T = case.requests, case.context * case.requests
    products, size = _layer(T, shape, fp8)
    size += T * K * D * BF16  # rotated keys a second time: one copy goes to pages, ragged attention reads the other
    ends, _ = _layer(B, shape, fp8)
    kv_ms, operand = _product(T, 2 * K * D, H, fp8)
    kv_size = T * ((2 * H + 2 * 2 * K * D) * BF16 + H * operand)  # residual and its norm; k and v read, then to pages
    attention = prefill_attention_ms(B, case.context, Q, K, D)
    return [
        *(Part("prefill", name, ms, N - 1) for name, ms in products.items()),
        Part("prefill", "attention", attention, N - 1),
        Part("prefill", "bytes", copy_ms(size), N - 1),
        Part("prefill", "last layer: k and v of all", kv_ms, 1),
        Part("prefill", "last layer: bytes", copy_ms(kv_size), 1),
        Part("prefill", "last layer: products of the ends", sum(ends.values()), 1),
        Part("prefill", "last layer: attention of the ends", context_attention_ms(B, 1, case.context, Q, K, D), 1),
        *_head("prefill", B, H, C),
    ]


def _level(level: int, R: int, case: Case, shape: Shape, fp8: bool, C: int) -> list[Part]:
    """All layers over the newest token of every row, each of which has `level` tokens of its own to look back on."""
    H, N, Q, K, D, _, _ = shape
    phase = f"level {level}"
    products, size = _layer(R, shape, fp8)
    size += R * level * 2 * K * D * BF16  # a beam's own keys and values, shared with no other
    attention = context_attention_ms(case.requests, R // case.requests, case.context, Q, K, D)
    return [
        *(Part(phase, name, ms, N) for name, ms in products.items()),
        Part(phase, "attention", attention, N),
        Part(phase, "bytes", copy_ms(size), N),
        *_head(phase, R, H, C),
    ]


def _head(phase: str, R: int, H: int, C: int) -> list[Part]:
    """Float32 logits, written by the product and read once."""
    return [Part(phase, "head", head_ms(R, C, H), 1), Part(phase, "logits read", copy_ms(R * C * FP32), 1)]


def _layer(rows: int, shape: Shape, fp8: bool) -> tuple[dict[str, float], int]:
    """Milliseconds of a layer's four products, and the bytes between them that no fusion avoids.

    Those are, for each row: twice the residual read and written, and its norm written; q, k and v read, q written, k
    and v written to their places; gate and up read, their product written. What an fp8 product reads has one byte an
    element, and the output of attention has to be read and written to become that.
    """
    H, _, Q, K, D, I, _ = shape  # noqa: E741
    sizes = {"qkv": ((Q + 2 * K) * D, H), "o": (H, Q * D), "gate_up": (2 * I, H), "down": (H, I)}
    products = {name: _product(rows, n, k, fp8) for name, (n, k) in sizes.items()}
    element = {name: size for name, (_, size) in products.items()}
    size = (2 * 2 * H + 2 * (Q + 2 * K) * D + 2 * I) * BF16
    size += H * element["qkv"] + H * element["gate_up"] + I * element["down"]
    if element["o"] < BF16:
        size += Q * D * (BF16 + element["o"])
    return {name: ms for name, (ms, _) in products.items()}, rows * size


def _product(rows: int, n: int, k: int, fp8: bool) -> tuple[float, int]:
    """Milliseconds of the best known product, and the bytes of an element that it reads."""
    ways = [(kernels.product_ms(rows, n, k), BF16)]
    if fp8:
        ways.append((kernels.fp8_product_ms(rows, n, k), 1))
    return min(ways)


def markdown(cases: dict[str, dict[str, Any]]) -> str:
    """A table of parts for each case, then the sums of all."""
    blocks = []
    for name, found in cases.items():
        rows = [(*part.values(), part["ms"] * part["times"]) for part in found["parts"]]
        blocks += [f"{name}, parts in ms:\n", table(["phase", "part", "each", "times", "sum"], rows), ""]
    sums = [
        (name, found["total_ms"], found["prefill_ms"], " ".join(f"{ms:.2f}" for ms in found["level_ms"]))
        for name, found in cases.items()
    ]
    return "\n".join([*blocks, table(["case", "floor, ms", "prefill", "each level"], sums)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--cases", nargs="+", default=["1000x1", "5000x4"])
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--codes", type=int, help="columns of the head; by default the whole vocabulary")
    parser.add_argument("--save", type=Path)
    chosen = parser.parse_args()
    shape = Shape.named(chosen.shape)
    cases = {text: floor(Case.parse(text), shape, fp8=chosen.fp8, codes=chosen.codes) for text in chosen.cases}
    text = f"Floor of {chosen.shape}\n\n{markdown(cases)}"
    print(text)
    save(chosen.save, header(chosen) | {"cases": cases}, text)
