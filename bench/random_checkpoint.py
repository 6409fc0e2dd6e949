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

SHAPES = {
    # hidden, layers, query heads, kv heads, intermediate, tied head
    "qwen3-tiny": (256, 4, 4, 2, 512, True),  # not one of Qwen's: small enough for tens of thousands of requests
    "qwen3-0.6b": (1024, 28, 16, 8, 3072, True),
    "qwen3-1.7b": (2048, 28, 16, 8, 6144, True),
    "qwen3-4b": (2560, 36, 32, 8, 9728, True),
    "qwen3-8b": (4096, 36, 32, 8, 12288, False),
}
VOCAB_SIZE, HEAD_DIM = 151_936, 128


def config_of(shape: str) -> dict[str, object]:
    """config.json of a shape."""
    hidden, layers, heads, kv_heads, intermediate, tied = SHAPES[shape]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": [151_645, 151_643],
    }


def tensors_of(shape: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights by their checkpoint names."""
    hidden, layers, heads, kv_heads, intermediate, tied = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        weight = torch.empty(size, dtype=torch.bfloat16, device=device)
        return weight.normal_(0.0, 0.02, generator=generator).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(VOCAB_SIZE, hidden), "model.norm.weight": ones(hidden)}
    if not tied:
        tensors["lm_head.weight"] = normal(VOCAB_SIZE, hidden)
    for i in range(layers):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": ones(hidden),
            f"{layer}.post_attention_layernorm.weight": ones(hidden),
            f"{layer}.self_attn.q_norm.weight": ones(HEAD_DIM),
            f"{layer}.self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{layer}.self_attn.q_proj.weight": normal(heads * HEAD_DIM, hidden),
            f"{layer}.self_attn.k_proj.weight": normal(kv_heads * HEAD_DIM, hidden),
            f"{layer}.self_attn.v_proj.weight": normal(kv_heads * HEAD_DIM, hidden),
            f"{layer}.self_attn.o_proj.weight": normal(hidden, heads * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": normal(intermediate, hidden),
            f"{layer}.mlp.up_proj.weight": normal(intermediate, hidden),
            f"{layer}.mlp.down_proj.weight": normal(hidden, intermediate),
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
