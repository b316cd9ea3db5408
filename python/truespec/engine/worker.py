"""What the scheduler knows of the engine: one step over a ragged batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from truespec.batch import Batch, StepOutput
from truespec.core import Req
from truespec.kvcache import KVCache


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the served model that admission and replies need.

    Attributes:
        vocab_size: rows of the head; ids are 0 .. vocab_size - 1.
        context_length: prompt + output at most.
        eos_token_ids: the model's own end-of-sequence ids.
        generation_defaults: sampling values of its generation_config.
        name: short description for the log.
    """

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float | int]
    name: str


class Worker(ABC):
    """Runs steps. Everything about how tokens are drafted lies behind it.

    Attributes:
        cache: pages and rows of running requests; the scheduler reserves, the worker reads.
        num_draft_slots: slots a decoding request may write beyond its last known token.
    """

    info: ModelInfo
    cache: KVCache
    num_draft_slots: int

    @abstractmethod
    def step(self, batch: Batch) -> StepOutput:
        """Compute every row of the batch and choose the next tokens.

        Changes KV in the reserved slots and the worker's own state only. An error of one request is
        reported in `StepOutput.failed`; an exception means that the step as a whole failed.
        """

    @abstractmethod
    def settle(self, req: Req) -> None:
        """The pages of a running request are about to be shared: finish whatever was put off."""

    @abstractmethod
    def forget(self, req: Req) -> None:
        """The request left its row (finished, aborted or retracted). Safe to call twice."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Algorithm, sizes and measured costs, as plain data for `/server_info`."""
