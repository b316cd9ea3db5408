"""Tiny random checkpoints, written by transformers, with a byte-level tokenizer beside them.

Independent of the package under test: the oracle is the model that `tiny_model` returns.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedModel

Option = int | float | bool | str | list[str] | dict[str, float | int | str | bool] | None

VOCAB_SIZE = 300
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Merges that make common words of English test prompts more than one byte long.
MERGES = re.split(
    ",",
    "t h,i n,a n,e r,Ġ t,Ġ a,th e,o n,r e,Ġt he,h e,o u,e n,Ġ w,Ġ s,a t,i s,o r,Ġ c,i t,Ġ o,e s,"
    "l l,Ġ f,an d,Ġ p,in g,o f,Ġ b,Ġ m,Ġ 1,e d,Ġ h,Ġ in,Ġ d,a r,Ġ l,i c,Ġ n,o m,s t",
)
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
_DEFAULTS: dict[str, Option] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def tiny_config(family: str, **options: Option) -> PreTrainedConfig:
    """A config of "llama", "mistral", "qwen2" or "qwen3"; `options` override its fields."""
    values = dict(_DEFAULTS)
    if family == "mistral":
        values["sliding_window"] = None
    return _CLASSES[family][0](**(values | options))


def tiny_model(family: str, seed: int = 0, **options: Option) -> PreTrainedModel:
    """A random fp32 model with every parameter away from its neutral value."""
    torch.manual_seed(seed)
    model = _CLASSES[family][1](tiny_config(family, **options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide enough that the next token is neither certain nor uniform.
            spread = 0.3 if name.endswith("bias") or "norm" in name else 0.12
            parameter.add_(torch.randn_like(parameter) * spread)
    return model


def tiny_checkpoint(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **options: Option,
) -> Path:
    """Write a tiny model with tokenizer and chat template; returns `directory`.

    Args:
        max_shard_size: small values ("100KB") make several files with an index.
        options: fields of the config, see `tiny_config`.
    """
    model = tiny_model(family, seed, **options).to(dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_tokenizer(directory, int(model.config.vocab_size))
    return directory


def write_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A byte-level BPE tokenizer with exactly `min(vocab_size, 300)` tokens."""
    tiny_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Special tokens, the 256 bytes, then merged pieces."""
    pieces = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [tuple(merge.split(" ")) for merge in MERGES[: vocab_size - len(pieces)]]
    pieces += [left + right for left, right in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer
