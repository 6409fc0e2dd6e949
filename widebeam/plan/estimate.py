"""Memory, times and replicas for a model, a load and a GPU. Imports no torch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from widebeam.config import EngineConfig
from widebeam.engine.pool_sizes import least_sizes
from widebeam.errors import ConfigError
from widebeam.model.config import ModelConfig
from widebeam.plan.gpus import Gpu
from widebeam.plan.replica import Limits, Replica, open_loop
from widebeam.plan.waves import WaveModel
from widebeam.plan.work import Prompt

GIB = 2**30
NODE_BYTES = 20
"""Of a node of a catalog's prefix tree on the device, as --catalog-memory-gib counts it."""
CODES = 8192
"""Codes of a catalog's level, unless something else is said."""
SIMULATED = 20_000
"""Requests from which p50 and p99 are taken."""


def weight_bytes(model: ModelConfig, *, fp8: bool) -> int:
    """Memory that the network's weights take, 2 bytes an element; projections in float8 have 1, and a float32 scale
    for each output."""
    H, N, Q, K, D = model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim
    I, V = model.intermediate_size, model.vocab_size  # noqa: E741
    outputs = (Q + 2 * K) * D + H + 2 * I + H
    weights = (Q + 2 * K) * D * H + H * Q * D + 2 * I * H + H * I
    biases = model.qkv_bias * (Q + 2 * K) * D + model.o_bias * H
    norms = 2 * H + 2 * D * model.qk_norm
    layer = weights * (1 if fp8 else 2) + outputs * 4 * fp8 + (biases + norms) * 2
    return N * layer + 2 * (V * H * (1 if model.tied_head else 2) + H)


def tree_bytes(items: int, levels: int, codes: int) -> int:
    """Memory of the prefix tree of so many items with random SIDs."""
    nodes = 1.0
    for level in range(1, levels + 1):
        prefixes = float(codes) ** level
        nodes += -prefixes * math.expm1(items * math.log1p(-1.0 / prefixes)) if prefixes > 1 else 1.0
    return int(nodes) * NODE_BYTES


def work_bytes(model: ModelConfig, config: EngineConfig, context: int) -> int:
    """Work space, roughly: activations of the most prompt tokens or logits of the most rows, twice, as graphs have
    theirs apart. The server measures it at start."""
    H, I = model.hidden_size, model.intermediate_size  # noqa: E741
    attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    prompts = max(config.max_wave_tokens, context) * 2 * (2 * H + max(3 * I, attention))
    rows = config.max_wave_rows * (4 * model.vocab_size + 2 * (2 * H + 3 * I))
    return 2 * max(prompts, rows)


def memory(
    model: ModelConfig, gpu: Gpu, config: EngineConfig, context: int, tokens: int, *,
    fp8: bool, kv_bytes: int, items: int | None, codes: int, users: int | None,
) -> dict[str, Any]:  # fmt: skip
    """GiB by what they are for, and how many histories fit. Raises ConfigError if one wave does not."""
    longest = config.max_context_len or model.longest_context
    kv, page = model.kv_elements_per_token, config.page_size
    tree = tree_bytes(items, tokens, codes) if items else 0
    gib = {
        "weights": weight_bytes(model, fp8=fp8) / GIB,
        "catalog": max(config.catalog_memory_gib, 2 * tree / GIB) + config.filter_memory_gib,
        "beams' KV": least_sizes(config, longest).beam_slots * kv * 2 / GIB,
        "work space": work_bytes(model, config, longest) / GIB,
    }
    pool = gpu.memory_gib * config.gpu_memory_utilization - sum(gib.values())
    page_gib = kv * kv_bytes * page / GIB
    needed = least_sizes(config, longest).context_pages * page_gib
    if pool < needed:
        raise ConfigError(
            f"{needed - pool:.1f} GiB are missing on --gpu {gpu.name}: of its {gpu.memory_gib:g} GiB "
            + ", ".join(f"{name} take {size:.1f}" for name, size in gib.items())
            + f", and the longest prompt or one full wave {needed:.1f}. Take a larger --gpu, --quantization fp8 or "
            f"--kv-cache-dtype fp8, or lower --max-wave-rows, --max-context-len or --max-wave-tokens"
        )
    history = -(-context // page)
    return {
        "gib": gib | {"context KV": pool},
        "tree_gib": tree / GIB,
        "raise_catalog_memory": 2 * tree / GIB > config.catalog_memory_gib,
        "history_mib": history * page_gib * 1024,
        "beams_mib": kv * 2 / 2**20,
        "pool_tokens": int(pool / page_gib) * page,
        "histories_on_gpu": int(pool / page_gib) // history,
        "users": users,
        "host_gib": None if users is None else users * history * page_gib,
    }


def speed(
    waves: WaveModel, limits: Limits, prompt: Prompt, qps: float, utilization: float, most: int
) -> dict[str, Any]:
    """One wave, a GPU full of them, and the replicas that a load needs. `most`: prompts whose pages fit together."""
    new = prompt.context - prompt.cached
    full, closing = limits.full(new), limits.closing(new)
    if most < full:
        full, closing = max(1, most), "the context pool"
    one, wave = waves.time([prompt]), waves.time([prompt] * full)
    peak = full / wave.total * 1e3
    replicas = max(1, math.ceil(qps / (utilization * peak)))
    time = lru_cache(lambda count: waves.time([prompt] * count))
    bounded = Limits(full, limits.tokens, limits.rows, limits.width)
    replica = Replica(bounded, lambda prompts: time(len(prompts)), lambda job: prompt.cached)
    seconds = sorted(open_loop(replica, qps / replicas, prompt, SIMULATED))
    return {
        "one_request_ms": one._asdict(), "full_wave_ms": wave._asdict(), "full_wave_requests": full,
        "closed_by": closing, "requests_per_s": peak, "replicas": replicas, "qps_per_replica": qps / replicas,
        "utilization": qps / replicas / peak, "mean_wave_requests": SIMULATED / replica.waves,
        "p50_ms": seconds[SIMULATED // 2] * 1e3, "p99_ms": seconds[SIMULATED * 99 // 100] * 1e3,
        "shares": waves.shares([prompt] * full),
    }  # fmt: skip
