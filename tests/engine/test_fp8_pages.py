"""Searches over float8 pages, against Hugging Face's network with keys and values rounded where a search reads pages.

Letters: B batch, X heads of one kind, T tokens, D head size, L layers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AttentionInterface

from tests import hf, tiny
from tests.engine.test_reuse import PAGE, prompt, run, sharing
from tests.engine.warm_waves import make_runtime, make_search
from tests.model.test_quantization import rounding_hugging_face
from widebeam.engine.advance import advance
from widebeam.engine.compile import EAGER, compiled_programs
from widebeam.engine.kv_scales import LEAST_KEY_SCALE
from widebeam.engine.request import SearchResult
from widebeam.engine.runtime import Runtime
from widebeam.errors import ConfigError
from widebeam.kv.pools import Scales

pytestmark = pytest.mark.usefixtures("one_thread")
FP8 = torch.float8_e4m3fn
LONGEST = 300
SETTINGS: dict[str, Any] = {"kv_cache_dtype": "fp8", "page_size": PAGE, "max_total_tokens": 4096}


class Pages:
    """Attention as a search over float8 pages sees it: the prompt's keys and values are rounded for the tokens behind
    it, those of a cached prefix for the rest of the prompt, and in the last layer all for the prompt's last token."""

    def __init__(self, scales: Sequence[tuple[float, float]], prompt: int, cached: int = 0) -> None:
        self.scales, self.prompt, self.cached = scales, prompt, cached

    def seen(self, tokens: int, last_layer: bool) -> tuple[Tensor, Tensor]:
        """Which tokens [T, T] a token sees as they are, and which rounded."""
        row, key = torch.arange(tokens)[:, None], torch.arange(tokens)
        behind = (row >= self.prompt) | (last_layer & (row == self.prompt - 1))
        rounded = (key < self.prompt) & (behind | ((key < self.cached) & (row >= self.cached)))
        return (key <= row) & ~rounded, (key <= row) & rounded

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """q [B, Q, T, D], k and v [B, K, T, D], rotated -> [B, T, Q, D]."""
        layer, group = module.layer_idx, query.shape[1] // key.shape[1]
        pairs = ((key, value), map(rounded, (key, value), self.scales[layer]))
        logit, values = torch.tensor([]), []
        exact, not_exact = self.seen(query.shape[2], layer == len(self.scales) - 1)
        for (k, v), seen in zip(pairs, (exact, not_exact), strict=True):
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            part = (query @ k.transpose(2, 3) * scaling).masked_fill(~seen, -torch.inf)
            logit, values = torch.cat((logit, part), dim=-1), [*values, v]
        return (logit.softmax(-1) @ torch.cat(values, dim=2)).transpose(1, 2), None


def rounded(x: Tensor, scale: float) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(FP8).to(x.dtype) * scale


@cache
def hugging_face(folder: Path, quantized: bool) -> Any:
    """With float8 projections, too, if asked."""
    model = copy.deepcopy(rounding_hugging_face(folder, torch.float64) if quantized else hf.load(folder))
    model.set_attn_implementation("float8 pages")
    return model


def rescore(
    folder: Path, pages: Any, prompt: Sequence[int], generated: Sequence[int], quantized: bool = False
) -> list[float]:
    """Teacher-forced log-probability of each generated token."""
    AttentionInterface.register("float8 pages", pages)
    with torch.no_grad():
        rows = hugging_face(folder, quantized)(torch.tensor([[*prompt, *generated]])).logits[0].log_softmax(-1)
    return [float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(generated)]


def scales_of(runtime: Runtime) -> list[tuple[float, float]]:
    return [runtime.core.context.scales(layer) for layer in range(3)]


def errors(folder: Path, runtime: Runtime, token_ids: np.ndarray, result: SearchResult, cached: int) -> list[float]:
    """Of the log-probabilities of all tokens that were found."""
    pages = Pages(scales_of(runtime), len(token_ids), cached)
    quantized = runtime.info["quantization"] == "fp8"
    found = [
        np.subtract(s.logprobs, rescore(folder, pages, token_ids.tolist(), s.token_ids, quantized))
        for s in result.sequences
    ]
    return np.abs(np.concatenate(found)).tolist()


def agree(away: list[float]) -> None:
    """To float32; float32 and float64 rarely fall to different sides of a rounding: then a prompt is a bit off."""
    assert np.quantile(away, 0.7) < 1e-4 and max(away) < 0.05, np.quantile(away, [0.5, 0.7, 0.9, 1])


@pytest.fixture(scope="module")
def runtime(checkpoint: Path) -> Runtime:
    return make_runtime(checkpoint, LONGEST, **SETTINGS)


def test_scores_are_those_of_rounded_keys_and_values(checkpoint: Path, runtime: Runtime) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 7, 8, 9, 40))]
    results = run(runtime, [make_search(tokens, 6, levels=4) for tokens in prompts])
    pairs = list(zip(prompts, results, strict=True))
    agree([error for one in pairs for error in errors(checkpoint, runtime, *one, 0)])
    exact = [np.subtract(s.logprobs, hf.rescore(checkpoint, p, s.token_ids)) for p, r in pairs for s in r.sequences]
    assert np.median(np.abs(exact)) > 1e-3  # so the rounding was there


def test_company_changes_nothing(runtime: Runtime) -> None:
    prompts = [prompt(length, 20 + length) for length in (9, 30, 61)]
    together = run(runtime, [make_search(tokens, 6) for tokens in prompts])
    for tokens, one in zip(prompts, together, strict=True):
        (alone,) = run(runtime, [make_search(tokens, 6)])
        assert [s.token_ids for s in alone.sequences] == [s.token_ids for s in one.sequences]
        assert [s.score for s in alone.sequences] == pytest.approx([s.score for s in one.sequences], abs=1e-4)


@pytest.mark.parametrize("kind", ["as they are", "for graphs"])
def test_every_cut_of_a_page(checkpoint: Path, kind: str) -> None:
    """What is computed behind a cached prefix sees it rounded, and is close to a cold run, which does not."""
    warm = make_runtime(checkpoint, LONGEST, prefix_cache="on", **SETTINGS)
    if kind == "for graphs":
        warm.core.programs = compiled_programs(warm.core, lambda function: function)
    whole, away = prompt(3 * PAGE + 3), []
    (cold,) = run(warm, [make_search(whole, 6)])
    for known in range(PAGE, 2 * PAGE + 1):
        warm.prefixes.flush()
        run(warm, [sharing(np.concatenate([whole[:known], (whole[known : known + 4] + 1) % 50]))])
        again = sharing(whole)
        (result,) = run(warm, [again])
        assert again.num_cached == known // PAGE * PAGE
        away += errors(checkpoint, warm, whole, result, again.num_cached)
        theirs = {tuple(s.token_ids): s.score for s in cold.sequences}
        shared = [(s.score, theirs[tuple(s.token_ids)]) for s in result.sequences if tuple(s.token_ids) in theirs]
        assert len(shared) >= 4
        assert max(abs(one - other) for one, other in shared) < 0.1
    agree(away)


def test_a_page_takes_a_quarter_of_a_float32_one(checkpoint: Path, runtime: Runtime) -> None:
    plain = make_runtime(checkpoint, LONGEST, page_size=PAGE, max_total_tokens=4096)
    assert runtime.core.context.page_bytes * 4 == plain.core.context.page_bytes == 2 * 3 * 2 * 16 * 4 * PAGE
    assert runtime.core.beams.pools.k.dtype == plain.core.beams.pools.k.dtype == torch.float32
    assert {pool.dtype for pool in runtime.core.context.pools} == {FP8}


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_scales_leave_room_above_what_a_fixed_prompt_has(kind: str, tmp_path: Path) -> None:
    """Twice the largest fits, four times does not; powers of two."""
    folder = tiny.save_checkpoint(tmp_path / "m", kind=kind, scale=0.3)
    scales = scales_of(make_runtime(folder, LONGEST, **SETTINGS))
    largest: list[tuple[float, float]] = []

    def watch(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        largest.append((float(key.abs().max()), float(value.abs().max())))
        return Pages([(1.0, 1.0)] * 3, LONGEST)(module, query, key, value, *rest, **more)

    vocab_size = hf.load(folder).config.vocab_size
    rescore(folder, watch, np.random.default_rng(0).integers(vocab_size, size=LONGEST).tolist(), [])
    assert len(scales) == len(largest) == 3
    for scale, most in zip(np.ravel(scales), np.ravel(largest), strict=True):
        assert np.log2(scale).is_integer()
        assert 2 * most * (1 - 1e-5) <= 448 * scale < 4 * most


def test_small_keys_do_not_make_small_scales(tmp_path: Path) -> None:
    """With which FlashInfer would count keys behind a context's end; values may have any."""
    folder = tiny.save_checkpoint(tmp_path / "m", kind="qwen2", scale=0.01)
    for k, v in scales_of(make_runtime(folder, LONGEST, **SETTINGS)):
        assert k == LEAST_KEY_SCALE > v


def test_keys_beyond_the_scales_are_clamped(
    checkpoint: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the judge clamps them."""
    monkeypatch.setattr(runtime.core.context, "_scales", (Scales(1 / 448, 0.5 / 448),) * 3)
    tokens = prompt(20, 5)
    (result,) = run(runtime, [make_search(tokens, 6)])
    agree(errors(checkpoint, runtime, tokens, result, 0))
    stored = runtime.core.context.pools.v.float()
    assert (stored.abs() == 448).sum() > 100 and not stored.isnan().any()


def test_weights_without_finite_keys_are_refused(tmp_path: Path) -> None:
    folder = tiny.save_checkpoint(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_norm.weight"][3] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: layer 1 has keys or values that are not finite"):
        make_runtime(folder, LONGEST, **SETTINGS)


def test_float8_projections_and_pages_together(checkpoint: Path) -> None:
    both = make_runtime(checkpoint, LONGEST, quantization="fp8", **SETTINGS)
    prompts = [prompt(length, length) for length in (5, 8, 12)]
    results = run(both, [make_search(tokens, 6) for tokens in prompts])
    agree([e for one in zip(prompts, results, strict=True) for e in errors(checkpoint, both, *one, 0)])


def test_steps_over_float8_pages_trace_whole(checkpoint: Path) -> None:
    """As the compiler sees them: no break, the same results, with and without a cached prefix."""
    warm = make_runtime(checkpoint, LONGEST, prefix_cache="on", **SETTINGS)
    whole = prompt(30)
    torch._dynamo.reset()

    def trace(function: Any) -> Any:
        if function is advance:  # knows nothing of pages
            return function
        return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")

    traced = compiled_programs(warm.core, trace)
    found = []
    for programs in (EAGER, traced):
        warm.core.programs = programs
        warm.prefixes.flush()
        found.append([run(warm, [sharing(whole)])[0], run(warm, [sharing(whole)])[0]])
    for one, other in zip(*found, strict=True):
        assert [s.token_ids for s in one.sequences] == [s.token_ids for s in other.sequences]
        assert [s.score for s in one.sequences] == pytest.approx([s.score for s in other.sequences], abs=1e-3)
    explained = torch._dynamo.utils.counters["graph_break"]
    assert not explained, explained


@pytest.mark.gpu
@pytest.mark.timeout(600)  # kernels are built where none are cached
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_flashinfer_reads_pages_as_the_reference_does(enforce_eager: bool, tmp_path: Path) -> None:
    """To bfloat16, cold and behind a cached prefix."""
    folder = tiny.save_checkpoint(tmp_path / "m", scale=0.1, head_dim=64)
    fields: dict[str, Any] = SETTINGS | {"dtype": "bfloat16", "prefix_cache": "on", "warmup": "none"}
    reference = make_runtime(folder, LONGEST, **fields)
    on_cuda = make_runtime(folder, LONGEST, **fields, device="cuda", enforce_eager=enforce_eager)
    assert on_cuda.info["backend"] == "flashinfer"
    prompts = [prompt(length, length) for length in (3, 60, 200)]
    for length in (60, 100, 200):  # the second and third find what came before
        found = []
        for engine in (reference, on_cuda):
            searches = [sharing(tokens[:length], 12) for tokens in prompts]
            found.append((run(engine, searches), [search.num_cached for search in searches]))
        assert found[0][1] == found[1][1] and (length == 60 or max(found[0][1]) > 40)
        for one, other in zip(found[0][0], found[1][0], strict=True):
            theirs = {tuple(s.token_ids): s.score for s in other.sequences}
            shared = [(s.score, theirs[tuple(s.token_ids)]) for s in one.sequences if tuple(s.token_ids) in theirs]
            assert len(shared) >= 9
            assert max(abs(mine - its) for mine, its in shared) < 0.05
