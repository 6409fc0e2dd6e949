"""What a checkpoint says of its own quantisation: one layout that is loaded as it is, all others refused by name.

The one is compressed-tensors' "FP8 dynamic": float8_e4m3fn projections `*.weight` [N, H] with a scale for each output,
`*.weight_scale` [N, 1], and rows that are quantised per token when they come. To load another layout as this one would
mean to quantise anew, which gives another network than the checkpoint's. For a float8 KV cache it may also have a scale
for each layer's keys and one for its values, `self_attn.k_scale` and `self_attn.v_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Quantization = Literal["none", "fp8"]

ANYTHING: tuple[Any, ...] = ()
"""In place of the values that an entry may have: what it says changes no arithmetic."""
HEADER = {
    "quant_method": ("compressed-tensors",),
    "format": ("float-quantized",),
    "quantization_status": ANYTHING,  # some write "frozen"; the tensors' types tell
    "ignore": (["lm_head"], ["re:.*lm_head"]),
    "config_groups": ANYTHING,  # looked at by themselves
    "kv_cache_scheme": ANYTHING,  # the same
    "version": ANYTHING,
    "global_compression_ratio": ANYTHING,
}
GROUP = {
    "targets": (["Linear"],),
    "format": ("float-quantized",),
    "weights": ANYTHING,  # looked at by themselves, as the next
    "input_activations": ANYTHING,
}
TYPE = {"num_bits": (8,), "type": ("float",), "symmetric": (True,), "observer": ANYTHING, "observer_kwargs": ANYTHING}
WEIGHTS = TYPE | {"strategy": ("channel",), "dynamic": (False,)}
KV_CACHE = TYPE | {"strategy": ("tensor",), "dynamic": (False,)}
ACTIVATIONS = TYPE | {"strategy": ("token",), "dynamic": (True,)}
UNLESS_SAID = {"format": "float-quantized", "num_bits": 8, "symmetric": True, "dynamic": False}
"""What an absent entry means in this format."""

FOREIGN_TENSORS = {
    "input_scale": "static scales of activations are not supported",
    "output_scale": "static scales of activations are not supported",
    "k_scale": "config.json has no kv_cache_scheme",
    "v_scale": "config.json has no kv_cache_scheme",
    "kv_scale": "one scale for keys and values together is not supported",
    "weight_scale_inv": "block-scaled fp8 is not supported",
    "weight_zero_point": "asymmetric weights are not supported",
    "weight_packed": "packed weights are not supported",
    "weight_scale": "config.json does not say that this tensor's weights are quantised",
}
"""Ends of names, and why a tensor that is called so cannot be used."""


def declared_quantization(raw: Mapping[str, Any]) -> Any:
    """config.json's entry, under today's name or the one that early compressed-tensors used; empty without one."""
    return raw.get("quantization_config") or raw.get("compression_config")


def has_kv_scales(raw: Mapping[str, Any]) -> bool:
    """Whether a supported config.json announces scales of keys and values."""
    return bool((declared_quantization(raw) or {}).get("kv_cache_scheme"))


def why_unsupported(entry: Any) -> str | None:
    """What keeps a checkpoint with this `quantization_config` from being loaded as it is, or None."""
    if not entry:
        return None
    fields = entry if isinstance(entry, dict) else {"quant_method": entry}
    method, block = fields.get("quant_method"), fields.get("weight_block_size")
    if method == "compressed-tensors":
        problem = _compressed_tensors(fields)
    elif method == "fp8" and block:
        problem = f"block-scaled fp8 (quant_method fp8, weight_block_size {block}) is not supported"
    else:
        problem = f"quantised checkpoints of quant_method {method!r} are not supported"
    return problem and f"{problem}; use the bf16 checkpoint, with --quantization fp8 if you like"


def why_no_place(tensor: str) -> str:
    """Why a tensor that the network lacks may be there, to be put behind its name; empty if nothing is known."""
    reason = FOREIGN_TENSORS.get(tensor.rpartition(".")[2])
    return f": {reason}" if reason else ""


def _compressed_tensors(entry: dict[str, Any]) -> str | None:
    """The first thing that is not as in the one layout that is known."""
    groups = entry.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        names = sorted(groups) if isinstance(groups, dict) else groups
        return f"quantization_config: config_groups {names} are not supported: only one group"
    ((name, group),) = groups.items()
    at = f"config_groups.{name}"
    return (
        _difference(entry, HEADER, "")
        or _difference(group, GROUP, f"{at}.")
        or _difference(group.get("weights"), WEIGHTS, f"{at}.weights.")
        or _difference(group.get("input_activations"), ACTIVATIONS, f"{at}.input_activations.")
        or (_difference(scheme, KV_CACHE, "kv_cache_scheme.") if (scheme := entry.get("kv_cache_scheme")) else None)
    )


def _difference(entry: Any, known: Mapping[str, tuple[Any, ...]], at: str) -> str | None:
    """The first key of `known` with a value that is not known, or the first other key that says anything."""
    if not isinstance(entry, dict):
        return f"quantization_config: {at.rstrip('.')} {entry!r} is not an object"
    said = {key: value for key, value in entry.items() if value is not None}
    for key, values in known.items():
        value = said.pop(key, UNLESS_SAID.get(key))
        if values and value not in values:
            return f"quantization_config: {at}{key} {value!r} is not supported: only {values[0]!r}"
    for key, value in said.items():
        if value:
            return f"quantization_config: {at}{key} {value!r} is not supported"
    return None
