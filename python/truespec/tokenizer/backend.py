"""Text to ids and back, for Hugging Face directories and GGUF files. Imports no torch.

Knows tokenizers and chat templates; must not know requests, streams or the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from truespec.utils.model_path import resolve_model_path

from .backend_bytes import spelling_decoder
from .backend_error import TokenizerError
from .backend_files import TokenizerParts, read_directory
from .backend_gguf import read_gguf
from .chat_template import ChatTemplate, ChatTemplateError, Message


class TokenizerBackend:
    """A tokenizer with its special tokens and chat template. Safe to share between threads.

    Attributes:
        vocab_size: one more than the highest id.
        special_ids: ids whose text is hidden unless it is asked for.
        bos_token_id, eos_token_id: `None` where the tokenizer has none.
        chat_template: source of the template, or `None`.
    """

    def __init__(self, parts: TokenizerParts, chat_template: str | None = None) -> None:
        """Wrap the parts; `chat_template` replaces the tokenizer's own."""
        self._tokenizer = parts.tokenizer
        self._decode_spelling = spelling_decoder(parts.tokenizer)
        added = parts.tokenizer.get_added_tokens_decoder()
        self._added_texts = {index: token.content for index, token in added.items()}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.special_tokens = parts.special_tokens
        self.vocab_size = 1 + max(parts.tokenizer.get_vocab(with_added_tokens=True).values())
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.chat_template = chat_template or parts.chat_template
        self._template = (
            None
            if self.chat_template is None
            else ChatTemplate(self.chat_template, parts.special_tokens)
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; the text of a special token in it becomes that token.

        Args:
            add_special_tokens: let the tokenizer add what it adds to a prompt (bos, eos).
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of a token, of its text where it is special; empty for an unknown id."""
        text = self._added_texts.get(token_id)
        if text is not None:
            return text.encode()
        spelling = self._tokenizer.id_to_token(token_id)
        return b"" if spelling is None else self._decode_spelling(spelling)

    def token_text(self, token_id: int) -> str:
        """A token's bytes as text; a fragment of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it without special tokens.

        Args:
            messages: each with "role" and "content" (text).
            add_generation_prompt: end with the start of an assistant message.
            continue_final_message: end with the last message's text, left open.
            variables: further variables of the template.

        Raises:
            ChatTemplateError: there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise ChatTemplateError("the model has no chat template; give one with --chat-template")
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables or {},
        )

    def save(self, path: Path) -> None:
        """Write the tokenizer as a tokenizer.json."""
        self._tokenizer.save(str(path))

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        index: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return index


def load_tokenizer(name: str | Path, chat_template: str | Path | None = None) -> TokenizerBackend:
    """The tokenizer of a Hugging Face directory, a GGUF file or a packaged model.

    Args:
        name: see `resolve_model_path`.
        chat_template: file with a Jinja template that replaces the model's own.

    Raises:
        TokenizerError: a file is missing, broken or of a kind that is not built.
        FileNotFoundError: there is no such path or package.
        ChatTemplateError: the template does not compile.
    """
    path = resolve_model_path(name)
    parts = read_directory(path) if path.is_dir() else read_gguf(path)
    if chat_template is None:
        return TokenizerBackend(parts)
    template_path = Path(chat_template)
    if not template_path.is_file():
        raise TokenizerError(f"{template_path} is not a file with a chat template")
    return TokenizerBackend(parts, template_path.read_text(encoding="utf-8"))
