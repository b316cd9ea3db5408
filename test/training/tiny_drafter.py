"""A tiny random target and sequences whose teacher is sure of every recorded token."""

import torch
from torch import Tensor

from truespec.training.cache import FeatureSequence
from truespec.training.config import DSparkShape
from truespec.training.target import Target

HIDDEN, HEADS, KV_HEADS, VOCAB, LAYERS = 32, 2, 1, 61, 4
SHAPE = DSparkShape(
    target_layer_ids=(0, 2),
    num_layers=2,
    num_kv_heads=2,
    block_size=4,
    draft_vocab_size=48,
    markov_rank=4,
)


def random_weight(*shape: int) -> Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5


def layer_weights() -> dict[str, Tensor]:
    kv = HIDDEN // HEADS * KV_HEADS
    return {
        "input_layernorm.weight": torch.rand(HIDDEN) + 0.5,
        "post_attention_layernorm.weight": torch.rand(HIDDEN) + 0.5,
        "self_attn.q_proj.weight": random_weight(HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": random_weight(kv, HIDDEN),
        "self_attn.v_proj.weight": random_weight(kv, HIDDEN),
        "self_attn.o_proj.weight": random_weight(HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": random_weight(2 * HIDDEN, HIDDEN),
        "mlp.up_proj.weight": random_weight(2 * HIDDEN, HIDDEN),
        "mlp.down_proj.weight": random_weight(HIDDEN, 2 * HIDDEN),
    }


def make_target() -> Target:
    torch.manual_seed(0)
    weights = {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "norm.weight": torch.ones(HIDDEN)}
    for i in range(LAYERS):
        weights |= {f"layers.{i}.{k}": v for k, v in layer_weights().items()}
    config: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
    }
    return Target(config, weights)


def make_sequence(target: Target, length: int, prompt: int, seed: int) -> FeatureSequence:
    """Random tokens below 48; the teacher's argmax at each position is the next token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 48, (length,), generator=generator)
    sure = target.head[ids.roll(-1)]
    return FeatureSequence(
        ids.int(),
        (torch.arange(length) >= prompt).to(torch.uint8),
        torch.randn(length, 2, HIDDEN, generator=generator).bfloat16(),
        sure.bfloat16(),
        temperature=0.0,
        category="qa",
    )
