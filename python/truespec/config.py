"""Every option with its default. Frozen: `resolve` returns a new object, nobody changes one.

The command line is made from this class (flag = field name with dashes), so an option exists once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from truespec.params import LogprobMode

Algorithm = Literal["NONE", "NGRAM", "DSPARK", "DFLASH", "EAGLE", "EAGLE3", "NEXTN"]
AcceptMode = Literal["coupled", "rejection"]
DEFAULT_MODEL = "smollm2"


def option(default: object, text: str) -> object:
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine needs: model, memory, batch limits, speculation.

    `None` means that `resolve` decides from the machine or the checkpoints.
    """

    model_path: str = option(DEFAULT_MODEL, "directory, GGUF file, or the name of a packaged model")  # type: ignore[assignment]
    tokenizer_path: str | None = option(None, "directory or GGUF file with the tokenizer")  # type: ignore[assignment]
    chat_template: str | None = option(None, "file with a Jinja chat template")  # type: ignore[assignment]
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "weight type")  # type: ignore[assignment]
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute")  # type: ignore[assignment]
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "type of the KV cache")  # type: ignore[assignment]
    context_length: int | None = option(None, "longest prompt + output, in tokens")  # type: ignore[assignment]
    max_running_requests: int = option(32, "requests in one batch at most")  # type: ignore[assignment]
    max_queued_requests: int = option(1024, "waiting requests before 429")  # type: ignore[assignment]
    max_total_tokens: int | None = option(None, "KV cache size in tokens")  # type: ignore[assignment]
    mem_fraction_static: float = option(0.3, "share of free memory for the KV cache if no size is given")  # type: ignore[assignment]
    chunked_prefill_size: int = option(256, "prompt rows per step at most")  # type: ignore[assignment]
    page_size: int = option(16, "tokens per KV page, a multiple of 16")  # type: ignore[assignment]
    disable_radix_cache: bool = option(False, "no prefix reuse between requests")  # type: ignore[assignment]
    num_threads: int | None = option(None, "compute threads on a CPU")  # type: ignore[assignment]
    tp_size: int = option(1, "tensor-parallel ranks (only 1 is built)")  # type: ignore[assignment]
    deterministic: bool = option(False, "bit-equal results (always so on a CPU)")  # type: ignore[assignment]
    logprobs_mode: LogprobMode = option("raw", "default mode of returned logprobs")  # type: ignore[assignment]
    max_logprobs: int = option(20, "most alternatives per token a request may ask for")  # type: ignore[assignment]
    speculative_algorithm: Algorithm = option("NONE", "how tokens are drafted")  # type: ignore[assignment]
    speculative_draft_model_path: str | None = option(None, "directory of the drafter")  # type: ignore[assignment]
    speculative_num_steps: int | None = option(None, "draft depth")  # type: ignore[assignment]
    speculative_eagle_topk: int | None = option(None, "children per tree node (1: a chain)")  # type: ignore[assignment]
    speculative_num_draft_tokens: int | None = option(None, "rows verified per step, root included")  # type: ignore[assignment]
    speculative_dspark_block_size: int | None = option(None, "drafts per DSpark block")  # type: ignore[assignment]
    speculative_dspark_confidence_threshold: float = option(0.0, "cut a draft at the first confidence below")  # type: ignore[assignment]
    speculative_accept: AcceptMode = option("coupled", "how drafts are accepted")  # type: ignore[assignment]
    enable_multi_layer_eagle: bool = option(False, "one MTP layer per draft step")  # type: ignore[assignment]
    speculative_adaptive: bool = option(True, "draft lengths follow measured cost and acceptance")  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the HTTP server needs beside the engine's options."""

    host: str = option("127.0.0.1", "address to bind")  # type: ignore[assignment]
    port: int = option(30000, "port to bind")  # type: ignore[assignment]
    api_key: str | None = option(None, "required bearer token")  # type: ignore[assignment]
    served_model_name: str | None = option(None, "name in /v1/models")  # type: ignore[assignment]
    sampling_defaults: Literal["api", "model"] = option("api", "where sampling defaults come from")  # type: ignore[assignment]
    allow_origin: str | None = option(None, "CORS origin")  # type: ignore[assignment]
    stream_interval: int = option(1, "engine steps per stream chunk")  # type: ignore[assignment]
    incremental_streaming_output: bool = option(False, "/generate streams differences")  # type: ignore[assignment]
    metrics_compat: str = option("", "also export metric names of: vllm,sglang")  # type: ignore[assignment]
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "verbosity")  # type: ignore[assignment]


def option_names(cls: type) -> list[str]:
    """Names of the options of a config class, in order."""
    return [f.name for f in fields(cls)]
