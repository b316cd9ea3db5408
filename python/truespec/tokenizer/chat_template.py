"""Chat templates: Jinja in a sandbox, with the helpers that published templates rely on.

Knows messages as plain data and returns text; knows no ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, object]

# Marks the end of the last message in the rendered text; its space shows whether that was trimmed.
_END_TAG = "\ue000end-of-final-message\ue000 "


class ChatTemplateError(ValueError):
    """The template is broken, or refuses these messages; the text says why."""


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, a mark for training that renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the library's own convention)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`.

        Args:
            special_tokens: variables like `bos_token` with their text.

        Raises:
            ChatTemplateError: it is not a valid template.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> str:
        """The text of a conversation.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: end with the start of an assistant message.
            continue_final_message: end with the last message's text, left open.
            variables: further variables of the template; they win over the special tokens.

        Raises:
            ChatTemplateError: the template refuses, or the options do not fit together.
        """
        if not continue_final_message:
            return self._rendered(messages, add_generation_prompt, variables)
        if add_generation_prompt:
            raise ChatTemplateError(
                "add_generation_prompt and continue_final_message cannot both be true"
            )
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str):
            raise ChatTemplateError(
                "continue_final_message needs a last message whose content is text"
            )
        tagged = [*messages[:-1], {**messages[-1], "content": content + _END_TAG}]
        return _up_to_tag(self._rendered(tagged, False, variables))

    def _rendered(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        known = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(
                known, messages=messages, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is foreign code: whatever it raises refuses
            raise ChatTemplateError(f"the chat template refuses: {error}") from None


def _up_to_tag(text: str) -> str:
    """`text` before the tag, without the space that a trimming template would have removed."""
    at = text.rfind(_END_TAG.rstrip())
    if at < 0:
        raise ChatTemplateError("the chat template does not show the end of the final message")
    kept = text[:at]
    return kept if text.startswith(_END_TAG, at) else kept.rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as published templates expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    helpers: dict[str, Callable[..., str]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(helpers)
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
