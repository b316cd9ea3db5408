"""Sequential heads of a block drafter: Markov bias and confidence (DSpark, arXiv 2607.05147).

They turn the block's hidden states into draft logits one step at a time, because each step's bias
depends on the token the step before chose. Symbols of the paper: h_k hidden of block row k,
W1 [V, r] and W2 [DV, r] the low-rank transition, x_{k-1} the previous token (target ids).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from truespec.kernels.api import PackedLinear
from truespec.kernels.draft_chain import Confidence, Transition


class MarkovHead(ABC):
    """Bias on the draft logits from the previous token."""

    def __init__(self, w1: Tensor, w2: PackedLinear) -> None:
        self._w1 = w1
        self._w2 = w2

    def embed(self, previous: Tensor) -> Tensor:
        """[n] int64 target ids -> W1 rows [n, r] fp32."""
        return self._w1[previous].float()

    def initial_state(self, num_blocks: int) -> Tensor | None:
        """State before the first step of `num_blocks` blocks; `None` for memoryless heads."""
        return None

    @abstractmethod
    def bias(
        self, embedded: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One step: (W1 rows [n, r], h_k [n, H], state) -> (bias [n, DV] fp32, new state)."""


class VanillaMarkov(MarkovHead):
    """B = W2 W1[x].

    Args:
        transition: W1 and W2, where W2 is bf16 and small enough for one thread's cache.
    """

    def __init__(self, w1: Tensor, w2: PackedLinear, transition: Transition | None) -> None:
        super().__init__(w1, w2)
        self.transition = transition

    def bias(
        self, embedded: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._w2(embedded), None


class GatedMarkov(MarkovHead):
    """g = sigmoid(G [h; W1[x]] + b), B = W2 (g * W1[x])."""

    def __init__(self, w1: Tensor, w2: PackedLinear, gate: PackedLinear) -> None:
        super().__init__(w1, w2)
        self._gate = gate

    def bias(
        self, embedded: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        gate = torch.sigmoid(self._gate(torch.cat([hidden, embedded], dim=-1)))
        return self._w2(gate * embedded), None


class RnnMarkov(MarkovHead):
    """z = [s; W1[x]; h]; (g, c, o) = split3(J z + b); s' = g*s + (1-g)*tanh(c); B = W2 tanh(o)."""

    def __init__(self, w1: Tensor, w2: PackedLinear, joint: PackedLinear) -> None:
        super().__init__(w1, w2)
        self._joint = joint

    def initial_state(self, num_blocks: int) -> Tensor:
        return torch.zeros(num_blocks, self._w1.shape[1], device=self._w1.device)

    def bias(
        self, embedded: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert state is not None, "the rnn head starts from initial_state"
        z = torch.cat([state, embedded, hidden], dim=-1)
        gate, candidate, out = self._joint(z).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return self._w2(torch.tanh(out)), state


class ConfidenceHead:
    """c_k = sigmoid((w [h_k; W1[x_{k-1}]] + b) / T_k): probability that draft k is accepted.

    Args:
        weight: [H + r] fp32, or [H] where the head does not see the previous token. bias: [1].
        temperatures: [block size] fp32 of sequential temperature scaling, ones without calibration.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, temperatures: Tensor) -> None:
        self._weight = weight
        self._bias = torch.zeros(1, device=weight.device) if bias is None else bias
        self._temperatures = temperatures

    def __call__(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """The first k steps of n blocks.

        Args:
            hidden: [n, k, H]. embedded: [n, k, r] W1 rows of the tokens before, if it sees them.

        Returns [n, k] fp32 in (0, 1).
        """
        wide = len(self._weight) > hidden.shape[-1]
        z = torch.cat([hidden, embedded], dim=-1) if wide and embedded is not None else hidden
        logits = z @ self._weight + self._bias
        return torch.sigmoid(logits / self._temperatures[: z.shape[1]])

    @property
    def in_chain(self) -> Confidence:
        """The same for `draft_chains`, which finds states and the tokens before by itself."""
        return Confidence(self._weight, self._bias, self._temperatures)
