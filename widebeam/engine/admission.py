"""From what a caller asks to a checked search, or to an error that names the field and its limit. Imports no torch."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
import uuid
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import numpy as np

from widebeam.constraints.catalog import Catalog
from widebeam.engine.limits import Limits
from widebeam.engine.request import Normalizer, Sampling, SearchParams
from widebeam.engine.wave import Search
from widebeam.engine.widths import bound_widths, join_factor
from widebeam.errors import InvalidRequest
from widebeam.faults import counted, find_fault
from widebeam.kv.prefix import Prefix
from widebeam.policies import LevelPlan, level_plan

DEFAULT_NEW_TOKENS = 128
"""Levels of a search that names none and has no catalog: SGLang's default."""
MAX_LIKELY = 1 << 21
"""Likely tokens of one answer, over all sequences and levels."""


def make_params(fields: dict[str, Any]) -> SearchParams:
    """SearchParams from plain values, with every declared bound enforced. Raises InvalidRequest."""
    if place := _not_finite(fields):  # NaN passes every comparison of a bound
        raise InvalidRequest(f"{place} must be a finite number", param=place)
    try:
        return msgspec.convert(fields, SearchParams)
    except msgspec.ValidationError as error:
        fault = find_fault(error, SearchParams)
        raise InvalidRequest(fault.text, param=fault.place or None) from None


def _not_finite(value: Any, place: str = "") -> str:
    """Where a number is NaN or infinite, as a path; empty if none is."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else place
    if not isinstance(value, dict):
        return ""
    return next((found for key, one in value.items() if (found := _not_finite(one, f"{place}.{key}".strip(".")))), "")


def admit(
    token_ids: Seq[int] | np.ndarray,
    params: SearchParams,
    catalog: Catalog | None,
    limits: Limits,
) -> tuple[Search, list[str]]:
    """The search that answers the request, filters left aside, and warnings about what has no effect. Raises
    InvalidRequest."""
    tokens = opened_prompt(token_ids, catalog, limits)
    levels = _levels(params, catalog, limits)
    sampling = _sampling(params, levels, catalog, limits)
    plan = _plan(params, levels, catalog, limits)
    widths = plan.widths
    if plan.noise and plan.seed is None:
        plan = plan._replace(seed=_prompt_seed(tokens))
    if params.n > widths[-1]:
        raise InvalidRequest(f"n is {params.n}, but the beam is only {widths[-1]} wide at its last level", param="n")
    if len(tokens) + levels > limits.max_context_len:
        raise InvalidRequest(
            f"the prompt has {counted(len(tokens), 'token')}, and {levels} more shall be generated, but the context "
            f"length is {limits.max_context_len}",
            code="context_too_long",
            param="input_ids",
        )
    if params.n * levels * params.top_logprobs > MAX_LIKELY:
        raise InvalidRequest(
            f"top_logprobs asks for {params.n} x {levels} x {params.top_logprobs} tokens, over the limit of "
            f"{MAX_LIKELY}",
            code="search_too_large",
            param="top_logprobs",
        )
    greedy = params.policy is None and params.beam_width in (None, 1)
    stops, warnings = _stops(params, catalog, limits)
    special, more = _special(params, catalog, limits)
    search = Search(
        request_id=params.request_id or uuid.uuid4().hex,
        token_ids=tokens,
        widths=widths if sampling else bound_widths(widths, catalog, limits.vocab_size - len(special), plan.cap),
        num_returned=params.n,
        catalog=catalog,
        normalizer=_normalizer(params, catalog),
        join=join_factor(catalog, greedy=greedy, has_stops=bool(stops)),
        stop_token_ids=stops,
        length_penalty=params.length_penalty,
        sampling=sampling,
        special_token_ids=special,
        plan=None if plan.only_widths else plan,
        top_logprobs=params.top_logprobs,
        return_beam_details=params.return_beam_details,
        prefix=_prefix(tokens, params, limits),
        keep_until=None if params.ttl_s is None else time.monotonic() + params.ttl_s,
    )
    limits.check(search)
    return search, warnings + more


def opened_prompt(token_ids: Seq[int] | np.ndarray, catalog: Catalog | None, limits: Limits) -> np.ndarray:
    """The tokens that are computed, int32 [T]: those of the prompt, and the catalog's begin marker. Raises
    InvalidRequest."""
    if len(token_ids) > limits.max_context_len:  # first: looking at a million tokens takes time
        raise InvalidRequest(
            f"the prompt has {counted(len(token_ids), 'token')}, but the context length is {limits.max_context_len}",
            code="context_too_long",
            param="input_ids",
        )
    tokens = check_tokens(token_ids, limits.vocab_size)
    return tokens if catalog is None else catalog.markers.opened(tokens)


def _prefix(tokens: np.ndarray, params: SearchParams, limits: Limits) -> Prefix | None:
    if limits.config.prefix_cache == "off":
        return None
    return Prefix.of(tokens, limits.wave.page_size, (params.cache_salt or "").encode())


def check_tokens(token_ids: Seq[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Prompt tokens as int32, each inside the vocabulary: nothing else ever reaches the device."""
    if len(token_ids) == 0:
        raise InvalidRequest("the prompt is empty", code="empty_prompt", param="input_ids")
    try:
        tokens = np.asarray(token_ids)
    except ValueError:  # rows of different lengths
        tokens = np.empty((0, 0))
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise InvalidRequest("input_ids must be a flat list of integers", param="input_ids")
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        raise InvalidRequest(
            f"token id {tokens[outside[0]]} at position {outside[0]} is outside the vocabulary of {vocab_size}",
            code="token_out_of_vocabulary",
            param="input_ids",
        )
    return tokens.astype(np.int32)


def _levels(params: SearchParams, catalog: Catalog | None, limits: Limits) -> int:
    wanted = params.max_new_tokens
    if catalog is not None:
        if wanted is not None and wanted < catalog.depth:
            raise InvalidRequest(
                f"max_new_tokens is {wanted}, but items of catalog {catalog.name!r} are "
                f"{counted(catalog.depth, 'token')} deep",
                code="depth_mismatch",
                param="max_new_tokens",
            )
        return catalog.depth
    if wanted is not None and wanted > limits.config.max_levels:
        raise InvalidRequest(
            f"max_new_tokens is {wanted}, over the limit of {limits.config.max_levels} (--max-levels)",
            param="max_new_tokens",
        )
    return wanted or min(DEFAULT_NEW_TOKENS, limits.config.max_levels)


def _plan(params: SearchParams, levels: int, catalog: Catalog | None, limits: Limits) -> LevelPlan:
    if params.sampling is not None:
        plan, param = LevelPlan((params.n,) * levels), "n"
    else:
        plan = level_plan(params.policy, levels, params.beam_width)
        param = "beam_width" if params.policy is None or params.policy.widths is None else "policy.widths"
    widest, limit = max(plan.widths), limits.config.max_beam_width
    if widest > limit:
        raise InvalidRequest(
            f"{param} asks for {widest} beams, over the limit of {limit} (--max-beam-width)",
            code="beam_too_wide",
            param=param,
        )
    if catalog is None and params.sampling is None and widest > limits.vocab_size:
        raise InvalidRequest(
            f"{param} asks for {widest} beams, more than the vocabulary's {limits.vocab_size} tokens",
            code="beam_too_wide",
            param=param,
        )
    return plan


def _prompt_seed(tokens: np.ndarray) -> int:
    """One that differs between prompts, and is the same for the same prompt."""
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little", signed=True)


def _normalizer(params: SearchParams, catalog: Catalog | None) -> Normalizer:
    if catalog is None and params.normalizer in ("level", "legal"):
        raise InvalidRequest(f"normalizer {params.normalizer!r} needs a catalog", param="normalizer")
    if params.normalizer == "legal" and params.top_logprobs:
        raise InvalidRequest("top_logprobs are not available with normalizer 'legal'", param="top_logprobs")
    return params.normalizer or ("vocab" if catalog is None else "level")


def _stops(params: SearchParams, catalog: Catalog | None, limits: Limits) -> tuple[tuple[int, ...], list[str]]:
    for token in params.stop_token_ids:
        if token >= limits.vocab_size:
            raise InvalidRequest(
                f"stop token {token} is outside the vocabulary of {limits.vocab_size}",
                code="token_out_of_vocabulary",
                param="stop_token_ids",
            )
    if catalog is not None:
        warned = ["stop_token_ids have no effect with a catalog: an item's depth ends its sequence"]
        return (), warned if params.stop_token_ids else []
    if params.ignore_eos:
        return (), []
    return tuple(sorted(limits.eos_token_ids.union(params.stop_token_ids))), []


def _sampling(params: SearchParams, levels: int, catalog: Catalog | None, limits: Limits) -> Sampling | None:
    """Checked against the rest of the request, with a seed. Raises InvalidRequest."""
    sampling = params.sampling
    if sampling is None:
        return None
    if catalog is not None or params.policy is not None or params.beam_width not in (None, 1):
        raise InvalidRequest(
            "sampling draws texts of one beam: no catalog, policy or beam_width over 1", param="sampling"
        )
    if params.return_beam_details:
        raise InvalidRequest(
            "return_beam_details is for beams and greedy texts: a drawn text has no beams", param="return_beam_details"
        )
    for token in sampling.logit_bias:
        if token >= limits.vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token}, outside the vocabulary of {limits.vocab_size}",
                code="token_out_of_vocabulary",
                param="logit_bias",
            )
    if sampling.min_new_tokens > levels:
        raise InvalidRequest(
            f"min_new_tokens is {sampling.min_new_tokens}, but only {levels} are to be generated",
            param="min_new_tokens",
        )
    if sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=secrets.randbits(63))


def _special(params: SearchParams, catalog: Catalog | None, limits: Limits) -> tuple[tuple[int, ...], list[str]]:
    """Tokens that are never to be generated, and a warning where they could not be anyway."""
    if not params.suppress_special_tokens:
        return (), []
    if catalog is not None:
        return (), ["suppress_special_tokens has no effect with a catalog: only its items are legal"]
    if not limits.special_token_ids:
        raise InvalidRequest("the model's special tokens are not known", param="suppress_special_tokens")
    return limits.special_token_ids, []
