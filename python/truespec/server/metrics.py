"""Prometheus metrics. Counts are made from kept records, like everything a reply shows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from truespec.message import EngineStats
from truespec.tokenizer.acceptance import Acceptance, joined
from truespec.tokenizer.request_state import Piece, RequestState

COMPAT_NAMES = ("vllm", "sglang")
_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 30, 60)
_FINISHES = ("stop", "length", "abort", "error")


class Metrics:
    """What the server has done since its start.

    Attributes:
        acceptance: counts of all finished requests.
        num_output_tokens: output tokens sent on.
    """

    def __init__(self, model_name: str, compat: Sequence[str] = ()) -> None:
        """`compat`: also export under the names of "vllm" or "sglang"."""
        self.acceptance = Acceptance()
        self.num_output_tokens = 0
        disable_created_metrics()  # type: ignore[no-untyped-call]  # not annotated there
        self._registry = CollectorRegistry()
        self._starts: dict[str, float] = {}
        self._lasts: dict[str, float] = {}
        prefixes = ["truespec", *compat]
        self._first = self._histograms(prefixes, model_name, "time_to_first_token_seconds")
        self._between = self._histograms(prefixes, model_name, "inter_token_latency_seconds")
        self._total = self._histograms(prefixes, model_name, "e2e_request_latency_seconds")
        self._prompt = self._counters(prefixes, model_name, "prompt_tokens")
        self._output = self._counters(prefixes, model_name, "generation_tokens")
        finished = Counter(
            "truespec:requests_finished",
            "Finished requests",
            ["model_name", "reason"],
            registry=self._registry,
        )
        self._finished = {kind: finished.labels(model_name, kind) for kind in _FINISHES}
        self._gauges = _EngineGauges(self._registry, prefixes, model_name)
        self._registry.register(_AcceptanceCollector(self, model_name, compat))

    def observe(self, state: RequestState, pieces: Sequence[Piece]) -> None:
        """Count new pieces of a request."""
        num_tokens = sum(len(piece.records) for piece in pieces)
        if num_tokens == 0:
            return
        now = time.monotonic()
        last = self._lasts.get(state.rid)
        if last is None:
            for histogram in self._first:
                histogram.observe(now - self._starts.get(state.rid, now))
            for counter in self._prompt:
                counter.inc(len(state.submit.prompt_ids))
        else:
            for histogram in self._between:
                histogram.observe((now - last) / num_tokens)
        self._lasts[state.rid] = now
        self.num_output_tokens += num_tokens
        for counter in self._output:
            counter.inc(num_tokens)

    def count_start(self, rid: str) -> None:
        """A request was sent to the engine."""
        self._starts[rid] = time.monotonic()

    def count_finish(self, state: RequestState, reason: str) -> None:
        """A request is over; called once for each that was started."""
        started = self._starts.pop(state.rid, None)
        self._lasts.pop(state.rid, None)
        if started is not None:
            for histogram in self._total:
                histogram.observe(time.monotonic() - started)
        self._finished[reason].inc()
        self.acceptance = joined([self.acceptance, state.acceptance])

    def render(self, stats: EngineStats | None) -> bytes:
        """All metrics in Prometheus' text format."""
        if stats is not None:
            self._gauges.set(stats)
        return generate_latest(self._registry)

    def _histograms(self, prefixes: list[str], model_name: str, name: str) -> list[Histogram]:
        made = [
            Histogram(
                f"{prefix}:{name}",
                name.replace("_", " "),
                ["model_name"],
                buckets=_LATENCIES,
                registry=self._registry,
            )
            for prefix in prefixes
        ]
        return [metric.labels(model_name) for metric in made]

    def _counters(self, prefixes: list[str], model_name: str, name: str) -> list[Counter]:
        made = [
            Counter(
                f"{prefix}:{name}",
                name.replace("_", " "),
                ["model_name"],
                registry=self._registry,
            )
            for prefix in prefixes
        ]
        return [metric.labels(model_name) for metric in made]


class _EngineGauges:
    """The engine's own numbers, under our names and those of other systems' dashboards."""

    _NAMES = {  # noqa: RUF012 (a constant)
        "truespec": ("num_requests_running", "num_requests_waiting", "kv_cache_usage"),
        "vllm": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        "sglang": ("num_running_reqs", "num_queue_reqs", "token_usage"),
    }

    def __init__(self, registry: CollectorRegistry, prefixes: list[str], model_name: str) -> None:
        self._sets = [
            [
                Gauge(
                    f"{prefix}:{name}", name.replace("_", " "), ["model_name"], registry=registry
                ).labels(model_name)
                for name in self._NAMES[prefix]
            ]
            for prefix in prefixes
        ]
        self._hit_rate = [
            Gauge(
                f"{prefix}:cache_hit_rate",
                "share of prompt tokens found in the prefix cache",
                ["model_name"],
                registry=registry,
            ).labels(model_name)
            for prefix in prefixes
            if prefix != "vllm"
        ]
        self._totals = _PrefixCacheTotals(prefixes, model_name)
        registry.register(self._totals)

    def set(self, stats: EngineStats) -> None:
        """Take the engine's last numbers."""
        usage = stats.num_pages_used / stats.num_pages if stats.num_pages else 0.0
        for running, waiting, used in self._sets:
            running.set(stats.num_running)
            waiting.set(stats.num_waiting)
            used.set(usage)
        prompts = stats.num_prompt_tokens
        for gauge in self._hit_rate:
            gauge.set(stats.num_cached_prompt_tokens / prompts if prompts else 0.0)
        self._totals.stats = stats


class _PrefixCacheTotals(Collector):
    """Prompt tokens looked up in the prefix cache and found there; totals kept by the engine."""

    def __init__(self, prefixes: list[str], model_name: str) -> None:
        self.stats: EngineStats | None = None
        self._prefixes = [prefix for prefix in prefixes if prefix != "sglang"]
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        """The two counters per prefix."""
        stats = self.stats
        queries = stats.num_prompt_tokens if stats else 0
        hits = stats.num_cached_prompt_tokens if stats else 0
        for prefix in self._prefixes:
            for name, value in (("queries", queries), ("hits", hits)):
                yield _counter(f"{prefix}:prefix_cache_{name}", {**self._labels}, value)


class _AcceptanceCollector(Collector):
    """Speculative decoding since the start."""

    def __init__(self, metrics: Metrics, model_name: str, compat: Sequence[str]) -> None:
        self._metrics = metrics
        self._model_name = model_name
        self._compat = compat

    def collect(self) -> Iterator[Metric]:
        """Counters per draft and position, gauges of the mean."""
        counts = self._metrics.acceptance
        if "vllm" in self._compat:
            yield from self._counters("vllm", {"engine": "0"}, counts)
        yield from self._counters("truespec", {}, counts)
        for prefix in ("truespec", *(name for name in self._compat if name == "sglang")):
            yield self._gauge(f"{prefix}:spec_accept_length", counts.mean_length)
            yield self._gauge(f"{prefix}:spec_accept_rate", counts.rate)

    def _counters(self, prefix: str, more: dict[str, str], counts: Acceptance) -> Iterator[Metric]:
        labels = {"model_name": self._model_name, **more}
        base = f"{prefix}:spec_decode_num"
        yield _counter(f"{base}_drafts", labels, counts.num_steps)
        yield _counter(f"{base}_draft_tokens", labels, counts.num_drafts)
        yield _counter(f"{base}_accepted_tokens", labels, counts.num_accepted)
        family = CounterMetricFamily(
            f"{base}_accepted_tokens_per_pos",
            "accepted drafts by their place in the draft",
            labels=[*labels, "position"],
        )
        for position, count in enumerate(counts.per_position):
            family.add_metric([*labels.values(), str(position)], count)
        yield family

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, "since the start", labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


def _counter(name: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, name.split(":")[1].replace("_", " "), labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
