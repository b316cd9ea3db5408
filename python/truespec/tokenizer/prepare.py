"""From ids and parameters to a `Submit`: every check that needs the engine's limits, in one place.

Pure functions. Everything that is wrong is found at once and named as the sender named it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Protocol

from truespec.message import Submit
from truespec.params import (
    MAX_SEED,
    MAX_STOPS,
    Grammar,
    LogprobParams,
    SamplingParams,
    choice_seed,
    random_seed,
)

from .errors import BadRequest, Problem
from .limits import EngineLimits
from .stop import regex_width

GrammarCheck = Callable[[Grammar], str | None]


class FieldNames(NamedTuple):
    """What a caller calls the parameters, for error messages."""

    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    min_tokens: str = "min_tokens"
    seed: str = "seed"
    top_logprobs: str = "logprobs"
    prompt_logprobs: str = "prompt_logprobs"
    logprob_start: str = "logprob_start_len"
    asked_ids: str = "logprob_token_ids"
    grammar: str = "structured_outputs"


class Encoder(Protocol):
    """The part of a tokenizer backend that turns text into ids."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of `text`."""
        ...


def prepare(
    rid: str,
    prompt_ids: list[int],
    params: SamplingParams,
    limits: EngineLimits,
    *,
    choice: int = 0,
    priority: int = 0,
    names: FieldNames = FieldNames(),  # noqa: B008 (immutable)
    grammar_error: GrammarCheck | None = None,
) -> Submit:
    """Check a request against the engine's limits and give it its seed.

    Args:
        rid: unique name of this choice of this prompt.
        params: `seed` `None` draws one; choice 0 uses the seed itself, choice i a mix with i.
        priority: higher goes first.
        grammar_error: says why a grammar cannot be used.

    Raises:
        BadRequest: with every problem found.
    """
    problems = [
        *_prompt_problems(prompt_ids, params, limits, names),
        *_id_problems(params, limits, names),
        *_stop_problems(params),
        *_logprob_problems(params.logprobs, len(prompt_ids), limits, names),
        *_grammar_problems(params.grammar, grammar_error, names),
        *_number_problems(params, names),
    ]
    if problems:
        raise BadRequest(problems)
    seed = random_seed() if params.seed is None else params.seed
    return Submit(rid, prompt_ids, replace(params, seed=choice_seed(seed, choice)), priority)


def rest_of_context(num_prompt_tokens: int, limits: EngineLimits) -> int:
    """Output tokens that fit after a prompt, at least 1 (so that too long a prompt is refused)."""
    return max(1, limits.max_tokens - num_prompt_tokens)


def bad_words_ids(words: Iterable[str], encoder: Encoder) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell a bad word, at the start of a text and after a space.

    Raises `BadRequest` for a word without tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.strip()
        if not bare:
            raise BadRequest([Problem("bad_words", f"bad_words contains {word!r}, which is empty")])
        for text in (word, bare, " " + bare):
            sequences[tuple(encoder.encode(text, False))] = None
    return tuple(sequences)


def _prompt_problems(
    prompt_ids: Sequence[int], params: SamplingParams, limits: EngineLimits, names: FieldNames
) -> list[Problem]:
    num_prompt, num_output = len(prompt_ids), params.max_tokens
    if not prompt_ids:
        return [Problem(names.prompt, f"{names.prompt} has no tokens, at least one is needed")]
    problems = _outside(prompt_ids, limits, names.prompt)
    if num_prompt + num_output > limits.max_tokens:
        too_long = num_prompt + min(num_output, 1) > limits.max_tokens
        problems.append(
            Problem(
                names.prompt if too_long else names.max_tokens,
                f"{num_prompt} prompt tokens and {names.max_tokens} = {num_output} are more than "
                f"the {limits.max_tokens} tokens that this server's context holds",
            )
        )
    return problems


def _number_problems(params: SamplingParams, names: FieldNames) -> list[Problem]:
    problems = []
    if params.max_tokens < 0:
        problems.append(Problem(names.max_tokens, f"{names.max_tokens} is {params.max_tokens}"))
    if not 0 <= params.min_tokens <= max(params.max_tokens, 0):
        message = (
            f"{names.min_tokens} is {params.min_tokens}, expected 0 to {names.max_tokens} "
            f"({params.max_tokens})"
        )
        problems.append(Problem(names.min_tokens, message))
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED:
        problems.append(Problem(names.seed, f"{names.seed} is {params.seed}, expected 0 to 2^64-1"))
    return problems


def _id_problems(params: SamplingParams, limits: EngineLimits, names: FieldNames) -> list[Problem]:
    problems = _outside(params.stop_token_ids, limits, "stop_token_ids")
    problems += _outside([i for i, _ in params.logit_bias], limits, "logit_bias")
    problems += _outside(chain.from_iterable(params.bad_words_ids), limits, "bad_words")
    if params.logprobs is not None:
        problems += _outside(params.logprobs.token_ids, limits, names.asked_ids)
    allowed = params.allowed_token_ids
    if allowed is not None:
        problems += _outside(allowed, limits, "allowed_token_ids")
        banned = {words[0] for words in params.bad_words_ids if len(words) == 1}
        if banned.issuperset(allowed):
            message = "allowed_token_ids leaves no token that may be chosen"
            problems.append(Problem("allowed_token_ids", message))
    return problems


def _outside(ids: Iterable[int], limits: EngineLimits, param: str) -> list[Problem]:
    """One problem naming the first id outside the vocabulary, or none."""
    for token_id in ids:
        if not 0 <= token_id < limits.vocab_size:
            last = limits.vocab_size - 1
            message = f"{param} contains token id {token_id}, outside the vocabulary (0 to {last})"
            return [Problem(param, message)]
    return []


def _stop_problems(params: SamplingParams) -> list[Problem]:
    problems = []
    for name, stops in (("stop", params.stop), ("stop_regex", params.stop_regex)):
        if len(stops) > MAX_STOPS:
            message = f"{name} has {len(stops)} entries, at most {MAX_STOPS} are supported"
            problems.append(Problem(name, message))
        elif "" in stops:
            problems.append(Problem(name, f"{name} contains an empty string"))
    for pattern in params.stop_regex:
        if pattern and (reason := _regex_error(pattern)):
            problems.append(Problem("stop_regex", f"stop_regex: {reason}"))
    return problems


def _regex_error(pattern: str) -> str | None:
    try:
        regex_width(pattern)
    except ValueError as error:
        return str(error)
    return None


def _logprob_problems(
    logprobs: LogprobParams | None, num_prompt: int, limits: EngineLimits, names: FieldNames
) -> list[Problem]:
    if logprobs is None:
        return []
    problems = []
    widths = {logprobs.prompt_top_k: names.prompt_logprobs, logprobs.top_k: names.top_logprobs}
    for width, name in widths.items():  # one problem where one field asked for both
        if not 0 <= width <= limits.max_logprobs:
            message = f"{name} is {width}, expected 0 to {limits.max_logprobs}"
            problems.append(Problem(name, message))
    if not -1 <= logprobs.start <= num_prompt:
        message = (
            f"{names.logprob_start} is {logprobs.start}, expected -1 to {num_prompt} "
            "(the prompt's length)"
        )
        problems.append(Problem(names.logprob_start, message))
    if len(set(logprobs.modes)) != len(logprobs.modes) or not logprobs.modes:
        message = f"logprobs_mode is {list(logprobs.modes)}, expected different modes"
        problems.append(Problem("logprobs_mode", message))
    return problems


def _grammar_problems(
    grammar: Grammar | None, grammar_error: GrammarCheck | None, names: FieldNames
) -> list[Problem]:
    if grammar is None or grammar_error is None:
        return []
    reason = grammar_error(grammar)
    return [Problem(names.grammar, f"{names.grammar}: {reason}")] if reason else []
