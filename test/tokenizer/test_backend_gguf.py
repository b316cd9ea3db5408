"""Tokenizers from GGUF metadata."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tiny import MERGES, SPECIAL_TOKENS, tiny_tokenizer
from truespec.tokenizer.backend import TokenizerBackend, load_tokenizer
from truespec.tokenizer.backend_error import TokenizerError
from truespec.tokenizer.backend_gguf import SPLITS

TEXT = "The other and the one\n\n  of it'll   be 12345 don't — ok?!  \n x"
CONTROL, NORMAL, USER_DEFINED, BYTE, UNKNOWN = 3, 1, 4, 6, 2


def write_byte_level(
    path: Path, pre: str = "gpt-2", user_defined: tuple[str, ...] = (), **flags: bool
) -> Path:
    """The tiny byte-level tokenizer as GGUF metadata."""
    vocab = tiny_tokenizer().get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), *user_defined]
    kinds = [CONTROL if token in SPECIAL_TOKENS else NORMAL for token in tokens]
    kinds[len(vocab) :] = [USER_DEFINED] * len(user_defined)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def split_by(*patterns: str) -> Tokenizer:
    """The tiny vocabulary behind other patterns, as a tokenizer.json would spell them."""
    tokenizer = tiny_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def test_a_byte_level_tokenizer_equals_the_one_it_was_written_from(tmp_path: Path) -> None:
    backend = load_tokenizer(write_byte_level(tmp_path / "t.gguf"))
    text = TEXT + " <|im_end|> 🙂"
    assert backend.encode(text) == tiny_tokenizer().encode(text).ids
    assert b"".join(map(backend.token_bytes, backend.encode(text))) == text.encode()
    assert backend.special_ids == {0, 1, 2}
    assert (backend.bos_token_id, backend.eos_token_id, backend.vocab_size) == (1, 2, 300)
    assert backend.apply_chat_template([{"content": "x"}]) == "<|im_start|>x"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", " don", "'t", "  ", " 1234", ".", "\n\n", " b"]),
        ("smollm", ["a", " don", "'t", "   ", "1", "2", "3", "4", ".", "\n\n", " b"]),
        ("llama-bpe", ["a", " don", "'t", "  ", " ", "123", "4", ".\n\n", " b"]),
        ("qwen2", ["a", " don", "'t", "  ", " ", "1", "2", "3", "4", ".\n\n", " b"]),
        ("default", ["a", " don", "'", "t", "  ", " ", "123", "4", ".", "\n\n", " b"]),
    ],
)
def test_each_name_splits_its_own_way(pre: str, pieces: list[str]) -> None:
    # expected by hand from the pattern that each name stands for
    text = "a don't   1234.\n\n b"
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    )
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == pieces


def test_an_unknown_split_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre is 'tekken'"):
        load_tokenizer(write_byte_level(tmp_path / "t.gguf", pre="tekken"))


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    backend = load_tokenizer(write_byte_level(tmp_path / "t.gguf", pre="qwen2"))
    assert backend.encode("e\u0301") == backend.encode("\u00e9")


def test_a_bos_token_is_added_where_the_file_or_the_split_says_so(tmp_path: Path) -> None:
    def first(name: str, pre: str, **flags: bool) -> int:
        path = write_byte_level(tmp_path / name, pre=pre, **flags)
        return load_tokenizer(path).encode("th")[0]

    assert first("a", "gpt-2") != 1
    assert first("b", "gpt-2", add_bos_token=True) == 1
    assert first("c", "llama-bpe") == 1
    assert first("d", "llama-bpe", add_bos_token=False) != 1
    path = write_byte_level(tmp_path / "e", add_bos_token=True, add_eos_token=True)
    ids = load_tokenizer(path).encode("th")
    assert (ids[0], ids[-1]) == (1, 2)
    assert load_tokenizer(path).encode("th", add_special_tokens=False) == ids[1:-1]


def test_user_defined_tokens_match_whole_but_are_not_special(tmp_path: Path) -> None:
    backend = load_tokenizer(write_byte_level(tmp_path / "t.gguf", user_defined=("<tool é>",)))
    assert backend.encode("<tool é>") == [300]
    assert 300 not in backend.special_ids
    assert backend.token_bytes(300) == "<tool é>".encode()


def write_sentencepiece(path: Path, **flags: bool) -> Path:
    pieces = {"\u2581": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -5.0, "bc": -4.5}
    pieces |= {"\u2581ab": -6.0, "\u2581a": -7.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + list(pieces.values()))
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def spelled(backend: TokenizerBackend, text: str) -> list[bytes]:
    return [backend.token_bytes(token_id) for token_id in backend.encode(text)]


def test_sentencepiece_merges_the_best_scored_piece_first(tmp_path: Path) -> None:
    backend = load_tokenizer(write_sentencepiece(tmp_path / "t.gguf"))
    # "bc" (-4.5) goes before "ab" (-5), so "abc" is a + bc; then "_a" can still form
    assert spelled(backend, "abc") == [b"<s>", b" a", b"bc"]
    assert spelled(backend, "ab") == [b"<s>", b" ab"]
    assert spelled(backend, "é") == [b"<s>", b" ", b"\xc3", b"\xa9"]
    assert backend.decode(backend.encode("ab é")) == "ab é"


def test_sentencepiece_without_prefix_space_and_bos(tmp_path: Path) -> None:
    path = write_sentencepiece(tmp_path / "t.gguf", add_space_prefix=False, add_bos_token=False)
    backend = load_tokenizer(path)
    assert spelled(backend, "ab ab") == [b"ab", b" ab"]
    assert backend.decode(backend.encode(" ab")) == " ab"


def test_another_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("t5")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.model is 't5'"):
        load_tokenizer(tmp_path / "t.gguf")


@pytest.fixture(scope="module")
def packaged() -> TokenizerBackend:
    return load_tokenizer("smollm2")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("  42", [256, 36, 34]),
        ("Hello, world!", [19556, 28, 905, 17]),
        ("<|im_start|>user\n", [1, 4093, 198]),
    ],
)
def test_the_packaged_model_gives_the_ids_it_was_trained_with(
    text: str, ids: list[int], packaged: TokenizerBackend
) -> None:
    assert packaged.encode(text) == ids
    assert packaged.decode(ids, skip_special_tokens=False) == text


def test_the_packaged_tokenizer_is_the_published_one(packaged: TokenizerBackend) -> None:
    # SmolLM2's tokenizer.json splits digits one by one, then as GPT-2 does
    published = Tokenizer(models.BPE())
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    ours = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(p), "isolated") for p in SPLITS["smollm"]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in (TEXT, "  42", " 4\t2\n", "x²½ 7 Ⅷ", "a  b 1", "''ve 've 've1"):
        expected = published.pre_tokenizer.pre_tokenize_str(text)
        assert [p for p, _ in ours.pre_tokenize_str(text)] == [p for p, _ in expected]
    assert packaged.vocab_size == 49152
    assert len(packaged.special_ids) == 17
    assert "<|im_start|>" in (packaged.chat_template or "")


def test_the_packaged_tokenizer_loads_fast_and_without_torch() -> None:
    code = (
        "import sys, time; start = time.process_time()\n"
        "from truespec.tokenizer.backend import load_tokenizer\n"
        "load_tokenizer('smollm2'); print(time.process_time() - start, 'torch' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert output[1] == "False"
    assert float(output[0]) < 4  # about 1 s; reading arrays element by element takes 5 s more
