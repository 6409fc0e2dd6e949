"""Float8 projections: against Hugging Face with the same rounding written plainly, and every layout that is refused."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests import hf, tiny
from tests.model.test_model import prefill_logits
from widebeam import Engine, SearchParams
from widebeam.config import EngineConfig
from widebeam.engine.runtime import Runtime
from widebeam.errors import CheckpointError, ConfigError
from widebeam.model.config import load_model_config
from widebeam.model.layers import Linear
from widebeam.model.qwen3 import Qwen3
from widebeam.model.weights import load_model

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
COMMON: dict[str, Any] = {
    "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None, "actorder": None,
    "observer_kwargs": {},
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": 1.5,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "output_activations": None,
            "weights": COMMON | {"strategy": "channel", "dynamic": False, "observer": "minmax"},
            "input_activations": COMMON | {"strategy": "token", "dynamic": True, "observer": None},
        }
    },
}
"""As llm-compressor writes it for its scheme FP8_DYNAMIC."""


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 values and float32 scales [.., 1] of rows."""
    scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (rows.float() * (1 / scale)).clamp(-448, 448).to(FP8), scale


def widened(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) * scale.to(dtype)


class Rounding(nn.Linear):
    """A product whose operands are float8 values with their scales, computed in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(widened(*rounded(x), x.dtype), widened(*rounded(self.weight), x.dtype), self.bias)


@cache
def rounding_hugging_face(folder: Path, dtype: torch.dtype) -> Any:
    """Hugging Face's model with rounded projections in all layers."""
    model = copy.deepcopy(hf.load(folder, dtype))
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = Rounding
    return model


def save_per_channel(folder: Path, to: Path, scale_dtype: torch.dtype = torch.float32, flat: bool = False) -> Path:
    """The checkpoint as llm-compressor would write it."""
    tiny.save_checkpoint(to)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], scale = rounded(tensors[name])
        tensors[f"{name}_scale"] = (scale[:, 0] if flat else scale).to(scale_dtype).contiguous()
    save_file(tensors, to / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": CONFIG}
    (to / "config.json").write_text(json.dumps(config))
    return to


def weights(model: Qwen3) -> dict[str, Tensor]:
    """Everything that was loaded, in types that torch compares."""
    return {name: t.float() if t.dtype == FP8 else t for name, t in (*model.named_parameters(), *model.named_buffers())}


def same(one: Qwen3, two: Qwen3) -> bool:
    ours, theirs = weights(one), weights(two)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# quantised at load


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [("qwen3", {}), ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}), ("qwen2", {})],
)
def test_logits_equal_hugging_face_with_rounded_products(kind: str, overrides: Any, tmp_path: Path) -> None:
    """Float32 sums in another order rarely put a value to the other side of a rounding: then one row is a bit off."""
    folder = tiny.save_checkpoint(tmp_path / "m", kind=kind, scale=0.1, **overrides)
    torch.manual_seed(1)
    prompts = [torch.randint(0, 60, (length,)).tolist() for length in (33, 1, 100)]
    with torch.no_grad():
        rounding = rounding_hugging_face(folder, torch.float32)
        expected = torch.cat([rounding(torch.tensor([prompt])).logits[0] for prompt in prompts])
    error = (prefill_logits(folder, prompts, fp8=True) - expected).abs().amax(-1)
    assert (error < 1e-5).float().mean() > 0.9
    assert error.max() < 0.02
    assert (prefill_logits(folder, prompts) - expected).abs().amax(-1).median() > 0.05


async def test_a_search_finds_what_the_rounding_network_scores(checkpoint: Path, catalog_file: Path) -> None:
    async with Engine(
        str(checkpoint),
        catalog=str(catalog_file),
        device="cpu",
        quantization="fp8",
        max_wave_rows=64,
        max_beam_width=64,
    ) as engine:
        prompt = [7, 20, 30, 41, 8]
        result = await engine.submit(prompt, SearchParams(n=16, beam_width=32, normalizer="vocab"))
    rounding = rounding_hugging_face(checkpoint, torch.float64)
    assert len(result.sequences) == 16
    errors = []
    for sequence in result.sequences:
        with torch.no_grad():
            rows = rounding(torch.tensor([[*prompt, *sequence.token_ids]])).logits[0].log_softmax(-1)
        expected = rows[len(prompt) - 1 :].gather(1, torch.tensor(sequence.token_ids)[:, None])[:, 0]
        errors.append((torch.tensor(sequence.logprobs) - expected).abs().max())
    assert torch.stack(errors).quantile(0.8) < 1e-4
    assert max(errors) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_projection_and_nothing_else_is_quantised(checkpoint: Path, dtype: torch.dtype) -> None:
    model = load_model(checkpoint, load_model_config(checkpoint), dtype, CPU, fp8=True)
    for name, tensor in weights(model).items():
        if not name.endswith(("_proj.scale", "inv_freq")):
            assert tensor.dtype == (torch.float32 if name.endswith("_proj.weight") else dtype), name
    linear = model.layers.self_attn.qkv_proj
    tensors = load_file(checkpoint / "model.safetensors")
    values, scale = rounded(torch.cat([tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]))
    assert linear.weight.dtype == FP8
    assert torch.equal(linear.weight[1].float(), values.float())
    assert torch.equal(linear.scale[1], scale.t())
    assert linear(1, *rounded(torch.randn(3, 32))).dtype == dtype


# quantised checkpoints


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_a_per_channel_checkpoint_is_loaded_as_it_is(
    checkpoint: Path, tmp_path: Path, scale_dtype: torch.dtype, flat: bool
) -> None:
    folder = save_per_channel(checkpoint, tmp_path / "m", scale_dtype, flat)
    config = load_model_config(folder)
    assert config.quantization == "fp8"
    model = load_model(folder, config, torch.float32, CPU)
    quantised = load_model(checkpoint, load_model_config(checkpoint), torch.float32, CPU, fp8=True)
    for linear in (module for module in quantised.modules() if isinstance(module, Linear)):
        assert linear.scale is not None
        linear.scale.copy_(linear.scale.to(scale_dtype))  # the same rule, but for how the scale is written
    assert same(model, quantised)
    assert same(model, load_model(folder, config, torch.float32, CPU, fp8=True))


UNSUPPORTED = [
    ("ignore", ["lm_head", "model.layers.0.mlp.down_proj"], "ignore .*down_proj.* only .*lm_head"),
    ("ignore", [], "ignore"),
    ("format", "pack-quantized", "format 'pack-quantized'"),
    ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme.type None .* only 'float'"),
    ("kv_cache_scheme", COMMON | {"strategy": "attn_head", "dynamic": False}, "kv_cache_scheme.strategy 'attn_head'"),
    ("kv_cache_scheme", COMMON | {"strategy": "tensor", "dynamic": True}, "kv_cache_scheme.dynamic True"),
    ("kv_cache_scheme", "fp8", "kv_cache_scheme 'fp8' is not an object"),
    ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
    ("config_groups.group_1", {"targets": ["Linear"]}, "group_1"),
    ("config_groups.group_0.targets", ["re:.*mlp.*"], "targets"),
    ("config_groups.group_0.output_activations", {"num_bits": 8}, "output_activations"),
    ("config_groups.group_0.input_activations", None, "input_activations None is not an object"),
    ("config_groups.group_0.input_activations.dynamic", False, "input_activations.dynamic False .* only True"),
    ("config_groups.group_0.input_activations.strategy", "tensor", "input_activations.strategy 'tensor'"),
    ("config_groups.group_0.weights.strategy", "tensor", "weights.strategy 'tensor' .* only 'channel'"),
    ("config_groups.group_0.weights.strategy", "block", "weights.strategy 'block'"),
    ("config_groups.group_0.weights.group_size", 128, "weights.group_size 128"),
    ("config_groups.group_0.weights.num_bits", 4, "weights.num_bits 4"),
    ("config_groups.group_0.weights.type", "int", "weights.type 'int'"),
    ("config_groups.group_0.weights.symmetric", False, "weights.symmetric"),
    ("quant_method", "awq", "quant_method 'awq'"),
]


@pytest.mark.parametrize(("path", "value", "words"), UNSUPPORTED)
def test_another_layout_is_refused_by_name(checkpoint: Path, tmp_path: Path, path: str, value: Any, words: str) -> None:
    folder = save_per_channel(checkpoint, tmp_path / "m")
    raw = json.loads((folder / "config.json").read_text())
    *parents, last = path.split(".")
    at = raw["quantization_config"]
    for key in parents:
        at = at[key]
    at[last] = value
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=f"{words}.*use the bf16 checkpoint, with --quantization fp8"):
        load_model_config(folder)


def test_block_scaled_fp8_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    folder = save_per_channel(checkpoint, tmp_path / "m")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"block-scaled fp8 \(quant_method fp8, weight_block_size \[128, 128\]\)"):
        load_model_config(folder)


DOWN = "model.layers.0.mlp.down_proj"
TENSORS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "static": ({f"{DOWN}.input_scale": torch.ones(1)}, "input_scale.*static scales"),
    "cache": ({"model.layers.0.self_attn.k_scale": torch.ones(1)}, "k_scale.*no kv_cache_scheme"),
    "block": ({f"{DOWN}.weight_scale_inv": torch.ones(1, 1)}, "weight_scale_inv.*block-scaled"),
    "group": ({f"{DOWN}.weight_scale": torch.ones(32, 3)}, r"weight_scale' is \[32, 3\]"),
    "no scale": ({f"{DOWN}.weight_scale": None}, "lacks 1 tensor: .*weight_scale$"),
    "wide": ({f"{DOWN}.weight": torch.ones(32, 48)}, "down_proj.weight' is float32, but .* float8_e4m3fn"),
    "head": ({"model.embed_tokens.weight": torch.ones(64, 32).to(FP8)}, "embed_tokens.weight' is float8_e4m3fn"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_does_not_fit_is_named(checkpoint: Path, tmp_path: Path, case: str) -> None:
    folder = save_per_channel(checkpoint, tmp_path / "m")
    changes, words = TENSORS[case]
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        load_model(folder, load_model_config(folder), torch.float32, CPU)


def test_quantised_tensors_that_the_config_does_not_mention_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = save_per_channel(checkpoint, tmp_path / "m")
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"float8_e4m3fn|does not say"):
        load_model(folder, load_model_config(folder), torch.float32, CPU, fp8=True)


def save_kv_scales(folder: Path, to: Path, changes: dict[str, Tensor | None] | None = None) -> Path:
    """The checkpoint as llm-compressor writes it with a scheme for the KV cache: layer n has scales 2^-n and 3 + n."""
    save_per_channel(folder, to)
    scales: dict[str, Tensor | None] = {}
    for n in range(3):
        at = f"model.layers.{n}.self_attn"
        scales |= {f"{at}.k_scale": torch.tensor(2.0**-n).bfloat16(), f"{at}.v_scale": torch.tensor([3.0 + n])}
    tensors = load_file(to / "model.safetensors") | scales | (changes or {})
    save_file({name: t for name, t in tensors.items() if t is not None}, to / "model.safetensors")
    raw = json.loads((to / "config.json").read_text())
    raw["quantization_config"]["kv_cache_scheme"] = COMMON | {
        "strategy": "tensor",
        "dynamic": False,
        "observer": "minmax",
    }
    (to / "config.json").write_text(json.dumps(raw))
    return to


def test_scales_of_a_kv_cache_are_loaded_and_used(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_kv_scales(checkpoint, tmp_path / "m")
    expected = tuple((2.0**-n, 3.0 + n) for n in range(3))
    assert load_model(folder, load_model_config(folder), torch.float32, CPU).kv_scales == expected
    caplog.set_level("INFO", "widebeam")
    for setting, used, words in (("fp8", expected, "the checkpoint's scales"), ("auto", ((1, 1),) * 3, "would use")):
        config = EngineConfig(model=str(folder), device="cpu", kv_cache_dtype=setting, max_wave_tokens=64)
        context = Runtime(config, folder, load_model_config(folder), 64).core.context
        assert tuple(context.scales(n) for n in range(3)) == used
        assert words in caplog.messages[0]
        caplog.clear()


SCALES: dict[str, tuple[Tensor | None, str]] = {
    "missing": (None, "lacks 1 tensor: .*layers.1.self_attn.k_scale$"),
    "one a head": (torch.ones(2), r"layers.1.self_attn.k_scale' is \[2\], but config.json makes it \[1\]"),
    "zero": (torch.zeros(1), "scale of keys or values .*k_scale.* is not positive"),
    "nan": (torch.tensor(torch.nan), "is not positive"),
}


@pytest.mark.parametrize("case", SCALES)
def test_scales_that_do_not_fit_are_refused(checkpoint: Path, tmp_path: Path, case: str) -> None:
    scale, words = SCALES[case]
    folder = save_kv_scales(checkpoint, tmp_path / "m", {"model.layers.1.self_attn.k_scale": scale})
    with pytest.raises(CheckpointError, match=words):
        load_model(folder, load_model_config(folder), torch.float32, CPU)


# settings


def test_none_refuses_a_quantised_checkpoint_before_it_is_read(checkpoint: Path, tmp_path: Path) -> None:
    folder = save_per_channel(checkpoint, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"--quantization none.*quantised"):
        Runtime(EngineConfig(model=str(folder), quantization="none"), folder, load_model_config(folder), 64)
