"""/metrics as Prometheus reads it, under our names and those of existing dashboards."""

from __future__ import annotations

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from workers import MODEL_NAME

from api_client import ApiClient

HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds")
HISTOGRAMS += ("e2e_request_latency_seconds",)


def scrape(client: ApiClient) -> dict[str, Metric]:
    """Families by name, as the official parser reads them."""
    reply = client.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(reply.text)}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The one sample of this name with these labels among its own."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{name} {labels}: {len(found)} samples"
    return found[0]


def test_counters_grow_by_what_replies_report(dspark: ApiClient) -> None:
    before = scrape(dspark)
    body = {"prompt": [40, 41, 42, 43], "max_tokens": 40, "temperature": 3, "seed": 1}
    reply = dspark.ok("/v1/completions", {**body, "ignore_eos": True})
    after = scrape(dspark)
    spec = reply["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] > 0
    wanted = {
        "vllm:spec_decode_num_drafts_total": spec["num_spec_steps"],
        "vllm:spec_decode_num_draft_tokens_total": spec["num_draft_tokens"],
        "vllm:spec_decode_num_accepted_tokens_total": spec["num_accepted_draft_tokens"],
        "truespec:spec_decode_num_accepted_tokens_total": spec["num_accepted_draft_tokens"],
        "vllm:generation_tokens_total": 40,
        "sglang:generation_tokens_total": 40,
        "truespec:prompt_tokens_total": 4,
    }
    for name, count in wanted.items():
        assert value(after, name) - value(before, name) == count, name
    for position in range(len(spec["acceptance_histogram"]) - 1):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        labels = {"position": str(position), "model_name": MODEL_NAME, "engine": "0"}
        reached = sum(spec["acceptance_histogram"][position + 1 :])
        old = value(before, name, **labels) if name_has(before, name, position) else 0
        new = value(after, name, **labels) if name_has(after, name, position) else 0
        assert new - old == reached


def name_has(families: dict[str, Metric], name: str, position: int) -> bool:
    """Positions appear once a draft reached them."""
    samples = [sample for family in families.values() for sample in family.samples]
    return any(s.name == name and s.labels["position"] == str(position) for s in samples)


@pytest.mark.parametrize("prefix", ["truespec", "vllm", "sglang"])
def test_latency_histograms_are_cumulative_and_counted_once(dspark: ApiClient, prefix: str) -> None:
    dspark.ok("/v1/completions", {"prompt": [40, 41], "max_tokens": 4, "ignore_eos": True})
    families = scrape(dspark)
    for name in HISTOGRAMS:
        family = families[f"{prefix}:{name}"]
        assert family.type == "histogram"
        buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == value(families, f"{prefix}:{name}_count") > 0
    count = value(families, f"{prefix}:e2e_request_latency_seconds_count")
    assert count == value(families, f"{prefix}:time_to_first_token_seconds_count")


def test_gauges_of_the_compat_names_are_there(dspark: ApiClient) -> None:
    families = scrape(dspark)
    gauges = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
    gauges += ["sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"]
    gauges += ["sglang:spec_accept_length", "sglang:spec_accept_rate", "sglang:cache_hit_rate"]
    for name in gauges:
        assert families[name].type == "gauge", name
        assert value(families, name, model_name=MODEL_NAME) >= 0
    for name in ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"):
        assert families[name].type == "counter", name
