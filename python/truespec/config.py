"""Every option with its default. Frozen: `resolve` returns a new object, nobody changes one.

The command line is made from this class (flag = field name with dashes), so an option exists once.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Literal, NamedTuple, get_args, get_type_hints

from truespec.params import LogprobMode

Algorithm = Literal["NONE", "NGRAM", "DSPARK", "DFLASH", "EAGLE", "EAGLE3", "NEXTN"]
AcceptMode = Literal["coupled", "rejection"]
Quantization = Literal["none", "q8_0", "q4_1"]
DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine needs: model, memory, batch limits, speculation.

    `None` means that `resolve` decides from the machine or the checkpoints.
    """

    model_path: Annotated[str, "directory, GGUF file, or the name of a packaged model"] = (
        DEFAULT_MODEL
    )
    tokenizer_path: Annotated[str | None, "directory or GGUF file with the tokenizer"] = None
    chat_template: Annotated[str | None, "file with a Jinja chat template"] = None
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], "weight type"] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], "where to compute"] = "auto"
    kv_cache_dtype: Annotated[Literal["auto", "float32", "bfloat16"], "type of the KV cache"] = (
        "auto"
    )
    context_length: Annotated[int | None, "longest prompt + output, in tokens"] = None
    max_running_requests: Annotated[int, "requests in one batch at most"] = 32
    max_queued_requests: Annotated[int, "waiting requests before 429"] = 1024
    max_total_tokens: Annotated[int | None, "KV cache size in tokens"] = None
    mem_fraction_static: Annotated[
        float, "share of free memory for the KV cache if no size is given"
    ] = 0.3
    chunked_prefill_size: Annotated[int, "prompt rows per step at most"] = 256
    page_size: Annotated[int, "tokens per KV page, a multiple of 16"] = 16
    disable_radix_cache: Annotated[bool, "no prefix reuse between requests"] = False
    num_threads: Annotated[int | None, "compute threads on a CPU"] = None
    tp_size: Annotated[int, "tensor-parallel ranks (only 1 is built)"] = 1
    lossy_int8_activations: Annotated[
        bool, "round inputs of quantized weights to 8 bits: faster, other logprobs (CPU)"
    ] = False
    deterministic: Annotated[bool, "bit-equal results (always so on a CPU)"] = False
    logprobs_mode: Annotated[LogprobMode, "default mode of returned logprobs"] = "raw"
    max_logprobs: Annotated[int, "most alternatives per token a request may ask for"] = 20
    speculative_algorithm: Annotated[Algorithm, "how tokens are drafted"] = "NONE"
    speculative_draft_model_path: Annotated[str | None, "directory of the drafter"] = None
    speculative_draft_model_quantization: Annotated[
        Literal["auto", Quantization], "type of the drafter's matrices"
    ] = "auto"
    speculative_num_steps: Annotated[int | None, "draft depth"] = None
    speculative_eagle_topk: Annotated[int | None, "children per tree node (1: a chain)"] = None
    speculative_num_draft_tokens: Annotated[int | None, "rows verified per step, root included"] = (
        None
    )
    speculative_dspark_block_size: Annotated[int | None, "drafts per DSpark block"] = None
    speculative_dspark_confidence_threshold: Annotated[
        float, "cut a draft at the first confidence below"
    ] = 0.0
    speculative_accept: Annotated[AcceptMode, "how drafts are accepted"] = "coupled"
    enable_multi_layer_eagle: Annotated[bool, "one MTP layer per draft step"] = False
    speculative_adaptive: Annotated[bool, "draft lengths follow measured cost and acceptance"] = (
        True
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the HTTP server needs beside the engine's options."""

    host: Annotated[str, "address to bind"] = "127.0.0.1"
    port: Annotated[int, "port to bind"] = 30000
    api_key: Annotated[str | None, "required bearer token"] = None
    served_model_name: Annotated[str | None, "name in /v1/models"] = None
    sampling_defaults: Annotated[Literal["api", "model"], "where sampling defaults come from"] = (
        "api"
    )
    allow_origin: Annotated[str | None, "CORS origin"] = None
    stream_interval: Annotated[int, "engine steps per stream chunk"] = 1
    incremental_streaming_output: Annotated[bool, "/generate streams differences"] = False
    metrics_compat: Annotated[str, "also export metric names of: vllm,sglang"] = ""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "verbosity"] = "info"


class Option(NamedTuple):
    """One option as a command line needs it.

    Attributes:
        type: the annotation without its help text, e.g. `int | None` or a `Literal`.
    """

    name: str
    type: object
    default: object
    help: str


def options(cls: type) -> list[Option]:
    """The options of a config class, in order."""
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for f in fields(cls):
        annotated, text = get_args(hints[f.name])
        assert f.default is not MISSING, f"option {f.name} has no default"
        found.append(Option(f.name, annotated, f.default, text))
    return found


class Machine(NamedTuple):
    """What `resolve` has to know of the machine and the checkpoints.

    Attributes:
        device: "cpu" or "cuda".
        kernels: name of the kernel set.
        free_bytes: memory the KV cache may be taken from.
        context_length: of the model.
        kv_bytes_per_token: in the cache's type, target and draft layers together.
    """

    device: Literal["cpu", "cuda"]
    kernels: str
    free_bytes: int
    context_length: int
    kv_bytes_per_token: int


def resolve(config: EngineConfig, machine: Machine) -> EngineConfig:
    """Fill what the machine and the checkpoints decide.

    Raises ValueError naming the option when a given value cannot be met.
    """
    context = config.context_length or machine.context_length
    if context > machine.context_length:
        raise ValueError(
            f"--context-length is {context}, the model reaches {machine.context_length}"
        )
    if config.page_size < 16 or config.page_size % 16:
        raise ValueError(f"--page-size is {config.page_size}, expected a multiple of 16")
    if config.tp_size != 1:
        raise ValueError(f"--tp-size is {config.tp_size}, only 1 is built")
    total = config.max_total_tokens
    if total is None:
        affordable = int(machine.free_bytes * config.mem_fraction_static)
        total = min(config.max_running_requests * context, affordable // machine.kv_bytes_per_token)
    pages = total // config.page_size
    if pages < 2:
        raise ValueError(f"--max-total-tokens is {total}, at least two pages are needed")
    return replace(
        config,
        device=machine.device,
        context_length=context,
        max_total_tokens=pages * config.page_size,
        deterministic=config.deterministic or machine.device == "cpu",
        speculative_draft_model_quantization=draft_quantization(config, machine.kernels),
    )


KVDtype = Literal["float32", "bfloat16"]


def kv_dtype(config: EngineConfig, device: str) -> KVDtype:
    """Type of the KV cache: fp32 on a CPU and bf16 on a GPU unless chosen."""
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return "float32" if device == "cpu" else "bfloat16"


def draft_quantization(config: EngineConfig, kernels: str) -> Quantization:
    """Type of a drafter's matrices: 4 bits for kernels that compute on them, unless chosen.

    The torch kernels would widen them again, and gain nothing.
    """
    if config.speculative_draft_model_quantization != "auto":
        return config.speculative_draft_model_quantization
    has_drafter = config.speculative_algorithm not in ("NONE", "NGRAM")
    return "q4_1" if kernels == "numba" and has_drafter else "none"
