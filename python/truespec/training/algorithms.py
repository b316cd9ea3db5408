"""The drafters that can be trained: one table, read by the command line and by the stages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from truespec.models.config import ModelConfig

from . import loop
from .block_tasks import (
    build_dflash_task,
    build_dspark_task,
    default_dflash_shape,
    default_dspark_shape,
)
from .config import Batching, DFlashLoss, DFlashShape, DSparkLoss, DSparkShape, LoopConfig
from .eagle3 import build_eagle3_task, default_eagle3_shape
from .eagle_config import EAGLE3_BATCHING, MTP_BATCHING, ChainLoss, Eagle3Shape, MtpShape
from .mtp import build_mtp_task, default_mtp_shape

AnyShape = DSparkShape | DFlashShape | Eagle3Shape | MtpShape
AnyLoss = DSparkLoss | DFlashLoss | ChainLoss


@dataclass(frozen=True, slots=True)
class TrainingFiles:
    """What a training reads, and the directory it writes to."""

    answers: Path
    target: Path  # directory in Hugging Face's layout
    cache: Path
    run_dir: Path
    init_from: Path | None = None  # block drafter whose weights and vocabulary are taken over


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Shape, loss and schedule; shape and loss are of the algorithm's classes."""

    shape: AnyShape
    batching: Batching
    loss: AnyLoss
    loop: LoopConfig


class Trainer(Protocol):
    """Trains a drafter; called again with the same arguments it resumes."""

    def __call__(self, files: TrainingFiles, options: TrainingOptions) -> None: ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A kind of drafter.

    Attributes:
        served_as: what follows --speculative-algorithm to serve it.
        shape, loss, batching: options by default; their fields are flags.
        default_shape: the shape that fits a target.
        calibrates: whether it has confidences to calibrate after the training.
        takes_weights: whether it can start from a block drafter (`init_from`).
    """

    served_as: str
    shape: AnyShape
    loss: AnyLoss
    default_shape: Callable[[ModelConfig], AnyShape]
    batching: Batching
    train: Trainer
    calibrates: bool = False
    takes_weights: bool = False


def _trainer(build: Callable[..., loop.Task[loop.Model]]) -> Trainer:
    def train(files: TrainingFiles, options: TrainingOptions) -> None:
        make = build
        if files.init_from is not None:
            make = partial(build, init_from=files.init_from)
        task = make(
            files.answers,
            files.target,
            files.cache,
            shape=options.shape,
            batching=options.batching,
            loss=options.loss,
        )
        loop.train(task, files.run_dir, options.loop)

    return train


ALGORITHMS = {
    "dspark": Algorithm(
        served_as="DSPARK",
        shape=DSparkShape(),
        loss=DSparkLoss(),
        default_shape=default_dspark_shape,
        batching=Batching(),
        train=_trainer(build_dspark_task),
        calibrates=True,
        takes_weights=True,
    ),
    "dflash": Algorithm(
        served_as="DFLASH",
        shape=DFlashShape(),
        loss=DFlashLoss(),
        default_shape=default_dflash_shape,
        batching=Batching(),
        train=_trainer(build_dflash_task),
        takes_weights=True,
    ),
    "eagle3": Algorithm(
        served_as="EAGLE3",
        shape=Eagle3Shape(),
        loss=ChainLoss(),
        default_shape=default_eagle3_shape,
        batching=EAGLE3_BATCHING,
        train=_trainer(build_eagle3_task),
    ),
    "mtp": Algorithm(
        served_as="NEXTN --enable-multi-layer-eagle",
        shape=MtpShape(),
        loss=ChainLoss(),
        default_shape=default_mtp_shape,
        batching=MTP_BATCHING,
        train=_trainer(build_mtp_task),
    ),
}
