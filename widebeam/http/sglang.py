"""The wire format of SGLang's /generate, as of 0.5.23, with its beam fields. All of its fields are known here."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from widebeam.config import Seed
from widebeam.engine.request import MAX_TOP_LOGPROBS, LevelBeams, Normalizer, TokenId
from widebeam.http.batches import MAX_BATCH
from widebeam.http.body import Neutral, known_fields
from widebeam.http.protocol import MAX_PROMPT_IDS, BeamWidth, CacheSalt, PromptIds, RequestId, SearchOptions
from widebeam.http.sampling import Levels, MinTokens, SamplingFields, StopString

LABELS = ("routing_key", "conversation_id", "custom_labels", "external_trace_header", "received_time")
"""There is one engine to route to."""

_GENERATE_OFF = """
    input_embeds session_id session_params no_logs token_ids_logprob
    return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
    return_sampling_mask sampling_logprobs_mode return_entropy return_hidden_states return_routed_experts
    return_indexer_topk return_bytes
    image_data video_data audio_data mm_hashes mm_content_hashes modalities use_audio_in_video video_config
    max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config
    mm_processor_kwargs
    lora_path lora_id custom_logit_processor positional_embed_overrides kv_hints background require_reasoning
    max_thinking_tokens watermark
    bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank
    data_parallel_rank disagg_prefill_dp_rank need_wait_for_mm_inputs num_items_assigned encoder_urls
    multi_item_delimiter_indices token_indices_to_pool
"""
GENERATE_NEUTRAL: Neutral = {
    **dict.fromkeys(_GENERATE_OFF.split(), ()),
    "log_metrics": (True,),
    "logprob_start_len": (-1,),
    "routed_experts_start_len": (0,),
}
_SAMPLING_OFF = "stop_regex json_schema regex ebnf structural_tag custom_params watermark"
SAMPLING_NEUTRAL: Neutral = {
    **dict.fromkeys(_SAMPLING_OFF.split(), ()),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
}


TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
CacheSalts = CacheSalt | Annotated[list[CacheSalt], Meta(max_length=MAX_BATCH)]


@known_fields(SAMPLING_NEUTRAL)
class SamplingParams(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`: SGLang's fields, `use_beam_search` and `suppress_special_tokens`."""

    max_new_tokens: Levels | UnsetType | None = UNSET
    """Unset: 128, or the depth of the catalog. null: until the context ends."""
    min_tokens: MinTokens | None = msgspec.field(default=None, name="min_new_tokens")
    seed: Seed | None = msgspec.field(default=None, name="sampling_seed")
    stop: Annotated[str, Meta(max_length=1024)] | Annotated[list[StopString], Meta(max_length=32)] | None = None


@known_fields(GENERATE_NEUTRAL, LABELS)
class GenerateRequest(SearchOptions, kw_only=True, forbid_unknown_fields=True):
    """SGLang's top-level fields and those of `SearchOptions`. Exactly one of `text` and `input_ids` is given."""

    text: str | Annotated[list[str], Meta(max_length=MAX_BATCH)] | None = None
    input_ids: Annotated[list[TokenId | PromptIds], Meta(max_length=MAX_PROMPT_IDS)] | None = None
    sampling_params: SamplingParams | Annotated[list[SamplingParams], Meta(max_length=MAX_BATCH)] | None = None
    stream: bool | None = None
    rid: RequestId | Annotated[list[RequestId], Meta(max_length=MAX_BATCH)] | None = None
    return_logprob: bool | Annotated[list[bool], Meta(max_length=MAX_BATCH)] | None = None
    top_logprobs_num: TopLogprobs | Annotated[list[TopLogprobs], Meta(max_length=MAX_BATCH)] | None = None
    """Needs return_logprob."""
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    beam_width: BeamWidth | None = None
    """For sampling_params that have no beam field: width and number of sequences."""
    cache_salt: CacheSalts | None = None
    extra_key: CacheSalts | None = None
    """A second salt: both must be equal for prompts to share."""
    return_beam_details: bool | None = None
    """Not SGLang's: the beams that were live after each level."""


LogprobTriple = tuple[float, int, str | None]
"""(log-probability, token id, text if asked for)"""


class BeamMeta(msgspec.Struct, kw_only=True):
    """`meta_info` of the beams behind the first."""

    finish_reason: dict[str, Any] | None
    """None in a stream, while a text grows."""
    sequence_score: float | UnsetType = UNSET
    items: list[int | str] | UnsetType = UNSET
    """With a catalog: ids of the items that the sequence spells."""
    output_token_logprobs: list[LogprobTriple] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobTriple]] | UnsetType = UNSET


class RequestMeta(BeamMeta, kw_only=True):
    """`meta_info` of an answer and of its first beam. `e2e_latency` is in seconds, the timestamp in Unix seconds."""

    id: str
    prompt_tokens: int
    completion_tokens: int
    e2e_latency: float
    response_sent_to_client_ts: float
    cached_tokens: int
    reasoning_tokens: int = 0
    num_retractions: int = 0
    weight_version: str = "default"
    normalizer: Normalizer
    """Over what the scores are normalised; SGLang knows only `vocab`."""
    input_token_logprobs: list[LogprobTriple] | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobTriple]] | UnsetType = UNSET
    beam_details: list[LevelBeams] | UnsetType = UNSET
    beam_results: list[BeamResult] | UnsetType = UNSET


class BeamResult(msgspec.Struct, kw_only=True):
    """One beam; the first carries the `RequestMeta`."""

    text: str
    output_ids: list[int]
    meta_info: BeamMeta


class GenerateResponse(msgspec.Struct, kw_only=True):
    """The best sequence, and all of them in `meta_info.beam_results` where beams were asked for; or one sample."""

    text: str
    output_ids: list[int]
    meta_info: RequestMeta
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    index: int | UnsetType = UNSET
    """Place in the list of answers, in a stream."""

    @property
    def beams(self) -> list[BeamResult]:
        """Best first; none of a text."""
        return self.meta_info.beam_results or []
