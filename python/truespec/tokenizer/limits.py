"""What the engine can take, as far as requests are checked against it before they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from truespec.params import LOGPROB_MODES, LogprobMode


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of requests.

    Attributes:
        vocab_size: rows of the model's head; ids lie in 0 .. vocab_size - 1.
        context_length: prompt and output tokens of one request at most.
        max_total_tokens: size of the KV pool in tokens; a request must fit alone.
        max_logprobs: alternatives per token at most.
        logprobs_mode: the mode of requests that name none.
        num_drafts: drafts per step at most, 0 where the engine does not draft.
    """

    vocab_size: int
    context_length: int
    max_total_tokens: int
    max_logprobs: int = 20
    logprobs_mode: LogprobMode = "raw"
    num_drafts: int = 0

    @property
    def max_tokens(self) -> int:
        """Prompt and output tokens that one request can ever have."""
        return min(self.context_length, self.max_total_tokens)

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> EngineLimits:
        """Read `EngineReady.options`. Raises `ValueError` naming an option that is missing."""
        mode = options.get("logprobs_mode", "raw")
        speculative = options.get("speculative")
        drafts = speculative.get("num_drafts") if isinstance(speculative, dict) else None
        return cls(
            vocab_size=_whole(options, "vocab_size"),
            context_length=_whole(options, "context_length"),
            max_total_tokens=_whole(options, "max_total_tokens"),
            max_logprobs=_whole(options, "max_logprobs"),
            logprobs_mode=next(m for m in LOGPROB_MODES if m == mode),
            num_drafts=drafts if isinstance(drafts, int) else 0,
        )


def _whole(options: Mapping[str, object], name: str) -> int:
    value = options.get(name)
    if not isinstance(value, int):
        raise ValueError(f"the engine reported {name} = {value!r}, expected a whole number")
    return value
