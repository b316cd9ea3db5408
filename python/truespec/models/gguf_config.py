"""Model configs from GGUF metadata. A key that is not known to be harmless is an error."""

from __future__ import annotations

from truespec.layers.rope import RopeParameters
from truespec.utils.gguf_file import GGUFFile

from .config import ModelConfig
from .fields import CheckpointError, Fields

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_DIVISORS = "rope_freqs.weight"
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_READ = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
_INFORMATION = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})


def read_gguf_config(file: GGUFFile, source: str) -> ModelConfig:
    """The config of a GGUF file; `source` names it in errors.

    Raises:
        CheckpointError: unknown architecture, or a key that is missing, malformed or not built.
    """
    general = Fields({"general.architecture": file.get("general.architecture")}, source)
    family = general.text("general.architecture", "")
    if family not in ARCHITECTURES:
        raise general.error("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
    raw = _architecture_fields(file, family, source)
    names = {tensor.name for tensor in file.tensors}
    hidden_size, num_heads = raw.integer("embedding_length"), raw.integer("attention.head_count")
    head_dim = raw.integer("attention.key_length", hidden_size // num_heads)
    _check_head_dims(raw, head_dim)
    rope, context_length = _read_rope(raw, file)
    return ModelConfig(
        family=family,
        vocab_size=_vocab_size(file, source),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("feed_forward_length"),
        num_layers=raw.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=raw.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=raw.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        context_length=context_length,
        tie_word_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        o_bias="blk.0.attn_output.bias" in names,
        qk_norm=family == "qwen3",
        bos_token_id=next(iter(_token_ids(file, "bos_token_id")), None),
        eos_token_ids=tuple(sorted(set(_token_ids(file, *EOS_KEYS)))),
        dtype=_commonest_type(file),
    )


def _architecture_fields(file: GGUFFile, family: str, source: str) -> Fields:
    """Keys of the architecture without its prefix; unknown ones are refused."""
    prefix = f"{family}."
    values = {key.removeprefix(prefix): file.get(key) for key in file.keys(prefix)}
    raw = Fields(values, f"{source}: {family}")
    for key in sorted(values.keys() - _READ - _INFORMATION):
        if values[key]:
            raise raw.error(key, "no such key (it is not built)")
    return raw


def _check_head_dims(raw: Fields, head_dim: int) -> None:
    """Values as long as keys, and every dimension rotated."""
    for key in ("attention.value_length", "rope.dimension_count"):
        if raw.integer(key, head_dim) != head_dim:
            raise raw.error(key, f"{head_dim}, the length of a key (nothing else is built)")


def _read_rope(raw: Fields, file: GGUFFile) -> tuple[RopeParameters, int]:
    """Rope parameters and the context length they give."""
    positions, theta = raw.integer("context_length"), raw.number("rope.freq_base", 10000.0)
    kind, factor = raw.text("rope.scaling.type", "none"), raw.number("rope.scaling.factor", 1.0)
    divisors = _rope_divisors(file)
    if kind == "none":
        return RopeParameters(theta=theta, freq_divisors=divisors), positions
    if kind == "linear":
        linear = RopeParameters(theta=theta, type="linear", factor=factor, freq_divisors=divisors)
        return linear, positions
    if kind != "yarn":
        raise raw.error("rope.scaling.type", "none, linear or yarn")
    parameters = RopeParameters(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_positions=raw.integer("rope.scaling.original_context_length", positions),
        beta_fast=raw.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=raw.number("rope.scaling.yarn_beta_slow", 1.0),
        freq_divisors=divisors,
    )
    if raw.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise raw.error("rope.scaling.attn_factor", "1 (nothing else is built)")
    return parameters, max(positions, int(factor * parameters.original_max_positions))


def _rope_divisors(file: GGUFFile) -> tuple[float, ...]:
    """Llama 3's scaling, which GGUF stores as explicit divisors."""
    found = [tensor for tensor in file.tensors if tensor.name == ROPE_DIVISORS]
    return tuple(found[0].data.tolist()) if found else ()


def _vocab_size(file: GGUFFile, source: str) -> int:
    """Rows of the head: of the output matrix, or of the embedding it is tied to."""
    rows = {tensor.name: int(tensor.shape[-1]) for tensor in file.tensors}
    size = rows.get("output.weight", rows.get("token_embd.weight"))
    if size is None:
        raise CheckpointError(f"{source}: tensor token_embd.weight is missing")
    return size


def _token_ids(file: GGUFFile, *keys: str) -> list[int]:
    """The token ids that are there under the tokenizer's keys."""
    values = [file.get(f"tokenizer.ggml.{key}") for key in keys]
    return [value for value in values if isinstance(value, int)]


def _commonest_type(file: GGUFFile) -> str:
    """The type of most matrices, for information."""
    kinds = [tensor.tensor_type.name for tensor in file.tensors if len(tensor.shape) == 2]
    return max(sorted(set(kinds)), key=kinds.count, default="F32")
