"""DFlash: row rule, learning by heart, what a checkpoint hands over, and the engine's drafts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_drafter import SHAPE as DSPARK_SHAPE
from tiny_drafter import make_sequence

from truespec.batch import Batch
from truespec.config import EngineConfig
from truespec.llm import LLM
from truespec.params import SamplingParams
from truespec.speculative.contract import Draft
from truespec.training import loop
from truespec.training.block_task import logits_loss
from truespec.training.block_tasks import adopt_shape
from truespec.training.blocks import all_anchors, make_batch
from truespec.training.cache import FeatureCache, FeatureSequence, write_shard
from truespec.training.config import Batching, DFlashLoss, DFlashShape, DSparkShape, LoopConfig
from truespec.training.dflash import DFlashTask
from truespec.training.dspark_model import BlockModel, DSparkModel, dims_of
from truespec.training.export import export_block
from truespec.training.start import start_from_checkpoint
from truespec.training.target import Target, load_target

SHAPE = DFlashShape((0, 2), num_layers=2, num_kv_heads=2, block_size=4, draft_vocab_size=48)
VOCAB_IDS = torch.arange(SHAPE.draft_vocab_size)
NO_COUNTS = np.zeros(1000, dtype=np.int64)


def make_model(target: Target, shape: DFlashShape = SHAPE) -> BlockModel:
    torch.manual_seed(2)
    return BlockModel(shape, dims_of(target))


def test_twenty_answers_are_learned_by_heart(target: Target, tmp_path: Path) -> None:
    sequences = [make_sequence(target, 14, 4, seed=i) for i in range(20)]
    write_shard(tmp_path / "train-00000.safetensors", sequences, [0, 2])
    cache = FeatureCache(tmp_path, "train")
    batching = Batching(num_sequences=5, anchors_per_sequence=8)
    loss = DFlashLoss(ce_only_fraction=0.8)
    model = make_model(target)
    task = DFlashTask(model, target, VOCAB_IDS, cache, cache, batching=batching, loss=loss)
    config = LoopConfig(num_steps=200, learning_rate=1.2e-2, muon_min_dim=16, measure_every=200)
    loop.train(task, tmp_path / "run", config)
    history = [json.loads(x) for x in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    # 9 tokens behind the first of each answer, in rounds of at most 5: 2 rounds.
    assert history[-1]["dev/greedy"] > 0.9 * 9 / 2


def test_row_i_learns_the_token_after_anchor_plus_i(target: Target) -> None:
    """Hidden states that say exactly that token have a loss of nearly nothing."""
    sequences = [make_sequence(target, n, 4, seed=n) for n in (12, 17)]
    batch = make_batch(sequences, [np.array([4, 9, 6]), np.array([8, 13])], SHAPE.block_size)
    following = F.one_hot(batch.token_ids.roll(-1, dims=1), len(VOCAB_IDS))
    batch = replace(batch, last=60.0 * following)

    def metrics_of(shift: int) -> dict[str, float]:
        hidden = torch.zeros(2, 3, SHAPE.block_size, len(VOCAB_IDS))
        for i, (sequence, anchors) in enumerate(zip(sequences, batch.anchors, strict=True)):
            for j, anchor in enumerate(anchors.tolist()):
                said = sequence.token_ids[anchor + shift :][: SHAPE.block_size].long()
                hidden[i, j, torch.arange(len(said)), said] = 60.0
        return logits_loss(
            make_model(target),
            batch,
            hidden,
            draft_head=torch.eye(len(VOCAB_IDS)),
            draft_vocab=VOCAB_IDS,
            config=DFlashLoss(),
            progress=0.0,
        ).metrics

    right, early, late = (metrics_of(shift) for shift in (1, 0, 2))
    assert right["top1"] == 1.0
    assert early["top1"] == late["top1"] == 0.0
    # Anchors 4, 9, 6 of 12 tokens and 8, 13 of 17 have 4, 2, 4 and 4, 3 tokens behind them.
    assert right["tau"] == pytest.approx(1 + (4 + 2 + 4 + 4 + 3) / 5, abs=0.05)
    assert right["loss"] < 0.1 < 20 < early["loss"]


def test_a_dspark_checkpoint_hands_over_its_backbone_and_vocabulary(
    target: Target, tmp_path: Path
) -> None:
    dspark = DSparkModel(DSPARK_SHAPE, dims_of(target))
    dspark.tap_scale.fill_(2.0)
    vocab = VOCAB_IDS + 7
    export_block(dspark, target, vocab, tmp_path / "dspark")
    model = make_model(target, replace(SHAPE, block_size=6))
    model.tap_scale.fill_(5.0)
    assert torch.equal(start_from_checkpoint(model, tmp_path / "dspark", NO_COUNTS), vocab)
    export_block(model, target, vocab, tmp_path / "dflash")
    theirs, ours = (load_file(tmp_path / x / "model.safetensors") for x in ("dspark", "dflash"))
    heads = {name for name in theirs if name.startswith(("markov_head.", "confidence_head."))}
    assert set(ours) == set(theirs) - heads
    for name, tensor in ours.items():
        assert torch.allclose(tensor.float(), theirs[name].float(), rtol=0.01), name
    deeper = make_model(target, replace(SHAPE, num_layers=3))
    with pytest.raises(ValueError, match="has num_layers 2, not 3"):
        start_from_checkpoint(deeper, tmp_path / "dspark", NO_COUNTS)
    adopted = adopt_shape(DSparkShape(block_size=6), tmp_path / "dspark")
    assert adopted == replace(DSPARK_SHAPE, block_size=6)
    with pytest.raises(ValueError, match="no Markov head"):
        adopt_shape(DSparkShape(), tmp_path / "dflash")


def test_a_draft_vocabulary_grows_by_the_most_frequent_ids(target: Target, tmp_path: Path) -> None:
    small = DSparkModel(replace(DSPARK_SHAPE, draft_vocab_size=3), dims_of(target))
    export_block(small, target, torch.tensor([2, 5, 8]), tmp_path / "small")
    model = DSparkModel(replace(DSPARK_SHAPE, draft_vocab_size=5), dims_of(target))
    counts = np.zeros(model.dims.vocab, dtype=np.int64)
    counts[[1, 5, 6, 7]] = 3, 100, 9, 4
    assert start_from_checkpoint(model, tmp_path / "small", counts).tolist() == [2, 5, 6, 7, 8]
    grown, w2 = model.markov_weight(), small.markov_weight().bfloat16().float()
    assert torch.equal(grown[[0, 1, 4]], w2)
    assert not grown[2:4].any()
    shorter = DSparkModel(replace(DSPARK_SHAPE, draft_vocab_size=2), dims_of(target))
    with pytest.raises(ValueError, match="has draft_vocab_size 3, not 2"):
        start_from_checkpoint(shorter, tmp_path / "small", counts)


def test_the_engine_drafts_what_the_trained_module_says(tiny_llama: Path, tmp_path: Path) -> None:
    target = load_target(tiny_llama)
    model = make_model(target, replace(SHAPE, target_layer_ids=(0, 1), draft_vocab_size=200))
    for parameter in model.parameters():
        parameter.data = (parameter * 4).bfloat16().float()
    vocab = torch.arange(90, 290)
    export_block(model, target, vocab, tmp_path / "out")
    config = EngineConfig(
        model_path=str(tiny_llama),
        max_total_tokens=1024,
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(tmp_path / "out"),
        speculative_draft_model_quantization="none",
        speculative_adaptive=False,
    )
    llm = LLM(config)
    drafted = note_drafts(llm)
    prompt = list(range(20, 60, 3))
    answer = llm.generate(
        [prompt], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    )[0].token_ids
    taps, last = llm.features(prompt + answer, model.shape.target_layer_ids)
    is_answer = torch.arange(len(taps)) >= len(prompt)
    ids = torch.tensor(prompt + answer)
    sequence = FeatureSequence(ids.int(), is_answer.to(torch.uint8), taps, last, 0.0, "qa")
    batch = make_batch([sequence], [all_anchors(sequence)], SHAPE.block_size)
    embeds = target.embedding[batch.token_ids.gather(1, batch.anchors)].float()
    with torch.no_grad():
        hidden = model(batch.taps, batch.anchors, embeds)[0]
    chosen = vocab[(hidden @ target.head[vocab].float().T).argmax(-1)]
    said = dict(zip(batch.anchors[0].tolist(), chosen.tolist(), strict=True))
    assert len(drafted) > 5
    assert len({tuple(draft) for draft in drafted.values()}) > 5
    for anchor, draft in drafted.items():
        assert draft == said[anchor][: len(draft)], anchor


def note_drafts(llm: LLM) -> dict[int, list[int]]:
    """Filled while `llm` runs one request: position of the root -> drafts behind it."""
    drafts: dict[int, list[int]] = {}
    draft = llm.worker.draft

    def noted(batch: Batch) -> Draft:
        result = draft(batch)
        (chunk,) = batch.chunks
        if chunk.samples and len(result.token_ids) > 1:
            drafts[chunk.start] = result.token_ids[1:].tolist()
        return result

    llm.worker.draft = noted  # type: ignore[method-assign]  # this is the point
    return drafts
