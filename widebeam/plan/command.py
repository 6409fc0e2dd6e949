"""`widebeam plan`: its flags, and how the answer reads. Imports no torch, but for a model from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from widebeam.config import MAX_BEAM_WIDTH, MAX_LEVELS, EngineConfig, Positive
from widebeam.errors import CheckpointError, ConfigError
from widebeam.faults import counted, did_you_mean
from widebeam.model.config import ModelConfig, load_model_config
from widebeam.plan.estimate import CODES, memory, speed
from widebeam.plan.gpus import GPUS, gpu_named
from widebeam.plan.replica import Limits
from widebeam.plan.shapes import SHAPES
from widebeam.plan.waves import WaveModel
from widebeam.plan.work import Prompt

FORWARDED = (
    "max_wave_tokens", "max_wave_rows", "max_wave_requests", "max_context_len", "page_size", "gpu_memory_utilization",
    "catalog_memory_gib",
)  # fmt: skip
"""Settings of the server that mean the same here."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much memory a model takes, how long its waves take, and how many GPUs a load needs."""

    model: str
    """Folder or Hugging Face id of a checkpoint, or one of qwen3-tiny, qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b."""
    context: Annotated[int, Meta(ge=1)]
    """Tokens of a prompt."""
    width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)]
    """Beams of a search."""
    qps: Annotated[float, Meta(gt=0)]
    """Requests a second, of all users together."""
    tokens: Annotated[int, Meta(ge=1, le=MAX_LEVELS)] = 3
    """Tokens to generate: the levels of the catalog."""
    cached: Annotated[int, Meta(ge=0)] = 0
    """Tokens of a prompt that the prefix cache has, on average."""
    gpu: str = "h200"
    """h200, h100, a100 or l40s. Only the H200 was measured."""
    users: Positive | None = None
    """Users whose histories the host's memory is to hold (--prefix-cache-host-gib), over all replicas."""
    items: Positive | None = None
    """Items of the catalog, with random SIDs. Without it there is no catalog, and the head is the whole vocabulary."""
    codes: Annotated[int, Meta(ge=2)] = CODES
    """Codes of a level of the catalog."""
    quantization: Literal["auto", "none", "fp8"] = "auto"
    """As of `widebeam serve`."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """As of `widebeam serve`."""
    target: Annotated[float, Meta(gt=0, lt=1)] = 0.7
    """Share of a GPU's peak that replicas may be asked for."""
    max_wave_tokens: Positive = EngineConfig(model="").max_wave_tokens
    """This and what follows: as of `widebeam serve`."""
    max_wave_rows: Positive = EngineConfig(model="").max_wave_rows
    max_wave_requests: Annotated[int, Meta(ge=1, le=256)] = EngineConfig(model="").max_wave_requests
    max_context_len: Annotated[int, Meta(ge=2)] | None = None
    page_size: Annotated[int, Meta(ge=1, le=256)] = EngineConfig(model="").page_size
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = EngineConfig(model="").gpu_memory_utilization
    catalog_memory_gib: Annotated[float, Meta(ge=0)] = EngineConfig(model="").catalog_memory_gib
    json: bool = False
    """Print JSON."""


def run(arguments: list[str]) -> int:
    """Print the plan. Raises ConfigError, which names the flag."""
    from widebeam.settings import parse_flags

    options: Plan = parse_flags(Plan, arguments, "widebeam plan")
    found = plan(options)
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if options.json else text(options, found))
    return 0


def plan(options: Plan) -> dict[str, Any]:
    """The numbers. Raises ConfigError, CheckpointError."""
    model, gpu = _model(options.model), gpu_named(options.gpu)
    fp8 = _fp8(options, model)
    longest = options.max_context_len or model.longest_context
    if options.context + options.tokens > longest:
        which = "--max-context-len" if options.max_context_len else "the model's longest context"
        raise ConfigError(f"--context {options.context} and --tokens {options.tokens} exceed {which}, {longest}")
    if options.width > options.max_wave_rows:
        raise ConfigError(f"--width {options.width} exceeds --max-wave-rows {options.max_wave_rows}")
    if options.cached >= options.context:
        raise ConfigError(f"--cached {options.cached} must be less than --context {options.context}")
    config = EngineConfig(model=options.model, **{name: getattr(options, name) for name in FORWARDED})
    kv_bytes, codes = 1 if options.kv_cache_dtype == "fp8" else 2, options.codes if options.items else None
    room = memory(
        model, gpu, config, options.context, options.tokens, fp8=fp8, kv_bytes=kv_bytes,
        items=options.items, codes=options.codes, users=options.users,
    )  # fmt: skip
    room["beams_mib"] *= options.width * (options.tokens - 1)
    waves = WaveModel(
        model, gpu, options.width, options.tokens, fp8=fp8, codes=codes, kv_bytes=kv_bytes,
        max_rows=options.max_wave_rows,
    )  # fmt: skip
    limits = Limits(options.max_wave_requests, options.max_wave_tokens, options.max_wave_rows, options.width)
    prompt = Prompt(options.context, options.cached)
    fleet = speed(waves, limits, prompt, options.qps, options.target, room["histories_on_gpu"])
    return {
        "model": options.model, "gpu": gpu.name, "measured": gpu.measured, "fp8": fp8, "kv_bytes": kv_bytes,
        "memory": room, "speed": fleet,
    }  # fmt: skip


def _model(name: str) -> ModelConfig:
    if name in SHAPES:
        return SHAPES[name]
    folder = Path(name)
    if not (folder / "config.json").exists():
        from widebeam.model.weights import resolve_checkpoint

        try:
            folder = resolve_checkpoint(name, files=("*.json",))
        except CheckpointError as error:
            shapes = f"shapes known by name are {', '.join(SHAPES)}{did_you_mean(name, list(SHAPES))}"
            raise ConfigError(f"--model {name}: {shapes}\n{error}") from None
    model = load_model_config(folder)
    if model.dtype not in ("bfloat16", "float16"):
        raise ConfigError(f"--model {name} is stored as {model.dtype}; no rates are known but for 16 bits")
    return model


def _fp8(options: Plan, model: ModelConfig) -> bool:
    """Whether projections are float8, as model/fp8.py decides it."""
    stored = model.quantization == "fp8"
    if stored and options.quantization == "none":
        raise ConfigError("--quantization none: the checkpoint itself is quantised (fp8)")
    fp8 = stored or options.quantization == "fp8"
    able = ", ".join(gpu.name for gpu in GPUS.values() if gpu.fp8_tflops)
    for flag, wanted in (("--quantization fp8", fp8), ("--kv-cache-dtype fp8", options.kv_cache_dtype == "fp8")):
        if wanted and gpu_named(options.gpu).fp8_tflops is None:
            raise ConfigError(f"{flag}: --gpu {options.gpu} has no float8 products; {able} have")
    return fp8


def text(options: Plan, found: dict[str, Any]) -> str:
    """A line for each thing."""
    room, fleet = found["memory"], found["speed"]
    one, full = fleet["one_request_ms"], fleet["full_wave_ms"]
    closed = f"closed by {fleet['closed_by']}"
    idle = "" if options.items else ", which is taken without a catalog, too"
    limits = [f"{name} {share:.0%}" for name, share in fleet["shares"].items()][:3]
    rows = [
        ("model", f"{options.model}, projections in {'fp8' if found['fp8'] else '16 bits'}, context KV in "
                  f"{8 * found['kv_bytes']} bits, {'a catalog' if options.items else 'the whole vocabulary'}"),
        ("gpu", found["gpu"] + ("" if found["measured"] else ": NOT measured, its datasheet scaled as the H200's")),
        *((name, f"{size:.2f} GiB{idle if name == 'catalog' else ''}") for name, size in room["gib"].items()),
        ("one user", f"history {room['history_mib']:.1f} MiB, beams' KV {room['beams_mib']:.1f} MiB"),
        ("histories", f"{room['histories_on_gpu']:,} on each GPU ({room['pool_tokens']:,} tokens)"),
        ("one request", f"{one['prefill'] + one['levels']:.1f} ms: prefill {one['prefill']:.1f}, levels "
                        f"{one['levels']:.1f}"),
        ("full wave", f"{counted(fleet['full_wave_requests'], 'request')}, {closed}; "
                      f"{full['prefill'] + full['levels']:.1f} ms: prefill {full['prefill']:.1f}, levels "
                      f"{full['levels']:.1f}"),
        ("peak", f"{fleet['requests_per_s']:.1f} requests/s for each GPU"),
        ("replicas", f"{fleet['replicas']} for {options.qps:g} requests/s, each at {fleet['utilization']:.0%} of its "
                     f"peak, with waves of {fleet['mean_wave_requests']:.1f} requests"),
        ("latency", f"p50 {fleet['p50_ms']:.0f} ms, p99 {fleet['p99_ms']:.0f} ms in the engine, without HTTP"),
        ("limited by", ", ".join(limits)),
    ]  # fmt: skip
    if options.users is not None:
        users = counted(options.users, "user", ",")
        rows.insert(-5, ("host", f"{room['host_gib']:.1f} GiB hold the histories of {users}"))
    if room["raise_catalog_memory"]:
        rows.append(
            ("set", f"--catalog-memory-gib {room['tree_gib'] * 2:.2f}: two versions of {options.items:,} items")
        )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
