"""Building a tokenizer from GGUF metadata: byte-level BPE ("gpt2") and sentencepiece ("llama").

`tokenizer.ggml.pre` names how text is split before merging. A wrong split gives plausible but
wrong ids, so a name that is not known is an error.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from truespec.utils.gguf_file import GGUFFile

from .backend_bytes import SPACE
from .backend_error import TokenizerError
from .backend_files import SPECIAL_NAMES, TokenizerParts

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]

# Patterns by name, each splitting what the one before left.
SPLITS: dict[str, list[str]] = {
    "default": _DEFAULT,
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "llama-bpe": [_LLAMA3],
    "llama3": [_LLAMA3],
    "llama-v3": [_LLAMA3],
    "qwen2": [_QWEN2],
    "deepseek-r1-qwen": [_QWEN2],
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})


def read_gguf(path: Path) -> TokenizerParts:
    """The tokenizer of a GGUF file.

    Raises:
        TokenizerError: there is none, or it is of a kind that is not built.
    """
    try:
        file = GGUFFile(path)
    except (ValueError, IndexError) as error:
        raise TokenizerError(f"{path} is not a readable GGUF file: {error}") from None
    kind = file.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(f"{path}: tokenizer.ggml.model is {kind!r}, expected gpt2 or llama")
    tokens = [str(token) for token in _array(file, "tokenizer.ggml.tokens")]
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, tokens, path)
    else:
        tokenizer, adds_bos = _sentencepiece(file, tokens), True
    _register_added_tokens(tokenizer, file, tokens)
    special_tokens = _special_tokens(file, tokens)
    _set_template(tokenizer, file, special_tokens, adds_bos)
    template = file.get("tokenizer.chat_template")
    return TokenizerParts(
        tokenizer, special_tokens, template if isinstance(template, str) else None
    )


def _byte_level(file: GGUFFile, tokens: list[str], path: Path) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether it adds a bos token unless told otherwise."""
    name = file.get("tokenizer.ggml.pre") or "default"
    if name not in SPLITS:
        known = ", ".join(SPLITS)
        raise TokenizerError(f"{path}: tokenizer.ggml.pre is {name!r}, expected one of {known}")
    merges = [_merge(str(text)) for text in _array(file, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    whole_words_first = name in _WHOLE_WORDS_FIRST
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words_first))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[str(name)]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, whole_words_first


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Sentencepiece BPE with byte fallback; merges follow from the pieces' scores."""
    scores = [float(score) for score in _array(file, "tokenizer.ggml.scores")]
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, scores),
            unk_token=tokens[unknown if isinstance(unknown, int) else 0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    rules: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if file.get("tokenizer.ggml.add_space_prefix") is not False:
        rules.insert(0, normalizers.Prepend(SPACE))
        spaces.append(decoders.Strip(content=" ", left=1))
    tokenizer.normalizer = normalizers.Sequence(rules)
    tokenizer.decoder = decoders.Sequence(spaces)
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best piece first."""
    ranked = []
    for piece, index in vocab.items():
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        ranked += [
            (-scores[index], vocab[left], vocab[right], left, right)
            for left, right in pairs
            if left in vocab and right in vocab
        ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _merge(text: str) -> tuple[str, str]:
    """The two sides of a merge; a side may begin with a space."""
    at = text.index(" ", 1)
    return text[:at], text[at + 1 :]


def _register_added_tokens(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    """Make control and user-defined tokens match whole, before any splitting."""
    kinds = _array(file, "tokenizer.ggml.token_type")
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _special_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    """Texts of bos, eos, unknown and padding token."""
    keys = ("bos", "eos", "unknown", "padding")
    found: dict[str, str] = {}
    for name, key in zip(SPECIAL_NAMES, keys, strict=True):
        index = file.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int) and index < len(tokens):
            found[name] = tokens[index]
    return found


def _set_template(
    tokenizer: Tokenizer, file: GGUFFile, special_tokens: dict[str, str], adds_bos: bool
) -> None:
    """Make `encode` add bos and eos where the file says so."""
    flags = {
        "bos_token": file.get("tokenizer.ggml.add_bos_token"),
        "eos_token": file.get("tokenizer.ggml.add_eos_token"),
    }
    wanted = {
        name: default if flags[name] is None else bool(flags[name])
        for name, default in (("bos_token", adds_bos), ("eos_token", False))
    }
    around = {
        name: special_tokens[name] if wanted[name] and name in special_tokens else ""
        for name in wanted
    }
    single = [around["bos_token"], "$A", around["eos_token"]]
    used = [text for text in around.values() if text]
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[piece for piece in single if piece],
            special_tokens=[(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(used)],
        )


def _array(file: GGUFFile, key: str) -> list[str | int | float | bool]:
    """An array of the metadata.

    Raises:
        TokenizerError: it is missing.
    """
    values = file.get(key)
    if not isinstance(values, list):
        raise TokenizerError(f"{key} is missing from the GGUF metadata")
    return values
