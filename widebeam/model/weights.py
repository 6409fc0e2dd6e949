"""Checkpoint folders: found locally or on the Hugging Face hub, streamed tensor by tensor into the network.

Only safetensors are read: other formats can run code when loaded. Letters: N outputs of a projection, H inputs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from widebeam.errors import CheckpointError
from widebeam.faults import counted
from widebeam.kv.pools import Scales
from widebeam.model.config import ModelConfig, read_json
from widebeam.model.layers import Linear
from widebeam.model.ops import FP8, quantize_rows
from widebeam.model.parallel import WHOLE, Shard
from widebeam.model.quantization import why_no_place
from widebeam.model.qwen3 import Qwen3
from widebeam.progress import progress

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")
KV_SCALES = ("self_attn.k_scale", "self_attn.v_scale")
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Checkpoint projections that are one product here, and their place in it."""
SUMMED = ("o_proj", "down_proj")
"""Projections of which a rank has some inputs, and a part of each output's sum; of the others it has some outputs."""


def resolve_checkpoint(model: str, revision: str | None = None, files: tuple[str, ...] = HUB_FILES) -> Path:
    """The local folder of a model: itself, or a download from the Hugging Face hub at one resolved commit."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CheckpointError(f"{model} is not a folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=[*files]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{model} is neither a folder nor a model that the hub gives: {error}") from None


class Target(NamedTuple):
    """Storage that a checkpoint tensor fills: a slice, where projections are fused."""

    values: Tensor
    scale: Tensor | None = None
    """Where the tensor's rows are quantised on the way: room for their scales, [N, 1]."""
    axis: int | None = None
    """Along which ranks divide the tensor."""
    shard: Shard = WHOLE

    @property
    def shape(self) -> list[int]:
        """Of the whole tensor."""
        return [size * self.shard.size if axis == self.axis else size for axis, size in enumerate(self.values.shape)]

    def why_not(self, tensor: Tensor) -> str | None:
        """What keeps the tensor from going here, or None."""
        if self.shape != list(tensor.shape):
            return f"is {list(tensor.shape)}, but config.json makes it {self.shape}"
        taken = (FP8,) if self.values.dtype == FP8 and self.scale is None else WIDE
        if tensor.dtype not in taken:
            return f"is {_name(tensor.dtype)}, but config.json makes it {' or '.join(map(_name, taken))}"
        return None

    def fill(self, tensor: Tensor) -> None:
        """Copy the rank's part. Rows are quantised whole, so that their scales are those of one process."""
        if self.axis == 0:
            tensor = self._own(tensor)
        if self.scale is None:
            self.values.copy_(self._own(tensor) if self.axis == 1 else tensor)
            return
        values, scale = quantize_rows(tensor.to(self.values.device))
        self.values.copy_(self._own(values) if self.axis == 1 else values)
        self.scale.copy_(scale)

    def _own(self, tensor: Tensor) -> Tensor:
        assert self.axis is not None
        return tensor.chunk(self.shard.size, self.axis)[self.shard.rank]


def empty_model(config: ModelConfig, dtype: torch.dtype, *, fp8: bool = False, shard: Shard = WHOLE) -> Qwen3:
    """The network without storage, on the meta device."""
    with torch.device("meta"):
        model = Qwen3(config, shard).to(dtype)
    for module in model.modules():
        if isinstance(module, Linear) and (fp8 or config.quantization == "fp8"):
            module.hold_float8()
    return model


def weight_bytes(config: ModelConfig, dtype: torch.dtype, *, fp8: bool = False) -> int:
    """Memory that the network's weights take."""
    model = empty_model(config, dtype, fp8=fp8)
    return sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers()))


def load_model(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fp8: bool = False,
    shard: Shard = WHOLE,
) -> Qwen3:
    """The network with the checkpoint's weights, on the device. Peak memory is one tensor beyond the model's own.

    `config` is that of the shard (`Shard.config`), which gets its part of each tensor.
    With `fp8` the projections of a wide checkpoint are quantised as they come, each output with a scale of its own; on
    a CPU that takes a few float32 copies of the one tensor.
    Raises CheckpointError if a shard or tensor is missing, has another shape or type, or no place in this network.
    """
    stored = config.quantization == "fp8"
    model = empty_model(config, dtype, fp8=fp8, shard=shard).to_empty(device=device)
    model.rotary = type(model.rotary)(config.rope, config.head_dim).to(device)
    targets, scales_2L1 = _targets(model, config, stored), torch.zeros(2, config.num_layers, 1)
    if config.kv_scales:
        names = itertools.product(KV_SCALES, range(config.num_layers))
        rows = scales_2L1.flatten(0, 1)
        targets |= {f"model.layers.{n}.{name}": Target(row) for (name, n), row in zip(names, rows, strict=True)}
    missing = set(targets)
    for name, tensor in _stream(folder, config):
        if name not in targets:
            place = f"has no place in a {config.model_type} model{why_no_place(name)}"
            raise CheckpointError(f"{folder}: tensor {name!r} {place}")
        if name.endswith(".weight_scale") and tensor.dim() == 1:
            tensor = tensor[:, None]
        if name.endswith(KV_SCALES) and tensor.dim() == 0:
            tensor = tensor[None]
        if reason := targets[name].why_not(tensor):
            raise CheckpointError(f"{folder}: tensor {name!r} {reason}")
        targets[name].fill(tensor)
        missing.discard(name)
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise CheckpointError(f"{folder} lacks {counted(len(missing), 'tensor')}: {some}{', ..' * (len(missing) > 3)}")
    if shard.rank > 0 and (bias := model.layers.self_attn.o_proj.bias) is not None:
        bias.zero_()  # a part of a sum: the first rank adds it
    if config.kv_scales:
        if not (scales_2L1.isfinite() & (scales_2L1 > 0)).all():
            raise CheckpointError(f"{folder}: a scale of keys or values ({' or '.join(KV_SCALES)}) is not positive")
        model.kv_scales = tuple(Scales(*pair) for pair in scales_2L1[:, :, 0].t().tolist())
    return model.eval()


def fingerprint(model: Qwen3) -> int:
    """A number that tells checkpoints of one shape apart, from what all ranks have whole: a sum of 16-bit words."""
    whole = (model.embed_tokens, model.head_VH, model.norm)
    return sum(int(weight.data.view(torch.int16).sum()) for weight in whole)


def _targets(model: Qwen3, config: ModelConfig, stored: bool) -> dict[str, Target]:
    """Checkpoint name -> what it fills. `stored`: scales of quantised weights are tensors of the checkpoint."""
    targets: dict[str, Target] = {}
    scales = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        if not name.startswith("layers."):
            targets[f"{name}.weight" if name == "lm_head" else f"model.{name}.weight"] = Target(parameter.data)
            continue
        module, _, kind = name.removeprefix("layers.").rpartition(".")
        parent, leaf = module.rpartition(".")[0], module.rpartition(".")[2]
        scale_L1N = scales.get(f"layers.{module}.scale") if kind == "weight" else None
        for layer, (piece, rows) in itertools.product(range(config.num_layers), _pieces(leaf, config)):
            full = ".".join(filter(None, ("model.layers", str(layer), parent, piece, kind)))
            scale = None if scale_L1N is None else scale_L1N[layer].t()[rows]
            outputs, axis = _division(leaf, kind)
            targets[full] = Target(parameter.data[layer][rows], None if stored else scale, axis, model.shard)
            if stored and scale is not None:
                targets[f"{full}_scale"] = Target(scale, None, outputs, model.shard)
    return targets


def _division(leaf: str, kind: str) -> tuple[int | None, int | None]:
    """Along which axes ranks divide what a module has for each output, and its weight or bias itself."""
    if leaf in SUMMED:
        return None, 1 if kind == "weight" else None
    return (0, 0) if leaf in {fused for fused, _ in FUSED.values()} else (None, None)


def _pieces(leaf: str, config: ModelConfig) -> list[tuple[str, slice]]:
    """The checkpoint's names for parts of a module, and the rows of each: one of its own name, unless it is fused."""
    names = [name for name, (fused, _) in FUSED.items() if fused == leaf]
    if not names:
        return [(leaf, slice(None))]
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = [q, kv, kv] if leaf == "qkv_proj" else [config.intermediate_size] * 2
    ends = itertools.accumulate(sizes)
    return [(name, slice(end - size, end)) for name, size, end in zip(names, sizes, ends, strict=True)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stream(folder: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the network needs, shard by shard."""
    for file in progress(_shards(folder), "loading weights", "shard"):
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
            raise CheckpointError(
                f"{folder} lacks {len(absent)} of {counted(len(names), 'shard')}, first {absent[0]!r}"
            )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt"))
    hint = f" (found {others[0]}: only safetensors are read)" if others else ""
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
