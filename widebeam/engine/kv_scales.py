"""The scales of float8 context pages: one for each layer's keys and one for its values, chosen once, at start.

They follow from the checkpoint alone, never from what is asked: so a prompt's pages are the same in any company.

Letters: T tokens, L layers.
"""

from __future__ import annotations

import logging
import math

import msgspec
import numpy as np
import torch
from torch import Tensor

from widebeam.engine.shapes import request_rung
from widebeam.engine.step import rows_for
from widebeam.errors import ConfigError
from widebeam.kv.pools import Scales, make_pools
from widebeam.model.attention import Plans, prefill_attention
from widebeam.model.ops import FP8_MAX
from widebeam.model.qwen3 import Attend, Qwen3

log = logging.getLogger(__name__)
TOKENS = 1024
"""Length of the prompt that is measured."""
MARGIN = 2.0
"""How much larger than any that was measured a key or value may be before it is clamped."""
LEAST_KEY_SCALE = 2.0**-6
"""FlashInfer takes a key behind a context's end for one whose product with a query is -50,000, times this scale: with a
smaller one such keys would count."""


def choose_scales(model: Qwen3, plans: Plans, max_context_len: int) -> tuple[Scales, ...]:
    """Those of the checkpoint, or else measured ones, one pair a layer; no key scale under LEAST_KEY_SCALE. Raises
    ConfigError."""
    if model.kv_scales:
        log.info("float8 context KV with the checkpoint's scales, those of keys at least %g", LEAST_KEY_SCALE)
        return tuple(Scales(max(k, LEAST_KEY_SCALE), v) for k, v in model.kv_scales)
    tokens = min(TOKENS, max_context_len)
    log.info("float8 context KV with scales measured on %d random tokens", tokens)
    return tuple(_scales(layer, k, v) for layer, (k, v) in enumerate(_largest(model, plans, tokens).tolist()))


def _scales(layer: int, k: float, v: float) -> Scales:
    if not math.isfinite(k + v):
        raise ConfigError(f"--kv-cache-dtype fp8: layer {layer} has keys or values that are not finite")
    return Scales(max(_scale(k), LEAST_KEY_SCALE), _scale(v))


def _scale(largest: float) -> float:
    """The least power of two under which `MARGIN` times the largest still fits: by one, nothing is rounded twice."""
    return 2.0 ** math.ceil(math.log2(max(largest, 2.0**-20) * MARGIN / FP8_MAX))


@torch.inference_mode()
def _largest(model: Qwen3, plans: Plans, tokens: int) -> Tensor:
    """The largest magnitude of a key, after norm and rotation, and of a value in each layer, over one prompt of random
    tokens that is always the same: [L, 2] float32. All ranks get those over all heads."""
    config, attention, device = model.config, model.layers.self_attn, model.embed_tokens.device
    token_ids = np.random.default_rng(0).integers(config.vocab_size, size=tokens)
    token_T, slot_T = torch.from_numpy(token_ids).to(device), torch.arange(tokens, device=device)
    rotation, stream = model.rotation(slot_T), model.embed(token_T)
    one_layer = msgspec.structs.replace(config, num_layers=1)
    pools = make_pools(one_layer, tokens, model.embed_tokens.dtype, device).of(0)  # written, never read
    plan, handle = plans.prefill(request_rung(1), None)
    plan.plan([tokens], tokens)
    largest_L2 = torch.zeros(config.num_layers, 2, device=device)

    def attend_in(layer: int) -> Attend:
        def attend(qkv: Tensor) -> tuple[Tensor, Tensor]:
            q, k = attention.place(layer, qkv, rotation, pools, slot_T, tokens)
            v = attention.values(qkv)
            largest_L2[layer] = torch.stack((k.abs().amax(), v.abs().amax()))
            return rows_for(attention, prefill_attention(q, k, v, handle)[0])

        return attend

    for layer in range(config.num_layers):
        stream = model.layers(layer, stream, attend_in(layer))
    return model.shard.largest(largest_L2)
