"""What a request may ask for: sampling and logprob parameters, and nothing about how they are met.

Torch-free: the server, the tokenizer and the scheduler share these classes across processes.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal, get_args

LogprobMode = Literal["raw", "temperature", "processed"]
LOGPROB_MODES: tuple[LogprobMode, ...] = get_args(LogprobMode)

MAX_SEED = 2**64 - 1
RANDOM_SEED_BITS = 53  # so that a JSON reader that keeps numbers as doubles can give it back
MAX_STOPS = 32


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output.

    Attributes:
        kind: "json_schema" (text: the schema as JSON), "json_object", "regex", "lark" (or EBNF),
            "choice" (text: a JSON list of strings).
        text: the source in the language of `kind`.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark", "choice"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Which logprobs a request wants. `None` in `SamplingParams.logprobs` means none at all.

    Attributes:
        top_k: how many best alternatives per output token, 0 for the chosen one only.
        prompt_top_k: the same for prompt entries.
        start: first prompt position with an entry; -1 for output only.
        token_ids: asked ids, in the asked order, duplicates kept.
        modes: the first fills the standard fields of a reply.
        details: also rank, entropy and the draft's own logprob.
    """

    top_k: int = 0
    prompt_top_k: int = 0
    start: int = -1
    token_ids: tuple[int, ...] = ()
    modes: tuple[LogprobMode, ...] = ("raw",)
    details: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Same meaning on every row of a request.

    Attributes:
        temperature: 0 is argmax with ties to the lowest id.
        top_p: keep the smallest set with at least this mass (after top-k).
        top_k: keep the k best; 0 keeps all.
        min_p: keep what has at least this share of the best probability (after top-p).
        seed: noise seed; `None` only before `with_seed`.
        max_tokens: output tokens at most; 0 only scores the prompt.
        min_tokens: stop ids (not stop strings) are masked until so many tokens are out.
        stop: stop strings; a match cuts the text and drops the tokens that start after it.
        stop_regex: like `stop`, as regular expressions.
        stop_token_ids: more stop ids beside the model's end-of-sequence ids.
        ignore_eos: the model's end-of-sequence ids do not stop (`stop_token_ids` still do).
        logit_bias: (token id, bias) pairs.
        allowed_token_ids: nothing else may be chosen; `None` allows all.
        bad_words_ids: token sequences that must not be completed.
        speculative: off turns drafting off for this request.
        num_draft_tokens: at most so many drafts per step; `None` leaves it to the engine.
        skip_special_tokens, spaces_between_special_tokens, include_stop: how text is rendered.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    logprobs: LogprobParams | None = None
    speculative: bool = True
    num_draft_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop: bool = False

    @property
    def has_penalties(self) -> bool:
        """True when the history of the row changes its logits."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def random_seed() -> int:
    """A fresh seed below 2^53."""
    return secrets.randbits(RANDOM_SEED_BITS)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of a choice: choice 0 uses `seed` itself, others mix in their number.

    The mix is one round of splitmix64, cut to 53 bits so that it can be reported and repeated.
    """
    if choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) & MAX_SEED
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return (z ^ (z >> 31)) & ((1 << RANDOM_SEED_BITS) - 1)
