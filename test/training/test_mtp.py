import json
from pathlib import Path

import numpy as np
import pytest
import torch
from chain_data import LAYERS, Setting, make_setting, widen
from safetensors.torch import load_file

from dense_drafters import draft_pool, rows_at
from truespec.batch import ModelOutput
from truespec.models.drafters.mtp import load_mtp
from truespec.training import loop
from truespec.training.chains import pack_chains
from truespec.training.config import Batching, LoopConfig
from truespec.training.dspark_model import dims_of
from truespec.training.eagle_config import ChainLoss, MtpShape
from truespec.training.mtp import MtpTask
from truespec.training.mtp_model import MtpModel

SHAPE = MtpShape(num_heads=3, num_kv_heads=2, draft_vocab_size=40)


def make_task(setting: Setting) -> MtpTask:
    torch.manual_seed(2)
    model = MtpModel(SHAPE, dims_of(setting.data.target))
    batching = Batching(num_sequences=4, anchors_per_sequence=8)
    return MtpTask(model, setting.data, batching=batching, loss=ChainLoss(ce_only_fraction=0.8))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return make_setting(tmp_path_factory.mktemp("mtp"))


def test_training_forward_equals_the_engines_heads(setting: Setting, tmp_path: Path) -> None:
    task = make_task(setting)
    widen(task.model)
    task.export(tmp_path / "out")
    found = load_mtp(tmp_path / "out", setting.engine, 0)
    assert found is not None
    assert found.is_chained
    sequences, starts = [setting.data.train[i] for i in (0, 2)], [np.array([5, 9]), np.array([7])]
    hidden = torch.stack(task.forward(pack_chains(sequences, starts)))
    got = hidden.float() @ task.draft_head.float().T
    chains = [(s, int(row)) for s, rows in zip(sequences, starts, strict=True) for row in rows]
    for r, (sequence, row) in enumerate(chains):
        past = torch.arange(row + 1)
        output = ModelOutput(sequence.last.float(), None)
        carried = found.heads[0].inputs(output, past)
        for j, head in enumerate(found.heads):
            kv, table = draft_pool(setting.engine, 1)
            token_ids = sequence.token_ids.long()[past + 1 + j]
            carried = head.forward(carried, token_ids, rows_at(past, table), kv)
            wanted = head.logits(carried[-1:])[0]
            error = (got[j, r] - wanted).norm() / wanted.norm()
            assert error < 0.03, f"chain {r}, head {j}"


def test_few_sequences_are_learned_by_heart(tmp_path: Path) -> None:
    task = make_task(make_setting(tmp_path, num_sequences=20))
    config = LoopConfig(num_steps=250, learning_rate=1e-2, muon_min_dim=16, measure_every=250)
    loop.train(task, tmp_path / "run", config)
    line = json.loads((tmp_path / "run/history.jsonl").read_text().splitlines()[-1])
    lens = [len(s.loss_mask) - s.answer_start - 1 for s in task.data.dev]
    best = sum(lens) / sum(-(-n // (SHAPE.num_heads + 1)) for n in lens)
    assert line["dev/greedy"] > 0.9 * best


def test_heads_follow_the_targets_layers_and_hold_no_projection(
    setting: Setting, tmp_path: Path
) -> None:
    task = make_task(setting)
    task.export(tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    layers = {name.split(".")[2] for name in tensors if name != "d2t"}
    assert layers == {str(len(LAYERS) + j) for j in range(3)}
    assert len(tensors) == 3 * len(list(task.model.heads[0].parameters())) + 1
    assert not any(name.endswith("shared_head.head.weight") for name in tensors)
    assert (tensors["d2t"] + torch.arange(40)).tolist() == list(range(4, 44))
