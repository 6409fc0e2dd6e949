"""This machine's own floor for a case: its products, attention and unavoidable bytes, each alone at its best speed.

    python bench/floor.py qwen3-1.7b --cases 1000x1 5000x4 [--fp8] [--codes 8192] [--behind-prefill] [--save FILE.json]

A case is CONTEXTxREQUESTS[xWIDTH[xTOKENS]]. Products: cuBLAS, or for fp8 `torch._scaled_mm` with row-wise scales where
that is faster. Attention: FlashInfer, ragged for prompts and paged for beams. Selection adds nothing but reading the
logits once. widebeam/plan/work.py says what the parts are, kernels.py how each is timed; offline.py divides by the sum.

Bytes: what must pass between those kernels with the best fusion, each element read once and written once. A layer has
four such passes, for each row: the residual read and its norm written, twice; q and k read and written, normed and
rotated; gate and up read, what becomes of them written. In fp8 what is written has one byte an element, and the output
of attention is read and written, too. Beams read their own keys and values. Products add to the residual and store
values while they write, so that neither counts, though the engine's kernels do more here and there (values into pages;
keys of prompts a second time; with fp8 the residual, written again).

A pass takes as long as a copy of so many bytes between the same two tensors over and over, by the fastest kernel found
(`copy, TB/s`: of a large one, where 4.2 was seen on an H200; much less means that this floor is too high). So small
passes, such as those of 1024 rows, have the speed of the cache. Of large ones nothing is taken off for what the cache
still holds of the product before: the engine's kernels begin with that, and yet the profile of a prefill of 4 x 5000
tokens has them at 4.0 to 4.3 TB/s, a copy's speed within 3 %.

--behind-prefill times the parts of the levels right behind the layers of the case's own prefill, at the clock that the
power limit leaves them there, where they otherwise are timed on a GPU that has rested.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kernels
from matrix import Case
from report import header, origin, save, table
from timing import behind

from widebeam.plan.shapes import SHAPES
from widebeam.plan.work import Prompt, Shape, Work, phase_ms


def floor(
    case: Case, shape: Shape, *, fp8: bool = False, codes: int | None = None, behind_prefill: bool = False
) -> dict[str, Any]:
    """Milliseconds of prefill (with the head of level 0), of the levels behind it, and of all, with their parts.

    `codes` is the size of a level's codebook; without it the head is the whole vocabulary.
    """
    work, prompts = Work(shape, kernels, fp8=fp8, codes=codes), [Prompt(case.context)] * case.requests
    before = nullcontext()
    if behind_prefill:
        heads = shape.heads, shape.kv_heads, shape.head_dim
        sizes = case.requests, case.context, *heads
        before = behind(kernels.layers_of(shape.layers, shape.products.values(), *sizes, fp8=fp8))
    parts = work.prefill(prompts)
    with before:
        parts += work.levels(prompts, case.width, case.tokens)
    prefill, *levels = phase_ms(parts).values()
    return {
        "prefill_ms": prefill, "levels_ms": sum(levels), "level_ms": levels, "total_ms": prefill + sum(levels),
        "copy_tb_s": kernels.copy_tb_s(), "parts": [part._asdict() for part in parts],
    }  # fmt: skip


def markdown(cases: dict[str, dict[str, Any]]) -> str:
    """A table of parts for each case, then the sums of all."""
    blocks = []
    for name, found in cases.items():
        rows = [(*part.values(), part["ms"] * part["times"]) for part in found["parts"]]
        blocks += [f"{name}, parts in ms:\n", table(["phase", "part", "each", "times", "sum"], rows), ""]
    sums = [
        (
            name,
            *(found[key] for key in ("total_ms", "prefill_ms")),
            " ".join(f"{ms:.2f}" for ms in found["level_ms"]),
            found["copy_tb_s"],
        )
        for name, found in cases.items()
    ]
    return "\n".join([*blocks, table(["case", "floor, ms", "prefill", "each level", "copy, TB/s"], sums)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--cases", nargs="+", default=["1000x1", "5000x4"])
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--codes", type=int, help="columns of the head; by default the whole vocabulary")
    parser.add_argument("--behind-prefill", action="store_true")
    parser.add_argument("--save", type=Path)
    chosen = parser.parse_args()
    shape = Shape.of(SHAPES[chosen.shape])
    cases = {
        text: floor(Case.parse(text), shape, fp8=chosen.fp8, codes=chosen.codes, behind_prefill=chosen.behind_prefill)
        for text in chosen.cases
    }
    report = header(chosen) | {"cases": cases}
    text = f"{origin(report)}\n\nFloor of {chosen.shape}\n\n{markdown(cases)}"
    print(text)
    save(chosen.save, report, text)
