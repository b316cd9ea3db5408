"""What a decoder is: sizes, variants and generation defaults, from a Hugging Face directory.

Knows the old and new spellings of config.json. A field that changes the forward pass and is not
built is an error that names it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from truespec.layers.rope import RopeParameters

from .fields import CheckpointError, Fields
from .rope_config import read_rope

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Family:
    """How a model family departs from Llama.

    Attributes:
        name: `model_type` in config.json and the architecture's name in GGUF.
        qkv_bias, o_bias: True, False, or `None` for "as attention_bias says".
        qk_norm: q and k are normed per head.
        default_head_dim: where config.json has none; `None` for hidden / heads.
        default_sliding_window: where config.json has none.
    """

    name: str
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    default_head_dim: int | None = None
    default_sliding_window: int | None = None


FAMILIES = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family(
        "mistral", qkv_bias=False, o_bias=False, default_sliding_window=4096
    ),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, default_head_dim=128),
}

# Fields that change the forward pass, with the values under which they change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "rope_interleave": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "no_rope_layers": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "quantization_config": (),
    "attention_chunk_size": (),
    "is_encoder_decoder": (False,),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama kind.

    Attributes:
        family: "llama", "mistral", "qwen2" or "qwen3".
        vocab_size: rows of the head, the real vocabulary.
        context_length: positions the model was made for, rope scaling included.
        qkv_bias, o_bias, qk_norm: which optional parameters each layer has.
        eos_token_ids: every id that ends a text, from all the checkpoint's places, ascending.
        sampling_defaults: what generation_config.json recommends, by its own names.
        dtype: type of the stored weights, for information.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    context_length: int
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Check what the arithmetic relies on."""
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads is {self.num_heads}, "
                f"expected a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}, expected an even number")


def read_config(directory: Path) -> ModelConfig:
    """The config of a Hugging Face directory, with its generation_config.json if there is one.

    Raises:
        CheckpointError: a field is missing, malformed, or asks for what is not built.
    """
    raw = Fields.read(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = Fields.read(generation_path) if generation_path.exists() else Fields({}, "")
    return decoder_config(raw, family_of(raw), generation)


def family_of(raw: Fields) -> Family:
    """The family that `architectures` names."""
    names = raw.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in FAMILIES:
        return FAMILIES[names[0]]
    raise raw.error("architectures", f"one of {', '.join(FAMILIES)}")


def decoder_config(raw: Fields, family: Family, generation: Fields) -> ModelConfig:
    """A config of `family` from the fields of a config.json; errors as `read_config`."""
    _refuse_unbuilt(raw, family)
    hidden_size, num_heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    attention_bias = raw.flag("attention_bias", default=False)
    rope, context_length = read_rope(raw)
    return ModelConfig(
        family=family.name,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=raw.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=raw.integer("num_key_value_heads", num_heads),
        head_dim=raw.integer("head_dim", family.default_head_dim or hidden_size // num_heads),
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=rope,
        context_length=context_length,
        tie_word_embeddings=raw.flag("tie_word_embeddings", default=False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        qk_norm=family.qk_norm,
        bos_token_id=next(iter(raw.ids("bos_token_id")), None),
        eos_token_ids=tuple(sorted({*raw.ids("eos_token_id"), *generation.ids("eos_token_id")})),
        sampling_defaults={
            name: generation.number(name)
            for name in SAMPLING_FIELDS
            if generation.get(name) is not None
        },
        dtype=raw.text("dtype", raw.text("torch_dtype", "float32")),
    )


def _refuse_unbuilt(raw: Fields, family: Family) -> None:
    """Raise for a field that changes the forward pass in a way that is not built."""
    for name, neutral in _NEUTRAL.items():
        value = raw.get(name)
        if value is not None and value not in neutral:
            expected = " or ".join(map(repr, neutral)) or "no such field"
            raise raw.error(name, f"{expected} (nothing else is built)")
    _refuse_sliding_window(raw, family)


def _refuse_sliding_window(raw: Fields, family: Family) -> None:
    """Raise if any layer attends to a window only."""
    layer_types = raw.get("layer_types")
    if isinstance(layer_types, list):
        if set(layer_types) - {"full_attention"}:
            raise raw.error("layer_types", "full_attention only (no other type is built)")
        return
    window = raw.get("sliding_window")
    if family.default_sliding_window is None:
        in_use = raw.flag("use_sliding_window", default=False) and window is not None
    else:
        # NOTE: an explicit null switches the window off, an absent field means the default.
        in_use = window is not None or not raw.has("sliding_window")
    if in_use:
        raise raw.error("sliding_window", "null (attention windows are not built)")
