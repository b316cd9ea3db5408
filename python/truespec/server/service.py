"""What every route needs: the tokenizer, the engine's client and its limits. No HTTP here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from truespec.config import EngineConfig, ServerConfig
from truespec.message import EngineReady
from truespec.params import Grammar, SamplingParams
from truespec.tokenizer.backend import TokenizerBackend
from truespec.tokenizer.limits import EngineLimits
from truespec.tokenizer.prepare import FieldNames, bad_words_ids, prepare
from truespec.tokenizer.request_state import TextStream
from truespec.tokenizer.token_table import TokenTable

from .engine_client import EngineClient, Prepared
from .errors import not_found
from .metrics import Metrics
from .names import new_rid
from .openai_replies import Echo
from .params import COMPLETION_NAMES, SamplingDefaults
from .validation import Problems


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as ids.

    Attributes:
        echo: set when the reply repeats the prompt.
        pending: unfinished character at the end of the echoed text.
    """

    ids: list[int]
    echo: Echo | None = None
    pending: bytes = b""


@dataclass(slots=True)
class Service:
    """The parts of a running server.

    Attributes:
        grammar_error: says why a grammar cannot be used, `None` if it can.
        ready: set by `on_ready`; limits and defaults follow from it.
    """

    config: ServerConfig
    engine_config: EngineConfig
    backend: TokenizerBackend
    table: TokenTable
    metrics: Metrics
    model_name: str
    grammar_error: Callable[[Grammar], str | None]
    client: EngineClient = field(init=False)
    limits: EngineLimits = field(init=False)
    defaults: SamplingDefaults = field(init=False)
    started: float = 0.0

    def on_ready(self, ready: EngineReady) -> None:
        """Take what the engine reported."""
        self.limits = EngineLimits.from_options(ready.options)
        generation = ready.options.get("generation_defaults")
        self.defaults = SamplingDefaults()
        if self.config.sampling_defaults == "model" and isinstance(generation, dict):
            self.defaults = SamplingDefaults.from_model(generation)

    def check_model(self, name: str | None) -> None:
        """Raise a 404 unless `name` is this server's model (or nothing)."""
        known = {self.model_name, self.engine_config.model_path}
        if name and name not in known:
            message = f"the model {name!r} does not exist; this server has {self.model_name!r}"
            raise not_found(message, "model")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text."""
        return self.backend.encode(text, add_special_tokens)

    def bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell these words."""
        return bad_words_ids(words, self.backend)

    def prompt(self, given: str | list[int], *, echo: bool, skip_special_tokens: bool) -> Prompt:
        """A prompt of /v1/completions: texts get special tokens, ids are taken as they are."""
        ids = self.encode(given, add_special_tokens=True) if isinstance(given, str) else given
        if not echo:
            return Prompt(ids)
        self.check_ids(ids)
        return self._echoed(ids, given if isinstance(given, str) else None, skip_special_tokens)

    def check_ids(self, ids: Sequence[int], names: FieldNames = COMPLETION_NAMES) -> None:
        """Raise `BadRequest` when an id is outside the vocabulary or there are none."""
        prepare("check", list(ids), SamplingParams(max_tokens=0), self.limits, names=names)

    def prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        num_choices: int,
        *,
        names: FieldNames,
        problems: Problems,
        request_names: Sequence[str],
        priority: int = 0,
    ) -> list[Prepared]:
        """Check every choice of every prompt, prompt-major; ready for `client.open`.

        Args:
            params: one per prompt; a seed of `None` is drawn.
            problems: what was found before.
            request_names: what clients call the request of each prompt.
            priority: of all of them; higher goes first.

        Raises:
            BadRequest: with `problems` and every problem of the first bad prompt.
        """
        num_requests = len(prompts) * num_choices
        if num_requests > self.client.max_open:
            most = self.client.max_open
            problems.add(names.prompt, f"{num_requests} choices are more than this server's {most}")
            problems.raise_any()
        prepared: list[Prepared] = []
        with problems.guard():
            prepared = self._prepare(prompts, params, num_choices, names, request_names, priority)
        problems.raise_any()
        return prepared

    def _echoed(self, ids: list[int], text: str | None, skip_special_tokens: bool) -> Prompt:
        """The prompt's text and where its tokens start in it.

        A prompt that came as text is repeated as it came, also where its tokens spell it otherwise.
        """
        stream = TextStream(self.table, skip_special_tokens=skip_special_tokens)
        offsets, parts = [], []
        for token_id in ids:
            offsets.append(stream.num_chars)
            parts.append(stream.push(token_id))
        spelled = "".join(parts)
        if text is None or text == spelled:
            return Prompt(ids, Echo(spelled, offsets), stream.pending)
        return Prompt(ids, Echo(text, [min(offset, len(text)) for offset in offsets]))

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        num_choices: int,
        names: FieldNames,
        request_names: Sequence[str],
        priority: int,
    ) -> list[Prepared]:
        prepared = []
        for index, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
            base = request_names[index]
            is_new = index == 0 or prompt_params.grammar != params[index - 1].grammar
            for choice in range(num_choices):
                submit = prepare(
                    new_rid(base if num_choices == 1 else f"{base}-{choice}"),
                    prompt.ids,
                    prompt_params,
                    self.limits,
                    choice=choice,
                    priority=priority,
                    names=names,
                    grammar_error=self.grammar_error if is_new and choice == 0 else None,
                )
                prepared.append(Prepared(submit, prompt.pending))
        return prepared


def model_name_of(config: ServerConfig, engine_config: EngineConfig) -> str:
    """The served name: as configured, else the last part of the model's path."""
    if config.served_model_name:
        return config.served_model_name
    return os.path.basename(os.path.normpath(engine_config.model_path))
