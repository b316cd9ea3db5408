"""Where answers about emitted tokens lie: one buffer, and the views of its parts.

Knows shapes only, nothing of how an answer is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Buffer = TypeVar("Buffer", Tensor, NDArray[np.generic])


class AnswerParts(NamedTuple, Generic[Buffer]):
    """Views of one buffer: the fields of `LogprobOutput`."""

    chosen: Buffer
    top_ids: Buffer
    top_values: Buffer
    asked: Buffer
    rank: Buffer
    entropy: Buffer


class HostLogprobs(NamedTuple):
    """A `LogprobOutput` as nested lists: the fields of `batch.LogprobTable` in its order.

    A float is nan where there is none (filtered, or an invalid slot); an id is -1.
    """

    chosen: list[list[list[float]]]
    top_ids: list[list[list[list[int]]]]
    top_values: list[list[list[list[float]]]]
    asked: list[list[list[list[float]]]]
    rank: list[list[int]]
    entropy: list[list[float]]


@dataclass(frozen=True, slots=True)
class LogprobOutput:
    """Answers to D slots of each of bs requests in M modes.

    Attributes:
        buffer: [size] int32 all answers, so that they leave the device in one copy; floats are
            kept as their bits.
        shape: (M, bs, D).
        k_max, a_max: best tokens K and asked ids A per slot.
    """

    buffer: Tensor
    shape: tuple[int, int, int]
    k_max: int
    a_max: int

    @property
    def chosen(self) -> Tensor:
        """[M, bs, D] fp32 logprob of the emitted token; nan where filtered or invalid."""
        return self._parts().chosen

    @property
    def top_ids(self) -> Tensor:
        """[M, bs, D, K] int32 best kept tokens, best first, ties to the lowest id; -1 pads."""
        return self._parts().top_ids

    @property
    def top_values(self) -> Tensor:
        """[M, bs, D, K] fp32 their logprobs; nan pads."""
        return self._parts().top_values

    @property
    def asked(self) -> Tensor:
        """[M, bs, D, A] fp32 of the asked ids in their order; nan where filtered or none."""
        return self._parts().asked

    @property
    def rank(self) -> Tensor:
        """[bs, D] int32, 1 + tokens with a higher raw logit; 0 where nothing is asked."""
        return self._parts().rank

    @property
    def entropy(self) -> Tensor:
        """[bs, D] fp32 of the raw distribution in nats; nan where nothing is asked."""
        return self._parts().entropy

    def to_host(self) -> HostLogprobs:
        """Everything as Python lists, after one device-to-host copy."""
        host = self.buffer.cpu().numpy()
        floats = host.view(np.float32)
        parts = answer_parts(host, floats, self.shape, self.k_max, self.a_max)
        return HostLogprobs(*[part.tolist() for part in parts])

    def _parts(self) -> AnswerParts[Tensor]:
        floats = self.buffer.view(torch.float32)
        return answer_parts(self.buffer, floats, self.shape, self.k_max, self.a_max)


def empty_output(
    shape: tuple[int, int, int], k_max: int, a_max: int, device: torch.device
) -> LogprobOutput:
    """Room for answers, not filled."""
    size = part_ends(shape, k_max, a_max)[-1] + shape[1] * shape[2]
    buffer = torch.empty(size, dtype=torch.int32, device=device)
    return LogprobOutput(buffer, shape, k_max, a_max)


def part_ends(shape: tuple[int, ...], k_max: int, a_max: int) -> tuple[int, int, int, int, int]:
    """Where in the buffer each field of a `LogprobOutput` but the last ends."""
    values = prod(shape)
    ids_end, values_end = values * (1 + k_max), values * (1 + 2 * k_max)
    asked_end = values_end + values * a_max
    return values, ids_end, values_end, asked_end, asked_end + prod(shape[1:])


def answer_parts(
    ints: Buffer, floats: Buffer, shape: tuple[int, ...], k_max: int, a_max: int
) -> AnswerParts[Buffer]:
    """Views of the fields of a `LogprobOutput`.

    Args:
        ints, floats: the buffer as int32 and the same memory as fp32.
        shape: leading axes: (M, bs, D), or (M, bs * D) with a slot per place.
    """
    a, b, c, d, e = part_ends(shape, k_max, a_max)
    return AnswerParts(
        chosen=floats[:a].reshape(shape),
        top_ids=ints[a:b].reshape(*shape, k_max),
        top_values=floats[b:c].reshape(*shape, k_max),
        asked=floats[c:d].reshape(*shape, a_max),
        rank=ints[d:e].reshape(shape[1:]),
        entropy=floats[e:].reshape(shape[1:]),
    )
