"""A target whose layers 1 and 2 are known: first values make a drafter continue like the target."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chain_data import DRAFT_IDS, LAYERS, random_sequence
from torch import Tensor

from dense_drafters import tiny_target
from tiny_drafters import HIDDEN
from truespec.training.cache import FeatureCache, FeatureSequence, write_shard
from truespec.training.chain_start import start_heads, start_midlayer
from truespec.training.chains import pack_chains
from truespec.training.dspark_model import dims_of
from truespec.training.eagle3_model import Eagle3Model, forward_chains
from truespec.training.eagle_config import Eagle3Shape, MtpShape
from truespec.training.mtp_model import MtpModel, forward_heads
from truespec.training.target import Target, load_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    root = tmp_path_factory.mktemp("start")
    tiny_target(root)
    return load_target(root)


def predictable(target: Target, seed: int) -> FeatureSequence:
    """The last tap is linear in the token itself and in what the position before shows."""
    sequence = random_sequence(target.head.float(), 60, 5, seed)
    mix = torch.randn(2, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(99)) / HIDDEN**0.5
    embedded = F.rms_norm(target.embedding[sequence.token_ids.long()].float(), (HIDDEN,))
    before = F.rms_norm(sequence.last.float(), (HIDDEN,)).roll(1, 0)
    sequence.taps[:, 1] = (5 * (embedded @ mix[0] + before @ mix[1])).bfloat16()
    return sequence


def behind(target: Target, stream: Tensor, with_attention: Tensor | None) -> Tensor:
    """The MLP of layer 2 in fp32 on [n, H], after what its attention added."""
    weights = {name: value.float() for name, value in target.layer(2).items()}
    x = stream if with_attention is None else stream + with_attention
    normed = F.rms_norm(x, (HIDDEN,), weights["post_attention_layernorm.weight"], 1e-6)
    gate, up = (normed @ weights[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return x + (F.silu(gate) * up) @ weights["mlp.down_proj.weight"].T


def test_an_mtp_head_guesses_the_tap_and_goes_on_as_the_next_layer(
    target: Target, tmp_path: Path
) -> None:
    sequences = [predictable(target, seed) for seed in range(20)]
    write_shard(tmp_path / "train-00000.safetensors", sequences, LAYERS)
    model = MtpModel(MtpShape(num_heads=1, num_kv_heads=2, draft_vocab_size=40), dims_of(target))
    start_heads(model, target, FeatureCache(tmp_path, "train", (1,)))
    # The chain at row 0 sees itself alone: its attention gives back its own value.
    batch = pack_chains([predictable(target, 50)], [np.array([0])])
    (got,) = forward_heads(model, batch, target.embedding)
    weights = {name: value.float() for name, value in target.layer(2).items()}
    stream = batch.taps[1:2, 1].float()
    value = F.rms_norm(stream, (HIDDEN,), weights["input_layernorm.weight"], 1e-6)
    value = (value @ weights["self_attn.v_proj.weight"].T).view(1, 2, 1, -1)
    attention = value.expand(-1, -1, 2, -1).reshape(1, -1) @ weights["self_attn.o_proj.weight"].T
    out = F.rms_norm(behind(target, stream, attention), (HIDDEN,), target.norm.float(), 1e-6)
    assert F.cosine_similarity(got.float(), out) > 0.98


def test_an_eagle3_drafter_guesses_the_tap_from_the_taps(target: Target, tmp_path: Path) -> None:
    sequences = []
    for seed in range(20):
        sequence = predictable(target, seed)
        sequence.taps[:-1, 0] = sequence.taps[1:, 1]  # the first tap shows the next row's second
        sequences.append(sequence)
    write_shard(tmp_path / "train-00000.safetensors", sequences, LAYERS)
    shape = Eagle3Shape(
        target_layer_ids=(0, 1), num_kv_heads=2, num_drafts=1, draft_vocab_size=len(DRAFT_IDS)
    )
    model = Eagle3Model(shape, dims_of(target))
    cache = FeatureCache(tmp_path, "train", (0, 1))
    start_midlayer(model, target, cache)
    with torch.no_grad():
        model.midlayer.self_attn.o_proj.weight.zero_()
    batch = pack_chains([cache[3]], [np.array([10, 20])])
    (got,) = forward_chains(model, batch, target.embedding)
    stream = cache[3].taps[[11, 21], 1].float()
    out = F.rms_norm(behind(target, stream, None), (HIDDEN,), target.norm.float(), 1e-6)
    assert F.cosine_similarity(got.float(), out).min() > 0.98
