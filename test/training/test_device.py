from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest
import torch
from tiny_drafter import SHAPE

from truespec.training import block_task, chain_task, loop
from truespec.training.cache import FeatureCache
from truespec.training.chain_task import ChainData
from truespec.training.config import Batching, DFlashLoss, DFlashShape, DSparkLoss, LoopConfig
from truespec.training.dflash import DFlashTask
from truespec.training.dspark import DSparkTask
from truespec.training.dspark_model import BlockModel, DSparkModel, dims_of
from truespec.training.eagle3 import Eagle3Task
from truespec.training.eagle3_model import Eagle3Model
from truespec.training.eagle_config import ChainLoss, Eagle3Shape, MtpShape
from truespec.training.mtp import MtpTask
from truespec.training.mtp_model import MtpModel
from truespec.training.target import Target

P, Batch = ParamSpec("P"), TypeVar("Batch")
BATCHING = Batching(num_sequences=2, anchors_per_sequence=6)
VOCAB_IDS = torch.arange(SHAPE.draft_vocab_size)


def dspark(target: Target, cache: FeatureCache) -> DSparkTask:
    model = DSparkModel(SHAPE, dims_of(target))
    loss = DSparkLoss()
    return DSparkTask(model, target, VOCAB_IDS, cache, cache, batching=BATCHING, loss=loss)


def dflash(target: Target, cache: FeatureCache) -> DFlashTask:
    model = BlockModel(
        DFlashShape((0, 2), 2, num_kv_heads=2, block_size=4, draft_vocab_size=len(VOCAB_IDS)),
        dims_of(target),
    )
    loss = DFlashLoss()
    return DFlashTask(model, target, VOCAB_IDS, cache, cache, batching=BATCHING, loss=loss)


def eagle3(target: Target, cache: FeatureCache) -> Eagle3Task:
    model = Eagle3Model(
        Eagle3Shape((0, 2), num_kv_heads=1, num_drafts=3, draft_vocab_size=len(VOCAB_IDS)),
        dims_of(target),
    )
    data = ChainData(target, VOCAB_IDS, cache, cache)
    return Eagle3Task(model, data, batching=BATCHING, loss=ChainLoss())


def mtp(target: Target, cache: FeatureCache) -> MtpTask:
    data = ChainData(target, VOCAB_IDS, cache, cache)
    model = MtpModel(
        MtpShape(num_heads=2, num_kv_heads=1, draft_vocab_size=len(VOCAB_IDS)), dims_of(target)
    )
    return MtpTask(model, data, batching=BATCHING, loss=ChainLoss())


@pytest.mark.parametrize("make", [dspark, dflash, eagle3, mtp])
@pytest.mark.gpu
def test_a_gpu_trains_as_a_cpu_does(
    make: Callable[[Target, FeatureCache], DSparkTask | DFlashTask | Eagle3Task | MtpTask],
    target: Target,
    cache: FeatureCache,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    task = make(target, cache)
    for parameter in task.model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    losses, figures = [], []
    for device in ("cpu", "cuda"):
        task.to(torch.device(device))
        losses.append(task.loss(0, 0.9)[1]["loss"])
        figures.append(task.measure())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert figures[1]["greedy"] == pytest.approx(figures[0]["greedy"], abs=0.2)
    config = LoopConfig(num_steps=4, muon_min_dim=16, measure_every=2, device="cuda")
    for _ in range(2):  # the second finds the training finished
        loop.train(task, tmp_path / "run", config)
    assert (tmp_path / "run/export/model.safetensors").exists()


@pytest.mark.parametrize(
    ("device", "text"), [("tpu", "expected cpu or cuda"), ("cuda", "none here")]
)
def test_a_device_that_is_not_there_is_refused(
    device: str,
    text: str,
    target: Target,
    cache: FeatureCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=text):
        loop.train(dflash(target, cache), tmp_path / "run", LoopConfig(device=device))
    assert not (tmp_path / "run").exists()


def on_cpu(make: Callable[P, Batch]) -> Callable[P, Batch]:
    """Batches are made on the CPU and then moved."""

    def made(*args: P.args, **kwargs: P.kwargs) -> Batch:
        with torch.device("cpu"):
            return make(*args, **kwargs)

    return made


@pytest.mark.parametrize("make", [dspark, dflash, eagle3, mtp])
def test_every_tensor_of_a_loss_is_made_on_the_device_of_its_batch(
    make: Callable[[Target, FeatureCache], DSparkTask | DFlashTask | Eagle3Task | MtpTask],
    target: Target,
    cache: FeatureCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What names no device is made on `meta` here, and does not mix with the batch."""
    for module, name in ((block_task, "make_batch"), (chain_task, "draw_chains")):
        monkeypatch.setattr(module, name, on_cpu(getattr(module, name)))
    task = make(target, cache)
    with torch.device("meta"):
        loss, metrics = task.loss(0, 0.9)
        grads = torch.autograd.grad(loss, list(task.model.parameters()))
    assert all(grad.device.type == "cpu" for grad in grads)
    assert metrics == task.loss(0, 0.9)[1]
