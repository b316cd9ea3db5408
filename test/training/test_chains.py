from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chain_data import DRAFT_IDS, Setting, counting_batch, make_setting, random_sequence
from torch import Tensor
from torch.nn.functional import one_hot

from truespec.training.cache import FeatureCache, write_shard
from truespec.training.chain_loss import chain_loss, draw_chains, label_teacher, measure_chains
from truespec.training.chains import ChainBatch, chain_rows, pack_chains
from truespec.training.config import Batching
from truespec.training.eagle_config import ChainLoss

LOSS = ChainLoss(teacher_top_k=40)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return make_setting(tmp_path_factory.mktemp("chains"))


def test_step_j_reads_the_token_after_row_plus_j_and_predicts_the_next() -> None:
    batch = counting_batch()
    steps = batch.steps(4)
    labels = batch.token_ids[steps.label_rows].view(4, 3)
    assert steps.counts == [3] * 4
    assert labels[:, 0].tolist() == [104, 105, 106, 107]
    one, two = [True, False, True], [True, False, False]
    assert steps.is_label.view(4, 3).tolist() == [[True] * 3, one, two, two]
    assert labels[0].tolist() == [104, 107, 205]
    assert batch.tokens_after(batch.rows, 1).tolist() == [103, 106, 204]
    assert batch.tokens_after(batch.rows, 2)[[0, 2]].tolist() == [104, 205]
    assert batch.positions[batch.rows].tolist() == [2, 5, 3]


def test_a_chain_ends_at_its_depth() -> None:
    batch = replace(counting_batch(), depths=torch.tensor([1, 3, 2]))
    steps = batch.steps(4)
    assert steps.counts == [3, 2, 1, 0]
    assert steps.chains.tolist() == [0, 1, 2, 1, 2, 1]
    assert batch.token_ids[steps.label_rows][[0, 1, 2, 4]].tolist() == [104, 107, 205, 206]


def test_chains_start_so_that_their_first_token_and_its_successor_are_generated(
    setting: Setting,
) -> None:
    sequence = setting.data.train[0]
    rows = chain_rows(sequence)
    assert rows[0] + 1 == sequence.answer_start
    assert rows[-1] + 2 == sequence.num_tokens - 1


def test_the_teacher_of_a_label_is_sure_of_that_label(setting: Setting) -> None:
    cache, head = setting.data.train, setting.data.target.head[DRAFT_IDS]
    batch = pack_chains([cache[0], cache[1]], [np.array([4, 7]), np.array([6])])
    steps = batch.steps(5)
    teacher, index = label_teacher(batch, steps.label_rows, head, top_k=3)
    best, labels = DRAFT_IDS[teacher.draft_ids[index, 0]], batch.token_ids[steps.label_rows]
    assert torch.equal(best[steps.is_label], labels[steps.is_label])


def test_a_draw_is_a_function_of_seed_and_index(setting: Setting) -> None:
    cache, weights = setting.data.train, np.full(3, 1 / 3)
    options = Batching(num_sequences=2, anchors_per_sequence=4)
    first, again, other = (draw_chains(cache, weights, options, i, decay=0.5) for i in (5, 5, 6))
    assert torch.equal(first.rows, again.rows)
    assert torch.equal(first.token_ids, again.token_ids)
    assert torch.equal(first.depths, again.depths)
    assert not torch.equal(first.rows, other.rows)
    assert torch.bincount(first.sequences).tolist() == [4, 4]


def test_the_share_of_chains_falls_by_decay_from_step_to_step(setting: Setting) -> None:
    batches = [
        draw_chains(setting.data.train, np.full(3, 1 / 3), Batching(), i, decay=0.6)
        for i in range(60)
    ]
    counts = np.sum([batch.steps(4).counts for batch in batches], axis=0)
    assert counts[1:] / counts[:-1] == pytest.approx(0.6, abs=0.04)


def drawn(setting: Setting, decay: float = 0.7) -> ChainBatch:
    return draw_chains(setting.data.train, np.full(3, 1 / 3), Batching(), 0, decay=decay)


def random_hidden(batch: ChainBatch, num_steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 64, generator=generator) for n in batch.steps(num_steps).counts]


def test_the_loss_is_the_mean_of_dense_formulas_over_drafts(setting: Setting) -> None:
    batch = drawn(setting)
    head = setting.data.target.head[DRAFT_IDS].float()
    hidden = random_hidden(batch, 4)
    got, metrics = chain_loss(
        hidden, batch, draft_head=head, draft_vocab=DRAFT_IDS, config=LOSS, progress=0.9
    )
    losses, lengths, places = [], [], [0] * 4
    ends = np.cumsum(batch.lens.tolist())
    for row, depth in zip(batch.rows.tolist(), batch.depths.tolist(), strict=True):
        end = next(e for e in ends if e > row)
        length, survival = 1.0, 1.0
        for j in range(min(depth, 4)):
            state, places[j] = hidden[j][places[j]], places[j] + 1
            if row + 2 + j >= end:
                survival = 0.0
                continue
            p = (batch.last[row + 1 + j].float() @ head.T).softmax(-1)
            q = (state @ head.T).softmax(-1)
            ce, l1 = float(-(p * q.log()).sum()), float((p - q).abs().sum())
            losses.append(0.1 * ce + 0.9 * l1)
            survival *= 1 - l1 / 2
            length += survival
        if depth >= 4:
            lengths.append(length)
    assert 3 < len(lengths) < len(batch.rows)
    assert float(got) == pytest.approx(np.mean(losses), rel=1e-2)
    assert metrics["tau"] == pytest.approx(np.mean(lengths), rel=1e-2)


def test_labels_outside_the_draft_vocabulary_carry_no_loss(setting: Setting) -> None:
    batch, kept = drawn(setting), DRAFT_IDS[:20]
    hidden = [state.requires_grad_() for state in random_hidden(batch, 2)]
    head = setting.data.target.head[kept].float()
    loss, _ = chain_loss(
        hidden, batch, draft_head=head, draft_vocab=kept, config=LOSS, progress=0.0
    )
    gradients = torch.cat(torch.autograd.grad(loss, hidden))
    steps = batch.steps(2)
    supervised = steps.is_label & (batch.token_ids[steps.label_rows] <= int(kept[-1]))
    assert torch.equal(gradients.abs().sum(-1) > 0, supervised)


def test_measured_rounds_replay_verification(tmp_path: Path) -> None:
    """A drafter that is right unless the label is divisible by 5, against a loop over rounds."""
    head = torch.eye(48)
    sequences = [random_sequence(torch.randn(48, 64), 30 + n, 5, n) for n in range(11)]
    write_shard(tmp_path / "dev-00000.safetensors", sequences, (0, 1, 2))

    def forward(batch: ChainBatch) -> list[Tensor]:
        steps = batch.steps(3)
        ids = batch.token_ids[steps.label_rows]
        states = one_hot(torch.where(ids % 5 == 0, 1, ids), 48).float()
        return list(torch.split(states, steps.counts))

    figures = measure_chains(forward, head, torch.arange(48), FeatureCache(tmp_path, "dev"))
    lengths = []
    for sequence in sequences:
        ids, at = sequence.token_ids.tolist(), sequence.answer_start
        while at < len(ids) - 1:
            accepted = 0
            while accepted < 3 and at + 1 + accepted < len(ids) and ids[at + 1 + accepted] % 5:
                accepted += 1
            lengths.append(min(accepted + 1, len(ids) - 1 - at))
            at += lengths[-1]
    assert figures["greedy"] == pytest.approx(np.mean(lengths))
    assert figures["greedy/qa"] == figures["greedy"]
