"""Every Prometheus metric, declared in one place. Names begin with `widebeam_`; times are in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import widebeam

if TYPE_CHECKING:
    from widebeam.engine.engine import Engine
    from widebeam.engine.request import SearchResult

STATES = ("starting", "ready", "draining", "stopped", "dead")
_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30)
_LABELS = {"requests_refused_by": "budget", "waves_by_levels": "levels"}
"""Fields of the engine's statistics that are tables, and what their keys are."""
_COUNTED = frozenset(_LABELS) | {
    "requests_done", "requests_refused", "waves", "jobs_overtaken", "jobs_aged", "out_of_memory", "fallbacks",
}  # fmt: skip
"""Those that only grow; the others are gauges."""


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "widebeam_requests", "HTTP requests answered", ("route", "outcome"), registry=self.registry
        )
        self._request_s = self._histogram("request", "Time from the request line to the answer", ("route",))
        self._queue_s = self._histogram("queue", "Time that a search waited for its wave")
        self._prefill_s = self._histogram("prefill", "Time of the prefill of a search's wave")
        self._decode_s = self._histogram("decode", "Time of the levels of a search's wave")
        self._prompt_tokens = Counter("widebeam_prompt_tokens", "Prompt tokens of searches", registry=self.registry)
        self._generated_tokens = Counter(
            "widebeam_generated_tokens", "Tokens of all returned sequences", registry=self.registry
        )
        self.registry.register(_EngineCollector(engine))

    def _histogram(self, what: str, text: str, labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"widebeam_{what}_seconds", text, labels, registry=self.registry, buckets=_BUCKETS_S)

    def observe_request(self, route: str, outcome: str, seconds: float) -> None:
        """`outcome` is `ok` or the code of an error class; both labels come from small closed sets."""
        self._requests.labels(route, outcome).inc()
        self._request_s.labels(route).observe(seconds)

    def observe_search(self, result: SearchResult) -> None:
        self._queue_s.observe(result.timing_ms.queue / 1e3)
        self._prefill_s.observe(result.timing_ms.prefill / 1e3)
        self._decode_s.observe(result.timing_ms.decode / 1e3)
        self._prompt_tokens.inc(result.prompt_tokens)
        self._generated_tokens.inc(result.completion_tokens)


class _EngineCollector(Collector):
    """Reads the engine's statistics when somebody asks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        """Nothing: the engine has no statistics yet when the collector is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        info = GaugeMetricFamily("widebeam_build_info", "Version, as a label", labels=("version",))
        info.add_metric((widebeam.__version__,), 1.0)
        yield info
        state = GaugeMetricFamily("widebeam_engine_state", "1 for the state that the engine is in", labels=("state",))
        for name in STATES:
            state.add_metric((name,), float(name == self._engine.state))
        yield state
        if self._engine.state not in ("ready", "draining"):  # it has no pools yet, or none any more
            return
        for name, value in msgspec.structs.asdict(self._engine.stats()).items():
            family: type[CounterMetricFamily | GaugeMetricFamily] = (
                CounterMetricFamily if name in _COUNTED else GaugeMetricFamily
            )
            labels = (_LABELS[name],) if name in _LABELS else ()
            metric = family(f"widebeam_{name}", f"Engine statistics: {name}", labels=labels)
            for key, number in value.items() if labels else [(None, value)]:
                metric.add_metric((str(key),) if labels else (), number)
            yield metric
