import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chain_data import LAYERS, Setting, make_setting, widen
from safetensors.torch import load_file
from torch import Tensor

from dense_drafters import draft_pool, rows_at
from truespec.batch import ModelOutput
from truespec.models.drafters.eagle import load_eagle
from truespec.training import loop
from truespec.training.cache import FeatureSequence
from truespec.training.chains import pack_chains
from truespec.training.config import Batching, LoopConfig
from truespec.training.dspark_model import dims_of
from truespec.training.eagle3 import Eagle3Task
from truespec.training.eagle3_model import Eagle3Model
from truespec.training.eagle_config import ChainLoss, Eagle3Shape

SHAPE = Eagle3Shape(target_layer_ids=LAYERS, num_kv_heads=2, num_drafts=4, draft_vocab_size=40)


def make_task(setting: Setting) -> Eagle3Task:
    torch.manual_seed(2)
    model = Eagle3Model(SHAPE, dims_of(setting.data.target))
    batching = Batching(num_sequences=4, anchors_per_sequence=8)
    return Eagle3Task(model, setting.data, batching=batching, loss=ChainLoss(ce_only_fraction=0.8))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return make_setting(tmp_path_factory.mktemp("eagle3"))


def test_training_forward_equals_the_engines_drafts(setting: Setting, tmp_path: Path) -> None:
    task = make_task(setting)
    widen(task.model)
    task.model.tap_scale.copy_(torch.rand(len(task.model.tap_scale)) + 0.5)
    task.export(tmp_path / "out")
    drafter = load_eagle(tmp_path / "out", setting.engine, 4)
    assert drafter is not None
    sequences, starts = [setting.data.train[i] for i in (0, 2)], [np.array([5, 9]), np.array([7])]
    hidden = torch.stack(task.forward(pack_chains(sequences, starts)))
    got = hidden.float() @ task.draft_head.float().T
    chains = [(s, int(row)) for s, rows in zip(sequences, starts, strict=True) for row in rows]
    for r, (sequence, row) in enumerate(chains):
        kv, table = draft_pool(setting.engine, 1)
        output = ModelOutput(sequence.last.float(), sequence.taps.flatten(1).float())
        ids, past = sequence.token_ids.long(), torch.arange(row + 1)
        carried = drafter.forward(
            drafter.inputs(output, past), ids[past + 1], rows_at(past, table), kv
        )[-1:]
        for step in range(SHAPE.num_drafts):
            if step:
                at = torch.tensor([row + step])
                carried = drafter.forward(carried, ids[at + 1], rows_at(at, table), kv)
            wanted = drafter.logits(carried)[0]
            error = (got[step, r] - wanted).norm() / wanted.norm()
            assert error < 0.03, f"chain {r}, step {step}"


def test_a_chain_sees_its_past_and_itself_only(setting: Setting) -> None:
    task = make_task(setting)
    widen(task.model)
    sequence = setting.data.train[0]

    def drafts(sequence: FeatureSequence) -> Tensor:
        return torch.cat(task.forward(pack_chains([sequence], [np.array([6])])))

    alone = drafts(sequence)
    changed = replace(sequence, taps=sequence.taps.clone())
    changed.taps[7:] += 1.0
    assert torch.equal(drafts(changed), alone)
    changed.taps[6] += 1.0
    assert not torch.equal(drafts(changed), alone)


def test_other_chains_and_their_depths_change_nothing(setting: Setting) -> None:
    task = make_task(setting)
    widen(task.model)
    sequences, rows = [setting.data.train[i] for i in (1, 0)], [np.array([5]), np.array([8, 6, 3])]
    whole = task.forward(pack_chains(sequences, rows))
    cut = task.forward(pack_chains(sequences, rows, np.array([1, 2, 9, 3])))
    alive = [[0, 1, 2, 3], [1, 2, 3], [2, 3], [2]]
    for step, chains in enumerate(alive):
        torch.testing.assert_close(cut[step], whole[step][chains], rtol=0.02, atol=0.02)
    alone = task.forward(pack_chains(sequences[1:], [np.array([6])]))
    for one, all_steps in zip(alone, whole, strict=True):
        torch.testing.assert_close(one[0], all_steps[2], rtol=0.02, atol=0.02)


def test_few_sequences_are_learned_by_heart(tmp_path: Path) -> None:
    task = make_task(make_setting(tmp_path, num_sequences=20))
    config = LoopConfig(num_steps=300, learning_rate=1e-2, muon_min_dim=16, measure_every=300)
    loop.train(task, tmp_path / "run", config)
    line = json.loads((tmp_path / "run/history.jsonl").read_text().splitlines()[-1])
    lens = [len(s.loss_mask) - s.answer_start - 1 for s in task.data.dev]
    best = sum(lens) / sum(-(-n // (SHAPE.num_drafts + 1)) for n in lens)
    assert line["dev/greedy"] > 0.9 * best


def test_a_resumed_run_ends_with_identical_weights(setting: Setting, tmp_path: Path) -> None:
    config = LoopConfig(num_steps=4, muon_min_dim=16, measure_every=2)
    whole, first, second = (make_task(setting) for _ in range(3))
    loop.train(whole, tmp_path / "whole", config)
    state = loop.start_state(first, config)
    for _ in range(2):
        loop.train_step(first, state, config)
    (tmp_path / "parts").mkdir()
    loop.save_state(first, state, tmp_path / "parts/state.pt")
    loop.train(second, tmp_path / "parts", config)
    pairs = zip(whole.model.state_dict().items(), second.model.state_dict().values(), strict=True)
    for (name, wanted), got in pairs:
        assert torch.equal(wanted, got), name


def test_export_folds_the_tap_scale_and_holds_no_head(setting: Setting, tmp_path: Path) -> None:
    task = make_task(setting)
    task.model.tap_scale.fill_(4.0)
    task.export(tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert set(tensors) == {n for n, _ in task.model.named_parameters()} | {"d2t"}
    assert torch.equal(tensors["fc.weight"], (task.model.fc.weight / 4.0).bfloat16())
    assert (tensors["d2t"] + torch.arange(40)).tolist() == list(range(4, 44))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)
    assert config["num_target_layers"] == 3
