"""Offline generation: the server's scheduler, worker and tokenizer in one process, without HTTP."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from truespec.batch import Batch, ReqChunk
from truespec.config import EngineConfig
from truespec.constrained.grammar import compile_error
from truespec.constrained.vocabulary import special_texts
from truespec.core import Finish, Req, TokenRecord
from truespec.engine.rows import prepare_known_rows
from truespec.message import Outputs
from truespec.params import SamplingParams
from truespec.scheduler.scheduler import Scheduler
from truespec.speculative.registry import build_worker
from truespec.tokenizer.acceptance import Acceptance
from truespec.tokenizer.backend import TokenizerBackend, load_tokenizer
from truespec.tokenizer.limits import EngineLimits
from truespec.tokenizer.manager import TokenizerManager
from truespec.tokenizer.prepare import prepare
from truespec.tokenizer.request_state import RequestState
from truespec.tokenizer.token_table import TokenTable

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request.

    Attributes:
        prompt_ids: as computed.
        text: output text, cut where the records are cut.
        records: one per output token; ids, logprobs and origins.
        prompt_records: scored prompt entries from `logprobs.start` on.
        finish: why it ended.
        seed: repeats this output.
        num_cached_tokens: prompt tokens found in the prefix cache.
        acceptance: what speculation did for the kept tokens.
    """

    prompt_ids: list[int]
    text: str
    records: list[TokenRecord]
    prompt_records: list[TokenRecord]
    finish: Finish
    seed: int
    num_cached_tokens: int
    acceptance: Acceptance

    @property
    def token_ids(self) -> list[int]:
        """Output ids."""
        return [record.token_id for record in self.records]


class LLM:
    """A model in this process.

    Args:
        config: options; the defaults run the packaged model without speculation.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        self.tokenizer = _load_tokenizer(config)
        self.worker, self.config, self.phases = build_worker(
            config, load_tokens=lambda: self.tokenizer
        )
        self.scheduler = Scheduler(self.worker, max_prefill_rows=self.config.chunked_prefill_size)
        info = self.worker.info
        self._limits = EngineLimits(
            vocab_size=info.vocab_size,
            context_length=self.scheduler.max_request_tokens,
            max_total_tokens=self.scheduler.max_request_tokens,
            max_logprobs=self.config.max_logprobs,
            logprobs_mode=self.config.logprobs_mode,
        )
        self._grammar_error = partial(compile_error, special_tokens=special_texts(self.tokenizer))
        self._manager = TokenizerManager(TokenTable(self.tokenizer))
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Complete prompts, batched together; results in their order.

        Args:
            prompts: texts (the tokenizer's special tokens are added) or lists of token ids.
            params: one for all, or one per prompt. A missing seed is drawn and reported.

        Raises BadRequest when a request does not fit, before anything runs.
        """
        texts = _as_list(prompts)
        each = (
            list(params)
            if isinstance(params, Sequence)
            else [params or SamplingParams()] * len(texts)
        )
        if len(each) != len(texts):
            raise ValueError(f"{len(each)} params for {len(texts)} prompts")
        submits = [
            prepare(
                f"llm-{next(self._numbers)}",
                self._ids(prompt),
                one,
                self._limits,
                grammar_error=self._grammar_error,
            )
            for prompt, one in zip(texts, each, strict=True)
        ]
        states = [self._manager.open(submit) for submit in submits]
        for submit in submits:
            self.scheduler.submit(submit)
        while len(self._manager):
            for abort in self._manager.feed(Outputs(self.scheduler.step())).aborts:
                self.scheduler.abort(abort)
        return [_generation(state) for state in states]

    def chat(
        self,
        conversations: Sequence[Sequence[dict[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Like `generate`, for conversations of {"role", "content"} messages."""
        return self.generate([self.chat_ids(messages) for messages in conversations], params)

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation in the model's chat template, ready for the assistant's turn."""
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def features(self, token_ids: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states of the target over a text, as drafters see them; for training.

        Args:
            token_ids: n ids, at least one.
            layers: m target layers, ascending; i is the output of layer i, -1 the embedding.

        Returns ([n, m, hidden] fp32 residual stream, [n, hidden] fp32 after the final norm).
        """
        req = Req("features", list(token_ids), SamplingParams(), stop_ids=frozenset())
        cache, runner = self.worker.cache, self.worker.runner
        if not cache.try_admit(req, max_hit=0, num_tokens=req.num_tokens):
            raise ValueError(f"{req.num_tokens} tokens do not fit beside the running requests")
        taps, last = [], []
        try:
            for start in range(0, req.num_tokens, self.config.chunked_prefill_size):
                count = min(self.config.chunked_prefill_size, req.num_tokens - start)
                batch = Batch([ReqChunk(req, start, count, samples=False, max_drafts=0)])
                output = runner.forward(prepare_known_rows(batch, cache), tuple(layers))
                assert output.features is not None, "layers were captured"
                taps.append(output.features.view(count, len(layers), -1))
                last.append(output.hidden)
        finally:
            cache.release(req, keep=False)
        return torch.cat(taps), torch.cat(last)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        return list(prompt)


def _load_tokenizer(config: EngineConfig) -> TokenizerBackend:
    return load_tokenizer(config.tokenizer_path or config.model_path)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # one text or one list of ids
    return list(prompts)  # type: ignore[arg-type]  # several of them


def _generation(state: RequestState) -> Generation:
    assert state.finish is not None, f"{state.rid} is still running"
    params = state.submit.params
    assert params.seed is not None, "prepare sets the seed"
    return Generation(
        prompt_ids=state.submit.prompt_ids,
        text=state.text,
        records=state.records,
        prompt_records=state.prompt_records,
        finish=state.finish,
        seed=params.seed,
        num_cached_tokens=state.num_cached_tokens,
        acceptance=state.acceptance,
    )
