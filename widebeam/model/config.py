"""What a checkpoint's config.json says about the network, and a refusal of what this project does not compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from widebeam.errors import CheckpointError
from widebeam.faults import why_no_json
from widebeam.model.quantization import Quantization, declared_quantization, has_kv_scales, why_unsupported

SUPPORTED = ("qwen3", "qwen2")
ROPE_KINDS = ("default", "linear", "yarn")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: base, and how long contexts are reached (`default`, `linear` or `yarn`)."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A dense Qwen3, Qwen2 or Qwen2.5 decoder. Letters as in the design: V, H, N, Q, K, D."""

    model_type: str
    vocab_size: int  # V
    hidden_size: int  # H
    intermediate_size: int
    num_layers: int  # N
    num_heads: int  # Q
    num_kv_heads: int  # K
    head_dim: int  # D
    max_position_embeddings: int
    rms_norm_eps: float
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: Quantization = "none"
    """How the checkpoint's projections are stored."""
    kv_scales: bool = False
    """The checkpoint has scales for a float8 KV cache."""

    @property
    def longest_context(self) -> int:
        """Positions that the rotary embedding was made for; YaRN reaches beyond max_position_embeddings."""
        reached = int(self.rope.factor * (self.rope.original_max_position_embeddings or 0))
        return max(self.max_position_embeddings, reached)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_utf8(path: Path) -> str:
    """A text of a checkpoint folder. Raises CheckpointError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint folder. Raises CheckpointError."""
    text = read_utf8(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {why_no_json(error, text.encode())}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json (and generation_config.json for the stop tokens). Raises CheckpointError."""
    path = folder / "config.json"
    raw = read_json(path)
    _refuse_unsupported(raw, path)
    qwen3 = raw["model_type"] == "qwen3"
    bias = bool(raw.get("attention_bias", False))
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        config = ModelConfig(
            model_type=raw["model_type"],
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or (128 if qwen3 else hidden // heads)),
            max_position_embeddings=int(raw.get("max_position_embeddings", 32_768)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tied_head=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bias if qwen3 else True,
            o_bias=bias if qwen3 else False,
            qk_norm=qwen3,
            rope=_rope(raw, path),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
            eos_token_ids=_eos_token_ids(raw, path),
            quantization="fp8" if declared_quantization(raw) else "none",
            kv_scales=has_kv_scales(raw),
        )
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} is {getattr(config, name)}")
        return config
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error.args[0]!r}") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a wrong value: {error}") from None


def _eos_token_ids(raw: dict[str, Any], path: Path) -> tuple[int, ...]:
    """Those of generation_config.json, if it says any."""
    place = path.with_name("generation_config.json")
    eos = read_json(place).get("eos_token_id") if place.exists() else None
    if eos is None:
        place, eos = path, raw.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(one) is not int for one in ids):
        raise CheckpointError(f"{place} has a wrong value: eos_token_id is {eos!r}, not a token id or a list of them")
    return tuple(ids)


def _refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    """Name what the checkpoint needs and this project lacks, rather than compute something else."""
    kind = raw.get("model_type")
    problem = None
    if kind not in SUPPORTED:
        problem = f"model_type {kind!r} is not supported: known are {', '.join(SUPPORTED)}"
    elif "auto_map" in raw:
        problem = "auto_map asks to run code from the checkpoint, which is never done"
    elif raw.get("hidden_act", "silu") != "silu":
        problem = f"hidden_act {raw['hidden_act']!r} is not supported: only silu"
    elif raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        problem = "sliding-window attention is not supported"
    else:
        problem = why_unsupported(declared_quantization(raw))
    if problem:
        raise CheckpointError(f"{path}: {problem}")


def _rope(raw: dict[str, Any], path: Path) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (before)."""
    fields = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise CheckpointError(f"{path}: rope_type {kind!r} is not supported: known are {', '.join(ROPE_KINDS)}")
    theta = fields.pop("rope_theta", None) or raw.get("rope_theta", 10_000.0)
    known = {name: value for name, value in fields.items() if name not in ("rope_type", "type") and value is not None}
    if unknown := set(known) - set(RopeConfig.__struct_fields__):
        raise CheckpointError(f"{path}: rope parameters {sorted(unknown)} are not supported")
    if kind == "yarn":
        known.setdefault("original_max_position_embeddings", int(raw.get("max_position_embeddings", 32_768)))
    return msgspec.convert({"theta": float(theta), "kind": kind} | known, RopeConfig)
