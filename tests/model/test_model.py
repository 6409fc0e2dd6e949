"""The network and its loader against Hugging Face's, through the same files; and what a wrong checkpoint says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import hf, tiny
from widebeam.errors import CheckpointError
from widebeam.kv.pools import make_pools
from widebeam.model.attention import Plans, prefill_attention
from widebeam.model.config import load_model_config
from widebeam.model.layers import float32_linear
from widebeam.model.ops import quantize_rows
from widebeam.model.parallel import WHOLE, Shard
from widebeam.model.reference import TorchBackend
from widebeam.model.tokenizer import Tokenizer
from widebeam.model.weights import load_model, resolve_checkpoint

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {}),
    "untied": ("qwen3", {"tie_word_embeddings": False}),
    "bias": ("qwen3", {"attention_bias": True}),
    "one-kv-head": ("qwen3", {"num_key_value_heads": 1}),
    "theta": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "yarn-untruncated": ("qwen3", {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.3}}),
    "linear": ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "sharded": ("qwen3", {"max_shard_size": "20KB"}),
    "extended-vocabulary": ("qwen3", {"vocab_size": 300}),
}


def prefill_logits(folder: Path, prompts: list[list[int]], *, fp8: bool = False, shard: Shard = WHOLE) -> torch.Tensor:
    """Logits at every position of packed prompts."""
    config = shard.config(load_model_config(folder))
    model = load_model(folder, config, torch.float32, CPU, fp8=fp8, shard=shard)
    plan, handle = Plans(TorchBackend(config, 8, 8, torch.float32, CPU)).prefill(4, None)
    plan.plan([len(prompt) for prompt in prompts], sum(map(len, prompts)))
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    slots = torch.arange(len(tokens))
    rotation, stream = model.rotation(positions), model.embed(tokens)
    attention = model.layers.self_attn
    pools = make_pools(config, len(tokens), torch.float32, CPU)
    for layer in range(config.num_layers):

        def attend(qkv: Tensor, layer: int = layer) -> tuple[Tensor, Tensor]:
            q, k = attention.place(layer, qkv, rotation, pools.of(layer), slots, len(tokens))
            rows = prefill_attention(q, k, attention.values(qkv), handle)[0].flatten(1)
            return quantize_rows(rows) if attention.o_proj.quantized else (rows, rows.new_empty(0))

        stream = model.layers(layer, stream, attend)
    hidden = model.hidden(stream)
    return model.logits(hidden)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_hugging_face(case: str, tmp_path: Path) -> None:
    kind, overrides = CASES[case]
    folder = tiny.save_checkpoint(tmp_path / "m", kind=kind, scale=0.1, **overrides)
    torch.manual_seed(1)
    prompts = [torch.randint(0, 60, (length,)).tolist() for length in (33, 1, 500)]
    with torch.no_grad():
        reference = hf.load(folder, torch.float32)
        expected = torch.cat([reference(torch.tensor([prompt])).logits[0] for prompt in prompts])
    torch.testing.assert_close(prefill_logits(folder, prompts), expected, atol=1e-5, rtol=1e-5)


def test_old_rope_spelling(tmp_path: Path) -> None:
    """rope_theta and rope_scaling of transformers 4 mean the same as rope_parameters."""
    folder = tiny.save_checkpoint(tmp_path / "m", rope_parameters=YARN)
    new = load_model_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    raw["rope_theta"] = 1e6
    raw["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(raw))
    assert load_model_config(folder) == new


def test_float32_logits_from_bfloat16_operands() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(100, 64).bfloat16()
    exact = x.double() @ w.double().t()
    torch.testing.assert_close(float32_linear(x, w).double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
def test_float32_logits_from_bfloat16_operands_on_cuda() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(100, 64).bfloat16()
    exact = x.double() @ w.double().t()
    logits = float32_linear(x.cuda(), w.cuda())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.cpu().double(), exact, atol=1e-4, rtol=1e-5)


def break_tensor(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


NORM = "model.layers.1.input_layernorm.weight"
BROKEN: dict[str, tuple[Any, str]] = {
    "missing tensor": (lambda f: break_tensor(f, lambda t: t.pop(NORM)), NORM),
    "unexpected tensor": (
        lambda f: break_tensor(f, lambda t: t.update({"model.extra.weight": torch.ones(2)})),
        "model.extra.weight",
    ),
    "misshapen tensor": (lambda f: break_tensor(f, lambda t: t.update({NORM: torch.ones(7)})), NORM),
    "truncated file": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        "model.safetensors",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "other model": (lambda f: edit_config(f, model_type="llama"), "llama"),
    "own code": (lambda f: edit_config(f, auto_map={"AutoModel": "x.Y"}), "auto_map"),
    "sliding window": (lambda f: edit_config(f, use_sliding_window=True), "sliding"),
    "quantised": (lambda f: edit_config(f, quantization_config={"quant_method": "fp8"}), "fp8"),
    "activation": (lambda f: edit_config(f, hidden_act="gelu"), "gelu"),
    "rope kind": (lambda f: edit_config(f, rope_parameters={"rope_type": "longrope"}), "longrope"),
    "rope field": (lambda f: edit_config(f, rope_parameters={"rope_type": "yarn", "mscale": 2.0}), "mscale"),
    "no field": (lambda f: (f / "config.json").write_text('{"model_type": "qwen3"}'), "num_attention_heads"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_named(case: str, tmp_path: Path) -> None:
    folder = tiny.save_checkpoint(tmp_path / "m")
    damage, names = BROKEN[case]
    damage(folder)
    with pytest.raises(CheckpointError, match=names.replace(".", r"\.")):
        load_model(folder, load_model_config(folder), torch.float32, CPU)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny.save_checkpoint(tmp_path / "m", max_shard_size="20KB")
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load_model(folder, load_model_config(folder), torch.float32, CPU)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = tiny.save_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="only safetensors"):
        load_model(folder, load_model_config(folder), torch.float32, CPU)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "no/such/model"])
def test_a_model_that_is_nowhere(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere|no/such/model"):
        resolve_checkpoint(name)


def test_tokenizer(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer is not None
    ids = tokenizer.encode("watched <a_3><b_0> next")
    assert ids == [7, tokenizer.token_id("<a_3>"), tokenizer.token_id("<b_0>"), 8]
    assert tokenizer.token_id("<z_9>") is None
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == [1, 5, 9, 2, 1, 6]


JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
NO_JSON: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read: it is empty"),
    "cut": (b'{"version": ', "cannot be read: Expecting value"),
    "latin": (b'{"a": "\xe9"}', "cannot be read: 'utf-8' codec can't decode byte 0xe9"),
    "marked": (b"\xef\xbb\xbf{}", "cannot be read: it begins with a byte order mark"),
    "deep": (b"[" * 100_000, "cannot be read: it is nested too deeply"),
    "list": (b"[1]", "is not a JSON object"),
}
BROKEN_FILES = [(name, *damage) for name in JSON_FILES for damage in NO_JSON.values()] + [
    ("config.json", b"{}", ": model_type None is not supported"),
    ("config.json", b'{"model_type": "qwen3"}', " lacks 'num_attention_heads'"),
    ("generation_config.json", b'{"eos_token_id": [2, "x"]}', " has a wrong value: eos_token_id is [2, 'x']"),
    ("tokenizer.json", b"{}", " holds no tokenizer: Model missing"),
    ("chat_template.jinja", b"\xe9", " cannot be read: 'utf-8' codec can't decode byte 0xe9"),
    ("model.safetensors", b"", " cannot be read: Error while deserializing header"),
    ("model.safetensors", b'{"a": 1}', " cannot be read: Error while deserializing header"),
]


@pytest.mark.parametrize(("name", "content", "words"), BROKEN_FILES)
def test_a_broken_file_is_named(checkpoint: Path, tmp_path: Path, name: str, content: bytes, words: str) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, load_model_config(folder), torch.float32, CPU)
        Tokenizer.load(folder)
    assert str(caught.value).startswith(f"{folder}/{name}") and words in str(caught.value)


def test_a_broken_config_is_not_blamed_on_the_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"copy/config\.json cannot be read: Expecting property name"):
        Tokenizer.load(folder)


def test_a_broken_chat_template_ends_the_start(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text("{{ messages }}\n{% for m in messages %}")
    with pytest.raises(
        CheckpointError, match=r"chat template in .*copy is broken at line 2: Unexpected end of template"
    ):
        Tokenizer.load(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('as it likes') }}")
    assert Tokenizer.load(folder) is not None


def test_a_missing_file_of_the_tokenizer_is_named(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"copy has tokenizer_config.json, but no tokenizer.json$"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.load(folder) is None
