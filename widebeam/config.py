"""Every setting, as one frozen tree. settings.py says where they come from, and reference.py tells them to users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from widebeam.errors import ConfigError
from widebeam.faults import find_fault, value_at

Positive = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MAX_BEAM_WIDTH = 5000
MAX_LEVELS = 512
MAX_GIB = 1024
ALIASES = {"--max-model-len": "--max-context-len"}
"""Flags that vLLM spells otherwise."""
ELSEWHERE = {
    "--model-path": "the model is the first argument, or --model",
    "--context-length": "--max-context-len",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--dp": "run a server on each GPU (docs/operations.md)",
    "--data-parallel-size": "run a server on each GPU (docs/operations.md)",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-num-seqs": "--max-wave-requests and --max-wave-rows",
    "--max-running-requests": "--max-wave-requests and --max-wave-rows",
    "--max-num-batched-tokens": "--max-wave-tokens",
    "--max-queued-requests": "--max-waiting-requests",
    "--block-size": "--page-size",
    "--enable-prefix-caching": "--prefix-cache on",
    "--disable-radix-cache": "--prefix-cache off, the default",
    "--hicache-size": "--prefix-cache-host-gib",
    "--swap-space": "--prefix-cache-host-gib",
    "--disable-cuda-graph": "--enforce-eager",
    "--api-key": "--api-key-file, since others can read a process's flags",
    "--admin-api-key": "--admin-api-key-file, since others can read a process's flags",
    "--trust-remote-code": "no code from a checkpoint is ever run",
}
"""Flags that vLLM or SGLang have and WideBeam has not, and what stands in for them."""
API_KEY_VARIABLE = "WIDEBEAM_API_KEY"
"""Environment variable with a client's key; no setting of the server."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine needs: the model, the catalog and the limits of a search."""

    model: str
    """A local folder or a Hugging Face id of a Qwen3, Qwen2 or Qwen2.5 dense checkpoint (safetensors only). The first
    argument of a command, too."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model; resolved once for all files."""
    catalog: str | tuple[str, ...] | None = None
    """Catalog file, or URI of one in object storage, or several, behind one flag or several: parquet, JSONL, MiniOneRec
    index.json or packed sid2pid JSON. Requests choose one by its name: the file's without its ending, or NAME if this
    says NAME=FILE. Without any, every token is legal."""
    default_catalog: str | None = None
    """Name of the catalog that requests get which name none. By default the one of --catalog if it is one, or without
    any the first that comes; of several none is the default. Catalogs that come later change nothing about it."""
    catalog_memory_gib: Annotated[float, Meta(ge=0, le=MAX_GIB)] = 1.0
    """Memory on the device for the prefix trees of all catalogs, 20 bytes a node; a new version lies beside the one
    before. `widebeam catalog inspect` says what one takes."""
    filter_memory_gib: Annotated[float, Meta(gt=0, le=MAX_GIB)] = 0.25
    """Memory on the device for the filters of a wave, 1.5 bits an item for each that is distinct."""
    catalog_history: Annotated[int, Meta(ge=0, le=100)] = 3
    """Earlier versions of each catalog that are kept in the host's memory, to go back to."""
    watch_catalogs: bool = False
    """Load a catalog again when its file, or the header beside it, has changed."""
    watch_interval_s: Annotated[float, Meta(gt=0)] = 1.0
    """Time between two looks at the files. One that changed is loaded when the next look finds it as it was."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: cuda where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV. auto: the checkpoint's own on a GPU, float32 on a CPU."""
    quantization: Literal["auto", "none", "fp8"] = "auto"
    """Type of the layers' projections. auto: as the checkpoint has them. fp8: float8 weights, quantised at load with a
    scale for each output, and rows quantised per token (W8A8). none: refuse a quantised checkpoint."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the context KV pool. auto: as --dtype. fp8: float8_e4m3fn with a scale for each layer's keys and one
    for its values, in half the memory."""
    attention_backend: str = "auto"
    """torch, flashinfer, or auto: FlashInfer where it can run this model, else torch."""
    enforce_eager: bool = False
    """Run GPU functions uncompiled and without graphs: slower, but ready sooner. A CPU is always eager."""
    warmup: Literal["none", "fast", "full"] = "fast"
    """What a GPU compiles and captures before the first request. fast: the common shapes, products by cuBLAS. full:
    products autotuned for each shape, which takes long. none: every shape when it first comes."""
    warmup_policies: bool = False
    """Compile what policies need as well (score_margin and nucleus, diverse, stochastic): else the first request with
    one waits for that, and others with it. --warmup full does it anyway."""
    max_beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)] = MAX_BEAM_WIDTH
    """Widest beam that a request may ask for."""
    default_beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)] = 64
    """Beam width of a /v1/recommend request that names none."""
    max_context_len: Annotated[int, Meta(ge=2)] | None = None
    """Longest prompt plus generated tokens; by default the model's max_position_embeddings."""
    max_levels: Annotated[int, Meta(ge=1, le=MAX_LEVELS)] = MAX_LEVELS
    """Most tokens that a request may generate."""
    max_wave_tokens: Positive = 20_480
    """Prompt tokens that are prefilled together. A longer prompt is prefilled alone."""
    max_wave_rows: Positive = 8192
    """Beam rows that are decoded together."""
    max_wave_requests: Annotated[int, Meta(ge=1, le=256)] = 16
    """Requests that form one wave."""
    max_waiting_requests: Positive = 1024
    """Requests accepted and not yet answered; one more is refused with 429."""
    max_waiting_rows: Positive | None = None
    """Beam rows of those requests together; by default 64 full waves of them."""
    max_waiting_row_levels: Positive | None = None
    """Rows to decode for those requests, over all levels; by default what 64 full waves can have."""
    max_waiting_tokens: Positive | None = None
    """Prompt tokens of those requests; by default 64 full waves of them."""
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    """GPUs that run one model together, each a part of its heads and of its MLP, in a process of its own. The leader,
    which starts the others unless torchrun has, answers requests. It must divide the model's numbers of heads."""
    hang_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """Time for which the device may work on one wave; a launch, which may compile, gets ten times that. Past it the
    engine answers everybody with an error, and the server ends."""
    prefix_cache: Literal["off", "on"] = "off"
    """Whether prompts that begin alike share the keys and values of whole pages, while there is room for them."""
    prefix_cache_eviction: str = "lru"
    """Which of these pages make room first: `lru`, the least recently used; `lfu`, those with the fewest hits; or one
    that an installed package offers by entry points of the group `widebeam.eviction`."""
    prefix_cache_host_gib: Annotated[float, Meta(ge=0, le=MAX_GIB)] = 0.0
    """Memory of the host, pinned if there is a GPU, for pages of the prefix cache that have to make room; they come
    back where that is faster than computing them again. 0: none. Needs prefix_cache on, and one GPU."""
    check_host_pages: bool = False
    """Compare pages from the host's memory with a checksum of what was saved, which takes time; for finding faults."""
    page_size: Annotated[int, Meta(ge=1, le=256)] = 64
    """Tokens in a page of the context KV pool."""
    max_total_tokens: Positive | None = None
    """Tokens that the context KV pool holds. By default what fits on a GPU; on a CPU, one wave or one prompt."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that weights, KV pools and work space may take together."""
    beam_kv_tokens: Positive | None = None
    """Beam tokens that the beam KV pool holds; by default 4 for each row of a wave."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine is offered over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback unless you say otherwise."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    served_model_name: str | None = None
    """Name that /v1/models reports; by default the model argument."""
    max_body_bytes: Positive = 4 << 20
    """Largest request body."""
    body_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Time within which a request body must have arrived."""
    max_update_bytes: Positive = 32 << 20
    """Largest body of changed catalog items."""
    catalog_root: str | None = None
    """Folder whose catalog files administrators may load by their path. Without it they can only upload some."""
    max_upload_bytes: Positive = 4 << 30
    """Largest catalog file that is uploaded. It passes through the folder for temporary files (TMPDIR)."""
    upload_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Time within which an uploaded file must have arrived."""
    keepalive_timeout_s: Annotated[float, Meta(gt=0)] = 75.0
    """Time after which an idle connection, or one with half a header, is closed."""
    drain_delay_s: Annotated[float, Meta(ge=0)] = 0.0
    """After SIGTERM, time for which new requests are still accepted, while /ready is 503 already: until whoever spreads
    requests has noticed."""
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 30.0
    """After that, time that requests in flight get to finish."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of a log line that is printed."""
    log_format: Literal["text", "json"] = "text"
    """Form of the log on stderr. json: one object a line."""
    api_key_file: str | None = None
    """File of API keys, one a line (# comments), at least 16 characters each. With it every route but the probes
    (/health, /ping, /ready) needs one of them as a bearer token."""
    admin_api_key_file: str | None = None
    """The same for administrators: settings, catalogs and their changes, cache and abort_all then need a key of this
    file, which is good for everything else too."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve a model over HTTP."""

    engine: EngineConfig
    server: ServerConfig = ServerConfig()


def changed(settings: msgspec.Struct) -> str:
    """The settings that are not at their defaults, for a line of the log."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(settings)}
    made = {name: value for name, value in msgspec.structs.asdict(settings).items() if value != defaults[name]}
    return ", ".join(f"{name}={value!r}" for name, value in made.items()) or "none"


def convert(tree: dict[str, Any], kind: type[Any] = Config, spelt: Callable[[str], str] = str) -> Any:
    """Validate a plain dict into a settings struct (the struct's constructor does not check bounds).

    `spelt`: how whoever made it writes a setting, from its place in the tree. Raises ConfigError.
    """
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        fault = find_fault(error, kind)
        name = spelt(fault.place)
        if fault.unknown:
            raise ConfigError(f"bad setting: there is no {name}{fault.words}") from None
        raise ConfigError(f"bad setting: {name} {value_at(tree, fault.place)!r}: {fault.words}") from None
