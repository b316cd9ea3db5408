import numpy as np
import torch
import torch.nn.functional as F
from tiny_drafter import SHAPE, make_sequence

from truespec.training.block_task import batch_teacher
from truespec.training.blocks import BlockBatch, all_anchors, category_weights, make_batch
from truespec.training.cache import FeatureCache, FeatureSequence
from truespec.training.dspark_model import DSparkModel, forward_blocks
from truespec.training.measure import draft_greedily, round_lengths
from truespec.training.target import Target


def counting_batch() -> BlockBatch:
    """One sequence whose token ids are 100 + position; 10 tokens, answer from 4."""
    ids = torch.arange(100, 110)
    mask = (torch.arange(10) >= 4).to(torch.uint8)
    features = torch.zeros(10, 2, 32), torch.zeros(10, 32)
    sequence = FeatureSequence(ids.int(), mask, *features, temperature=0.0, category="qa")
    assert all_anchors(sequence).tolist() == [4, 5, 6, 7, 8]
    return make_batch([sequence], [np.array([4, 7])], block_size=4)


def test_row_i_predicts_the_token_after_anchor_plus_i() -> None:
    batch = counting_batch()
    assert batch.label_ids[0, 0].tolist() == [105, 106, 107, 108]
    assert batch.previous_ids[0, 0].tolist() == [104, 105, 106, 107]
    assert batch.token_ids.gather(1, batch.anchors).tolist() == [[104, 107]]
    assert batch.is_label[0].tolist() == [[True] * 4, [True, True, False, False]]


def test_teacher_of_a_row_is_the_hidden_one_before_its_label(
    target: Target, cache: FeatureCache
) -> None:
    batch = make_batch([cache[0], cache[2]], [np.array([5, 9]), np.array([7])], block_size=4)
    teacher, rows = batch_teacher(batch, target.head, top_k=3)
    best = teacher.draft_ids[rows, 0].view_as(batch.is_label)
    assert torch.equal(best[batch.is_label], batch.label_ids[batch.is_label])


def test_a_block_sees_features_strictly_before_its_anchor(
    target: Target, model: DSparkModel
) -> None:
    sequence = make_sequence(target, 16, 3, seed=5)
    batch = make_batch([sequence], [np.array([8])], block_size=4)
    before = forward_blocks(model, batch, target.embedding)
    batch.taps[0, 8:] += 1.0
    assert torch.equal(forward_blocks(model, batch, target.embedding), before)
    batch.taps[0, 7] += 1.0
    assert not torch.equal(forward_blocks(model, batch, target.embedding), before)


def test_padding_and_other_blocks_change_nothing(target: Target, model: DSparkModel) -> None:
    sequences = [make_sequence(target, n, 3, seed=n) for n in (12, 17)]
    anchors = [np.array([4, 9, 6]), np.array([8])]
    together = _exact(model, make_batch(sequences, anchors, 4), target)
    for i, (sequence, chosen) in enumerate(zip(sequences, anchors, strict=True)):
        for j, anchor in enumerate(chosen):
            alone = _exact(model, make_batch([sequence], [np.array([anchor])], 4), target)
            assert torch.allclose(together[i, j], alone[0, 0], atol=1e-5)


def test_model_equals_one_softmax_over_context_and_block(
    target: Target, model: DSparkModel
) -> None:
    sequence = make_sequence(target, 12, 3, seed=2)
    batch = make_batch([sequence], [np.array([7])], 4)
    assert torch.allclose(
        _exact(model, batch, target)[0, 0], _naive(model, sequence.taps, batch, target), atol=1e-4
    )


def test_greedy_hits_stop_at_the_first_wrong_draft(target: Target, model: DSparkModel) -> None:
    sequence = make_sequence(target, 14, 4, seed=3)
    batch = make_batch([sequence], [all_anchors(sequence)], 4)
    vocab = torch.arange(SHAPE.draft_vocab_size)
    head = torch.eye(SHAPE.draft_vocab_size)
    hidden = F.one_hot(batch.label_ids[0], SHAPE.draft_vocab_size).float() * 50
    model.confidence_head.proj = torch.nn.Linear(SHAPE.draft_vocab_size + SHAPE.markov_rank, 1)
    hits, _ = draft_greedily(model, batch, hidden, head, vocab)
    assert torch.equal(hits, batch.is_label[0])
    hidden[2, 1] = -hidden[2, 1]
    hits, _ = draft_greedily(model, batch, hidden, head, vocab)
    assert hits[2].tolist() == [True] + [False] * 3


def test_rounds_advance_by_accepted_drafts_and_bonus() -> None:
    # anchors 0..5; a round from anchor 0 accepts 2 and the next starts at 3; the last is cut short
    assert round_lengths(np.array([2, 0, 0, 1, 4, 3])) == [3, 2, 1]
    assert round_lengths(np.array([0, 0])) == [1, 1]


def test_balance_moves_draws_from_sequences_to_categories() -> None:
    categories = ["qa", "qa", "qa", "qa", "chat"]
    assert np.allclose(category_weights(categories, 0.0), [0.2] * 5)
    assert np.allclose(category_weights(categories, 1.0), [0.125] * 4 + [0.5])
    assert np.allclose(category_weights(categories, 0.5), [1 / 6] * 4 + [1 / 3])


def _exact(model: DSparkModel, batch: BlockBatch, target: Target) -> torch.Tensor:
    embeds = F.embedding(batch.token_ids.gather(1, batch.anchors), target.embedding)
    return model(batch.taps.float(), batch.anchors, embeds)


def _naive(
    model: DSparkModel, taps: torch.Tensor, batch: BlockBatch, target: Target
) -> torch.Tensor:
    """One block by itself: keys are the context rows before the anchor, then the block rows."""
    anchor = int(batch.anchors[0, 0])
    context = model.hidden_norm(model.fc(taps[:anchor].float().flatten(1)))
    token = target.embedding[batch.token_ids[0, anchor]]
    x = torch.stack([token, *[model.mask_embedding] * 3])
    for layer in model.layers:
        rows = torch.cat([context, layer.input_layernorm(x)])
        attention = layer.self_attn
        positions = torch.arange(anchor + 4)[:, None]
        angles = positions / 10000.0 ** (torch.arange(0, 16, 2) / 16)
        cos, sin = (f(torch.cat([angles, angles], 1))[:, None] for f in (torch.cos, torch.sin))

        def rotate(
            t: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin
        ) -> torch.Tensor:
            return t * cos + torch.cat([-t[..., 8:], t[..., :8]], -1) * sin

        q, k, v = (
            p(rows).view(len(rows), 2, 16)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        out = F.scaled_dot_product_attention(
            rotate(q)[anchor:].transpose(0, 1), rotate(k).transpose(0, 1), v.transpose(0, 1)
        )
        x = x + attention.o_proj(out.transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.norm(x)
