"""The text stage: the target answers prompts, and the answers are recorded as they come.

Knows `truespec.LLM` and the answers file; no tensors, no drafters.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress

from truespec.llm import LLM
from truespec.params import RANDOM_SEED_BITS, SamplingParams

from .answers import Answer, append_answers, recover_answers
from .config import Answering

JobKey = tuple[tuple[int, ...], float, int]


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to make."""

    category: str
    prompt_ids: tuple[int, ...]
    temperature: float
    seed: int

    @property
    def key(self) -> JobKey:
        """What makes two answers the same."""
        return self.prompt_ids, self.temperature, self.seed


def open_jobs(llm: LLM, prompts_path: Path, answers_path: Path, options: Answering) -> list[Job]:
    """Answers that the file does not hold yet, in the order of the prompts, each once.

    A file whose end is damaged, because a run was killed while writing, is repaired first. Prompts
    that cannot be used are reported on stderr and left out. Raises ValueError if none is left.
    """
    recorded = recover_answers(answers_path) if answers_path.exists() else []
    done = {_key(answer) for answer in recorded}
    jobs = {
        job.key: job
        for category, ids in _read_prompts(llm, prompts_path, options.max_tokens)
        for job in _jobs(category, ids, options)
    }
    if not jobs:
        raise ValueError(f"{prompts_path} has no prompt that can be used")
    return [job for key, job in jobs.items() if key not in done]


def answer_prompts(llm: LLM, jobs: list[Job], answers_path: Path, options: Answering) -> None:
    """Run `jobs` in groups; the answers of a group are on disk before the next one starts."""
    if not jobs:
        return
    answers_path.parent.mkdir(parents=True, exist_ok=True)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as bar:
        task = bar.add_task("answers", total=len(jobs))
        for start in range(0, len(jobs), options.group_size):
            group = jobs[start : start + options.group_size]
            append_answers(answers_path, _answer(llm, group, options.max_tokens))
            bar.advance(task, len(group))


def _key(answer: Answer) -> JobKey:
    return tuple(answer.prompt_ids), answer.temperature, answer.seed


def _read_prompts(llm: LLM, path: Path, max_tokens: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(category, prompt ids) of every usable line."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            ids = llm.chat_ids(_conversation(row))
            _check_length(len(ids), max_tokens, llm.scheduler.max_request_tokens)
            category = str(row.get("category", "all"))
        except ValueError as error:  # of the JSON, the row or the chat template
            sys.stderr.write(f"{path}:{number}: skipped: {error}\n")
        else:
            yield category, tuple(ids)


def _conversation(row: object) -> list[dict[str, str]]:
    """The messages of a line. Raises `ValueError`."""
    if not isinstance(row, dict):
        raise ValueError('expected an object like {"prompt": "...", "category": "..."}')
    messages = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is no list of messages")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            raise ValueError('expected a text "prompt", or "messages" with texts role and content')
    return messages


def _check_length(num_prompt: int, max_tokens: int, limit: int) -> None:
    if num_prompt + max_tokens > limit:
        raise ValueError(
            f"{num_prompt} prompt tokens and {max_tokens} of the answer are more than the {limit} "
            "tokens that fit"
        )


def _jobs(category: str, prompt_ids: tuple[int, ...], options: Answering) -> Iterator[Job]:
    for temperature in options.temperatures:
        seed = _seed(options.answer_seed, prompt_ids, temperature) if temperature else 0
        yield Job(category, prompt_ids, temperature, seed)


def _seed(base: int, prompt_ids: tuple[int, ...], temperature: float) -> int:
    """A seed that depends on the prompt and not on its place in the file."""
    text = json.dumps([base, temperature, prompt_ids]).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return number >> (64 - RANDOM_SEED_BITS)


def _answer(llm: LLM, jobs: list[Job], max_tokens: int) -> list[Answer]:
    params = [
        SamplingParams(temperature=job.temperature, seed=job.seed, max_tokens=max_tokens)
        for job in jobs
    ]
    answers = []
    for job, done in zip(jobs, llm.generate([j.prompt_ids for j in jobs], params), strict=True):
        if done.finish.kind not in ("stop", "length"):
            raise RuntimeError(f"an answer ended with {done.finish}")
        answers.append(
            Answer(job.category, job.temperature, done.prompt_ids, done.token_ids, job.seed)
        )
    return answers
