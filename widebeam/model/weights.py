"""Checkpoint folders: found locally or on the Hugging Face hub, streamed tensor by tensor into the network.

Only safetensors are read: other formats can run code when loaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from widebeam.errors import CheckpointError
from widebeam.model.config import ModelConfig, read_json
from widebeam.model.qwen3 import Qwen3

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Checkpoint projections that are one product here, and their place in it."""


def resolve_checkpoint(model: str, revision: str | None = None) -> Path:
    """The local folder of a model: itself, or a download from the Hugging Face hub at one resolved commit."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CheckpointError(f"{model} is not a folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{model} is neither a folder nor a model that the hub gives: {error}") from None


def load_model(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Qwen3:
    """The network with the checkpoint's weights, on the device. Peak host memory is one tensor beyond the model's own.

    Raises CheckpointError if a shard or tensor is missing, has another shape, or has no place in this network.
    """
    with torch.device("meta"):
        model = Qwen3(config)
    model = model.to(dtype).to_empty(device=device)
    model.rotary = type(model.rotary)(config.rope, config.head_dim).to(device)
    targets = _targets(model, config)
    missing = set(targets)
    for name, tensor in _stream(folder, config):
        if name not in targets:
            raise CheckpointError(f"{folder}: tensor {name!r} has no place in a {config.model_type} model")
        target = targets[name]
        if target.shape != tensor.shape:
            raise CheckpointError(
                f"{folder}: tensor {name!r} is {list(tensor.shape)}, but config.json makes it {list(target.shape)}"
            )
        target.copy_(tensor)
        missing.discard(name)
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise CheckpointError(f"{folder}: {len(missing)} tensors are missing, among them {some}")
    return model.eval()


def _targets(model: Qwen3, config: ModelConfig) -> dict[str, Tensor]:
    """Checkpoint name -> the storage that it fills (a slice, where projections are fused)."""
    targets: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        full = name if name == "lm_head" else f"model.{name}"
        full = full if full.endswith((".weight", ".bias")) else f"{full}.weight"
        module, _, kind = full.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        pieces = [piece for piece, (fused, _) in FUSED.items() if fused == leaf]
        if not pieces:
            targets[full] = parameter.data
            continue
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = [q, kv, kv] if leaf == "qkv_proj" else [config.intermediate_size] * 2
        for piece, part in zip(pieces, parameter.data.split(sizes), strict=True):
            targets[f"{parent}.{piece}.{kind}"] = part
    return targets


def _stream(folder: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the network needs, shard by shard, with a progress bar on a terminal."""
    files = _shards(folder)
    progress = tqdm(files, desc="loading weights", unit="shard", disable=not sys.stderr.isatty(), file=sys.stderr)
    for file in progress:
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    if re.search(r"rotary_emb\.inv_freq$", name) or (config.tied_head and name == "lm_head.weight"):
                        continue  # computed here; and a tied head is the embedding
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None


def _shards(folder: Path) -> list[Path]:
    """The checkpoint's files; a file that the index names and the folder lacks is an error."""
    if (folder / INDEX).exists():
        try:
            names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        except (KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{folder / INDEX} has no weight_map") from None
        absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if absent:
            raise CheckpointError(f"{folder} lacks {len(absent)} of {len(names)} shards, first {absent[0]!r}")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt"))
    hint = f" (found {others[0]}: only safetensors are read)" if others else ""
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
