"""The byte-level tokenizer of the tests: three special tokens, 256 bytes, a few merges.

Id 11 is the byte of "(" as well as an end-of-sequence id of the scripted engine.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from truespec.tokenizer.backend import TokenizerBackend
from truespec.tokenizer.backend_files import TokenizerParts

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'bad' %}{{ raise_exception('role bad is unknown') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_backend() -> TokenizerBackend:
    """Ids: the special tokens, then the bytes in the order of their printable spelling."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("t", "h"), ("th", "e"), ("h", "a")]
    pieces += [left + right for left, right in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    return TokenizerBackend(TokenizerParts(tokenizer, names, TEMPLATE))
