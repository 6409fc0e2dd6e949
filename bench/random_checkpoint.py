"""Write a checkpoint of a real Qwen3 shape with random weights: speed and memory do not depend on what they are.

    python bench/random_checkpoint.py qwen3-1.7b /tmp/qwen3-1.7b

No tokenizer is written: such a model takes token ids. Weights are normal with spread 0.02, from a fixed seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from widebeam.plan.shapes import SHAPES


def config_of(shape: str) -> dict[str, object]:
    """config.json of a shape."""
    model = SHAPES[shape]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": model.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": model.tied_head,
        "torch_dtype": model.dtype,
        "eos_token_id": list(model.eos_token_ids),
    }


def tensors_of(shape: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights by their checkpoint names."""
    model = SHAPES[shape]
    hidden, heads, kv_heads, head_dim = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        weight = torch.empty(size, dtype=torch.bfloat16, device=device)
        return weight.normal_(0.0, 0.02, generator=generator).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(model.vocab_size, hidden), "model.norm.weight": ones(hidden)}
    if not model.tied_head:
        tensors["lm_head.weight"] = normal(model.vocab_size, hidden)
    for i in range(model.num_layers):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": ones(hidden),
            f"{layer}.post_attention_layernorm.weight": ones(hidden),
            f"{layer}.self_attn.q_norm.weight": ones(head_dim),
            f"{layer}.self_attn.k_norm.weight": ones(head_dim),
            f"{layer}.self_attn.q_proj.weight": normal(heads * head_dim, hidden),
            f"{layer}.self_attn.k_proj.weight": normal(kv_heads * head_dim, hidden),
            f"{layer}.self_attn.v_proj.weight": normal(kv_heads * head_dim, hidden),
            f"{layer}.self_attn.o_proj.weight": normal(hidden, heads * head_dim),
            f"{layer}.mlp.gate_proj.weight": normal(model.intermediate_size, hidden),
            f"{layer}.mlp.up_proj.weight": normal(model.intermediate_size, hidden),
            f"{layer}.mlp.down_proj.weight": normal(hidden, model.intermediate_size),
        }
    return tensors


def write_checkpoint(shape: str, folder: Path) -> Path:
    """Make the folder of a shape, on a GPU where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(shape, device), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(write_checkpoint(arguments.shape, arguments.folder))
