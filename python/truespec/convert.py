"""`truespec convert`: a GGUF file as a Hugging Face directory, model and tokenizer.

A composition root: it joins the models room and the tokenizer room, which do not know each other.
"""

from __future__ import annotations

from pathlib import Path

from truespec.models.config import ModelConfig
from truespec.models.export import export_model, write_json
from truespec.models.loader import open_checkpoint
from truespec.tokenizer.backend import TokenizerBackend, load_tokenizer
from truespec.utils.model_path import resolve_model_path


def convert(source: str | Path, directory: Path, dtype: str = "bfloat16") -> None:
    """Write the model and tokenizer of `source` into `directory`, which transformers can load.

    Args:
        source: a GGUF file or the name of a packaged model.
        dtype: "bfloat16" (rounds the weights once) or "float32" (exact).

    Raises:
        CheckpointError, TokenizerError: the file is broken or of a kind that is not built.
        FileNotFoundError: there is no such path or package.
        ValueError: the dtype is unknown.
    """
    path = resolve_model_path(source)
    checkpoint, config = open_checkpoint(path)
    backend = load_tokenizer(path)
    export_model(checkpoint, config, directory, dtype)
    _write_tokenizer(backend, config, directory)


def _write_tokenizer(backend: TokenizerBackend, config: ModelConfig, directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    backend.save(directory / "tokenizer.json")
    fields: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **backend.special_tokens,
        "model_max_length": config.context_length,
        "clean_up_tokenization_spaces": False,
    }
    if backend.chat_template is not None:
        fields["chat_template"] = backend.chat_template
    write_json(directory / "tokenizer_config.json", fields)
