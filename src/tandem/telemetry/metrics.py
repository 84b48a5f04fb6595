"""Prometheus metrics of one server process. Every name is documented in `docs/metrics.md`; a test says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.types import EngineLoad, Statistics, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# By default, the time that a series began is a series of its own: twice the lines, and nobody reads them.
disable_created_metrics()  # type: ignore[no-untyped-call]

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0)
_TOKENS = tuple(float(2**power) for power in range(0, 21, 2))

INSTANCE_STATES = ("starting", "loading", "warming", "ready", "restarting", "failed", "stopped")


@dataclass(frozen=True, slots=True)
class InstanceSample:
    """What a scrape reports of one instance."""

    instance_id: str
    model_id: str
    state: str
    restarts: int
    load: EngineLoad | None


class Metrics:
    """The metrics, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._instances = _InstanceCollector()
        self.registry.register(self._instances)
        ProcessCollector(namespace="tandem", registry=self.registry)
        registry = self.registry
        self.http_requests = Counter(
            "tandem_http_requests", "HTTP requests answered.", ["route", "method", "status"], registry=registry
        )
        self.http_seconds = Histogram(
            "tandem_http_request_seconds",
            "Time from a request's head to the end of its answer.",
            ["route"],
            buckets=_LATENCY,
            registry=registry,
        )
        self.http_in_progress = Gauge(
            "tandem_http_requests_in_progress", "HTTP requests being answered now.", registry=registry
        )
        self.answers = Counter(
            "tandem_answers",
            "Answers that ended, by finish reason or error code.",
            ["model", "outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "tandem_prompt_tokens", "Prompt tokens of finished answers.", ["model"], registry=registry
        )
        self.cached_tokens = Counter(
            "tandem_cached_prompt_tokens", "Prompt tokens found in the prefix cache.", ["model"], registry=registry
        )
        self.completion_tokens = Counter(
            "tandem_completion_tokens", "Generated tokens of finished answers.", ["model"], registry=registry
        )
        self.prompt_length = Histogram(
            "tandem_prompt_length_tokens", "Tokens in a prompt.", ["model"], buckets=_TOKENS, registry=registry
        )
        self.first_token = Histogram(
            "tandem_time_to_first_token_seconds",
            "Time from a request's start to the first piece of its answer, as the server sees it.",
            ["model"],
            buckets=_LATENCY,
            registry=registry,
        )
        self.inter_token = Histogram(
            "tandem_inter_token_seconds",
            "Mean time between the tokens of one answer.",
            ["model"],
            buckets=_TOKEN_LATENCY,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "tandem_queue_seconds",
            "Time a request waited for its engine.",
            ["model"],
            buckets=_LATENCY,
            registry=registry,
        )

    def finished(self, model: str, reason: str, usage: Usage, statistics: Statistics) -> None:
        """Count one finished answer."""
        self.answers.labels(model, reason).inc()
        self.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self.cached_tokens.labels(model).inc(usage.cached_tokens)
        self.completion_tokens.labels(model).inc(usage.completion_tokens)
        self.prompt_length.labels(model).observe(usage.prompt_tokens)
        self.queue_seconds.labels(model).observe(statistics.queue_seconds)
        if statistics.generation_tps > 0:
            self.inter_token.labels(model).observe(1 / statistics.generation_tps)

    def failed(self, model: str, code: str) -> None:
        """Count one answer that ended in an error."""
        self.answers.labels(model, code).inc()

    def render(self, instances: Sequence[InstanceSample]) -> bytes:
        """All metrics in Prometheus' text format, with the gauges of `instances` as they are now."""
        self._instances.samples = instances
        return generate_latest(self.registry)

    def names(self) -> set[str]:
        """The name of every metric as it is exposed (counters with `_total`)."""
        return {
            f"{family.name}_total" if family.type == "counter" else family.name for family in self.registry.collect()
        }


class _InstanceCollector(Collector):
    """Gauges that are read from the instances when they are asked for, so that they cannot go stale."""

    def __init__(self) -> None:
        self.samples: Sequence[InstanceSample] = ()

    def collect(self) -> Iterable[Metric]:
        labels = ["instance", "model"]
        state = GaugeMetricFamily(
            "tandem_instance_state", "1 for the state an instance is in.", labels=[*labels, "state"]
        )
        restarts = CounterMetricFamily("tandem_runner_restarts", "Times the runner was started again.", labels=labels)
        steps = CounterMetricFamily("tandem_engine_steps", "Steps the engine has made.", labels=labels)
        gauges = {
            field: GaugeMetricFamily(name, text, labels=labels)
            for field, name, text in (
                ("waiting", "tandem_requests_waiting", "Requests that wait for the engine."),
                ("prefilling", "tandem_requests_prefilling", "Requests whose prompt is being read."),
                ("decoding", "tandem_requests_decoding", "Requests whose answer is being written."),
                ("cache_bytes", "tandem_cache_bytes", "Memory of running requests' caches."),
                ("prefix_cache_bytes", "tandem_prefix_cache_bytes", "Memory of the prefix cache."),
                ("active_memory", "tandem_engine_memory_bytes", "Memory the engine uses."),
                ("prefill_tps", "tandem_prefill_tokens_per_second", "Rate of prefill, measured lately."),
                ("decode_tps", "tandem_decode_tokens_per_second", "Rate of decoding, measured lately."),
            )
        }
        for sample in self.samples:
            values = [sample.instance_id, sample.model_id]
            for name in INSTANCE_STATES:
                state.add_metric([*values, name], float(name == sample.state))
            restarts.add_metric(values, sample.restarts)
            if sample.load is not None:
                steps.add_metric(values, sample.load.steps)
                for field, family in gauges.items():
                    family.add_metric(values, getattr(sample.load, field))
        yield from (state, restarts, steps, *gauges.values())
