"""Every Prometheus metric, declared in one place. Names begin with `widebeam_`; times are in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import widebeam
from widebeam.engine.stats import SECONDS, Distribution

if TYPE_CHECKING:
    from widebeam.engine.catalog_changes import ChangeStats
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchResult

STATES = ("starting", "ready", "draining", "stopped", "dead")
_COUNTERS = {
    "searches": ("searches", "outcome", "Accepted searches, by how they ended"),
    "requests_refused": ("requests_refused_by", "budget", "Searches refused with 429, by the budget that was full"),
    "waves": ("waves_by_levels", "levels", "Waves, by the most levels that their searches may have"),
    "waves_closed": ("waves_closed_by", "reason", "Waves, by what kept the next search in turn out"),
    "waves_passing": ("waves_passing", None, "Waves that ran between pieces of a longer one"),
    "jobs_overtaken": ("jobs_overtaken", None, "Searches that ran after a wave headed by a younger one"),
    "jobs_aged": ("jobs_aged", None, "Searches held up by younger ones for as long as is allowed"),
    "jobs_dropped": ("jobs_dropped", None, "Searches that left the queue without running: cancelled or too late"),
    "out_of_memory": ("out_of_memory", None, "Waves that ran out of the device's memory"),
    "fallbacks": ("fallbacks", None, "Slower ways taken than the device has"),
    "prefix_searches": ("prefix_searches", "outcome", "Searches, by whether they found pages in the prefix cache"),
    "prefix_hit_tokens": ("prefix_hit_tokens", None, "Prompt tokens that were in the prefix cache"),
    "prefix_restored_tokens": ("prefix_restored_tokens", None, "Those of them that had come from the host's memory"),
    "prefix_miss_tokens": ("prefix_miss_tokens", None, "Prompt tokens that could be in the prefix cache and were not"),
    "prefix_evicted_pages": ("prefix_evicted_pages", None, "Cached pages that made room for others"),
    "prefix_flushed_pages": ("prefix_flushed_pages", None, "Cached pages that were flushed"),
    "prefix_host_events": ("prefix_host_events", "event", "Pages of the host tier, by what happened to them"),
    "prefix_host_waits": ("prefix_host_waits", None, "Waves that waited until copies let go of pages"),
    "prefix_transfer_bytes": ("prefix_transfer_bytes", "direction", "Bytes of pages copied"),
    "prefix_transfer_seconds": ("prefix_transfer_seconds", "direction", "Time of these copies"),
    "late_graphs": ("late_graphs", None, "Graphs captured after warm-up, for sizes that it did not meet"),
    "ungraphed_prompts": (
        "ungraphed_prompts",
        None,
        "Groups of prompts launched kernel by kernel, as no graph is for so many tokens",
    ),
}
"""Metric: field of the engine's statistics, what its keys are if it is a table, and the help text."""
_GAUGES = {
    "requests_in_flight": "Searches that wait or run",
    "rows_in_flight": "Beam rows of the searches in flight",
    "row_levels_in_flight": "Rows to decode, over all levels, of the searches in flight",
    "tokens_in_flight": "Prompt tokens of the searches in flight",
    "requests_waiting": "Searches in flight that are in no wave yet",
    "rows_waiting": "Beam rows of the waiting searches",
    "tokens_waiting": "Prompt tokens of the waiting searches",
    "requests_running": "Searches in flight that are in a wave",
    "retry_after_seconds": "Wait that was told last with a 429",
    "wave_rows_limit": "Beam rows that a wave may have now",
    "waves_on_device": "Waves that were launched and not delivered",
    "beam_rows_in_use": "Beam rows of the waves on the device",
    "context_pages_in_use": "Context pages of the waves on the device",
    "beam_slots_in_use": "Beam slots of the waves on the device",
    "context_pages_leased": "Context pages of the pool that searches and copies hold; 0 when idle",
    "beam_slots_leased": "Beam slots of the pool that searches hold; 0 when idle",
    "context_pages": "Context pages of the pool",
    "context_pages_high_water": "Most context pages that one wave has held",
    "beam_slots": "Beam slots of the pool",
    "beam_slots_high_water": "Most beam slots that one wave has held",
    "catalog_bytes_in_use": "Device memory that catalog versions hold",
    "catalog_bytes": "Device memory for catalogs",
    "prefix_cached_pages": "Context pages in the prefix cache",
    "prefix_idle_pages": "Those of them that no wave and no copy holds: room for whoever needs it",
    "prefix_host_pages": "Pages in the host's memory",
    "prefix_host_bytes": "Memory that they take",
    "prefix_host_limit_bytes": "Memory for such pages",
    "prefix_restore_bytes_per_second": "Rate at which pages come back, as measured at start",
    "prefix_prefill_tokens_per_second": "Rate at which prompts were computed lately",
}
_HISTOGRAMS = {
    "wave_requests": "Searches of a wave",
    "wave_rows": "Beam rows of a wave",
    "wave_prompt_tokens": "Prompt tokens of a wave",
    "wave_host_seconds": "Time in which the host prepared and launched a wave, its waits for the device included",
    "company_wait_seconds": "Time for which searches waited for company while the device was busy",
    "beam_width": "Beams of a search at its widest level",
    "prompt_length_tokens": "Prompt tokens of a search",
}


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = _Registry(support_collectors_without_names=True)
        self._requests = self._counter("requests", "HTTP requests answered", ("route", "outcome"))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered searches")
        self._generated_tokens = self._counter("generated_tokens", "Tokens of all returned sequences")
        self._request_s = self._histogram("request", "Time from the request line to the answer", ("route",))
        self._outside_s = self._histogram("http_overhead", "That time without the engine's", ("route",))
        self._phases_s = {
            "queue": self._histogram("queue", "Time that a search waited for its wave"),
            "prefill": self._histogram("prefill", "Time of the prefill of a search's wave"),
            "decode": self._histogram("decode", "Time of the levels of a search's wave"),
            "total": self._histogram("search", "Time of a search in the engine"),
        }
        self.registry.register(_EngineCollector(engine))

    def _counter(self, what: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"widebeam_{what}", text, labels, registry=self.registry)

    def _histogram(self, what: str, text: str, labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"widebeam_{what}_seconds", text, labels, registry=self.registry, buckets=SECONDS)

    def observe_request(self, route: str, outcome: str, seconds: float, engine_s: float | None = None) -> None:
        """`outcome` is `ok` or the code of an error class; both labels come from small closed sets.

        `engine_s`: the part of a good answer's time that passed in the engine, if it went there.
        """
        self._requests.labels(route, outcome).inc()
        self._request_s.labels(route).observe(seconds)
        if engine_s is not None:
            self._outside_s.labels(route).observe(max(0.0, seconds - engine_s))

    def observe_search(self, result: SearchResult) -> None:
        for phase, histogram in self._phases_s.items():
            histogram.observe(getattr(result.timing_ms, phase) / 1e3)
        self._prompt_tokens.inc(result.prompt_tokens)
        self._generated_tokens.inc(result.completion_tokens)


class _Registry(CollectorRegistry):
    """Without the moment at which each series began, which would be one more series for each."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class _EngineCollector(Collector):
    """Reads the engine's statistics when somebody asks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        """Nothing: the engine has no statistics yet when the collector is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield InfoMetricFamily("widebeam_build", "Version, as a label", {"version": widebeam.__version__})
        states = {state: state == engine.state for state in STATES}
        yield _table("engine_state", "1 for the state that the engine is in", "state", states)
        if engine.state not in ("ready", "draining"):  # it has no pools yet, or none any more
            return
        yield InfoMetricFamily("widebeam_model", "What runs and how, as labels", engine.info)
        catalogs = {name: catalog for name in engine.catalogs.names() if (catalog := engine.catalogs.get(name))}
        versions = {name: catalog.version for name, catalog in catalogs.items()}
        items = {name: catalog.num_items for name, catalog in catalogs.items()}
        yield _table("catalog_version", "Version of a catalog that new searches get", "catalog", versions)
        yield _table("catalog_items", "Items of that version", "catalog", items)
        yield from _changes(engine.live.stats)
        stats = engine.stats()
        for name, (field, label, text) in _COUNTERS.items():
            yield _table(name, text, label, getattr(stats, field), CounterMetricFamily)
        for name, text in _GAUGES.items():
            yield _table(name, text, None, getattr(stats, name))
        for budget, limit in stats.in_flight_limits.items():
            name = f"{budget}_in_flight_limit"
            yield _table(name, f"What widebeam_{budget}_in_flight may be at most", None, limit)
        for name, text in _HISTOGRAMS.items():
            yield _histogram(name, text, getattr(stats.distributions, name))


def _changes(stats: ChangeStats) -> Iterator[Metric]:
    text = "Loads, updates and rollbacks of catalogs, by how they ended"
    yield _table("catalog_updates", text, ("catalog", "outcome"), stats.outcomes, CounterMetricFamily)
    yield _table("catalog_build_seconds", "Time in which that version was built", "catalog", stats.build_s)
    yield _table("catalog_swap_seconds", "Time from then until new searches got it", "catalog", stats.swap_s)


def _table(
    name: str,
    text: str,
    label: str | tuple[str, ...] | None,
    value: Any,
    family: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """A number, or a table of them with a label for its keys; with several, keys are tuples."""
    names = () if label is None else (label,) if isinstance(label, str) else label
    metric = family(f"widebeam_{name}", text, labels=names)
    for key, number in [((), value)] if label is None else value.items():
        metric.add_metric([*map(str, key)] if isinstance(key, tuple) else [str(key)], number)
    return metric


def _histogram(name: str, text: str, seen: Distribution) -> Metric:
    bounds = [*map(str, map(float, seen.bounds)), "+Inf"]
    buckets = list(zip(bounds, accumulate(seen.counts), strict=True))
    return HistogramMetricFamily(f"widebeam_{name}", text, buckets=buckets, sum_value=seen.sum)
