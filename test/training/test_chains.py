import numpy as np
import pytest
import torch
from chain_data import DRAFT_IDS, Setting, counting_batch, make_setting, random_sequence
from torch import Tensor

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
    rows, exists = batch.labels(4)
    labels = batch.token_ids[rows]
    assert labels[:, 0].tolist() == [104, 105, 106, 107]
    one, two = [True, False, True], [True, False, False]
    assert exists.tolist() == [[True] * 3, one, two, two]
    assert labels[0].tolist() == [104, 107, 205]
    assert batch.tokens_after(batch.rows, 1).tolist() == [103, 106, 204]
    assert batch.tokens_after(batch.rows, 2)[[0, 2]].tolist() == [104, 205]
    assert batch.positions[batch.rows].tolist() == [2, 5, 3]


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
    rows, exists = batch.labels(5)
    teacher, index = label_teacher(batch, rows, head, top_k=3)
    assert torch.equal(
        DRAFT_IDS[teacher.draft_ids[index, 0]][exists], batch.token_ids[rows][exists]
    )


def test_a_draw_is_a_function_of_seed_and_index(setting: Setting) -> None:
    cache, weights = setting.data.train, np.full(3, 1 / 3)
    options = Batching(num_sequences=2, anchors_per_sequence=4)
    first, again, other = (draw_chains(cache, weights, options, i) for i in (5, 5, 6))
    assert torch.equal(first.rows, again.rows)
    assert torch.equal(first.token_ids, again.token_ids)
    assert not torch.equal(first.rows, other.rows)
    assert first.counts == [4, 4]


def test_the_loss_is_the_weighted_mean_of_dense_formulas(setting: Setting) -> None:
    data = setting.data
    batch = draw_chains(data.train, np.full(3, 1 / 3), Batching(num_sequences=3), 0)
    head = data.target.head[DRAFT_IDS].float()
    hidden = torch.randn(
        4, len(batch.rows), head.shape[1], generator=torch.Generator().manual_seed(1)
    )
    got, metrics = chain_loss(
        hidden, batch, draft_head=head, draft_vocab=DRAFT_IDS, config=LOSS, progress=0.9
    )
    total, weight_sum, expected = 0.0, 0.0, []
    for r, row in enumerate(batch.rows.tolist()):
        end = next(e for e in np.cumsum(batch.lens) if e > row)
        length, alive = 1.0, 1.0
        for j in range(4):
            if row + 2 + j >= end:
                break
            p = (batch.last[row + 1 + j].float() @ head.T).softmax(-1)
            q = (hidden[j, r] @ head.T).softmax(-1)
            ce, l1 = float(-(p * q.log()).sum()), float((p - q).abs().sum())
            total += 0.8**j * (0.1 * ce + 0.9 * l1)
            weight_sum += 0.8**j
            alive *= 1 - l1 / 2
            length += alive
        expected.append(length)
    assert float(got) == pytest.approx(total / weight_sum, rel=1e-2)
    assert metrics["tau"] == pytest.approx(np.mean(expected), rel=1e-2)


def test_labels_outside_the_draft_vocabulary_carry_no_loss(setting: Setting) -> None:
    data = setting.data
    batch = draw_chains(data.train, np.full(3, 1 / 3), Batching(num_sequences=3), 0)
    kept = DRAFT_IDS[:20]
    hidden = torch.randn(2, len(batch.rows), 64).requires_grad_()
    loss, _ = chain_loss(
        hidden,
        batch,
        draft_head=data.target.head[kept].float(),
        draft_vocab=kept,
        config=LOSS,
        progress=0.0,
    )
    (gradient,) = torch.autograd.grad(loss, hidden)
    rows, exists = batch.labels(2)
    supervised = exists & (batch.token_ids[rows] < int(kept[-1]) + 1)
    assert torch.equal(gradient.abs().sum(-1) > 0, supervised)


def test_measured_rounds_replay_verification(setting: Setting, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    """A drafter that is right unless the label is divisible by 5, against a loop over rounds."""
    head = torch.eye(48)
    root = tmp_path_factory.mktemp("rounds")
    sequences = [random_sequence(torch.randn(48, 64), 30 + n, 5, n) for n in range(11)]
    write_shard(root / "dev-00000.safetensors", sequences, (0, 1, 2))

    def forward(batch: ChainBatch) -> Tensor:
        rows, _ = batch.labels(3)
        ids = batch.token_ids[rows]
        return torch.nn.functional.one_hot(torch.where(ids % 5 == 0, 1, ids), 48).float()

    figures = measure_chains(forward, head, torch.arange(48), FeatureCache(root, "dev"))
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
