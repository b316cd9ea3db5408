"""Greedy decoding in plain Python over transformers in float64: no cache, no batch, no drafts."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import torch
from harness import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE
from torch import Tensor
from transformers import PreTrainedModel

from tiny import EOS_ID, tiny_model
from truespec.params import SamplingParams

CLEAR = 1e-3  # two best logits closer than this are no test of anything


@lru_cache(maxsize=4)
def oracle(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The transformers model whose weights `harness.target(family)` has."""
    model = tiny_model(
        family,
        seed=len(family),
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=NUM_LAYERS,
        hidden_size=HIDDEN_SIZE,
    )
    return model.to(dtype)


def logits_of(family: str, token_ids: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """[n, V] logits of a text, one full pass."""
    with torch.no_grad():
        return oracle(family, dtype)(torch.tensor([token_ids])).logits[0]


def greedy(family: str, prompt_ids: tuple[int, ...], params: SamplingParams) -> list[int]:
    """Output ids by the definitions of the parameters, token by token."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS_ID})
    output: list[int] = []
    while len(output) < params.max_tokens:
        text = [*prompt_ids, *output]
        row = edited(logits_of(family, text)[-1].tolist(), list(prompt_ids), output, stops, params)
        best, second = sorted(row, reverse=True)[:2]
        assert best - second > CLEAR, "choose another prompt: this one is a draw"
        output.append(row.index(best))
        if output[-1] in stops:
            break
    return output


def edited(
    row: list[float], prompt: list[int], output: list[int], stops: set[int], params: SamplingParams
) -> list[float]:
    """A row after penalties, bias and bans, in the order of the documentation."""
    counts = Counter(output)
    bias = dict(params.logit_bias)
    for token_id in range(len(row)):
        value = row[token_id]
        if token_id in counts or token_id in prompt:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= counts[token_id] * params.frequency_penalty
        value -= params.presence_penalty if token_id in counts else 0.0
        value += bias.get(token_id, 0.0)
        if is_banned(token_id, [*prompt, *output], len(output), stops, params):
            value = -1e30
        row[token_id] = value
    return row


def is_banned(
    token_id: int, text: list[int], num_output: int, stops: set[int], params: SamplingParams
) -> bool:
    if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
        return True
    if num_output < params.min_tokens and token_id in stops:
        return True
    extended = [*text, token_id]
    return any(tuple(extended[-len(word) :]) == word for word in params.bad_words_ids)
