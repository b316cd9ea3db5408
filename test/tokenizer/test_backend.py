"""Tokenizers of Hugging Face directories against transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tiny import CHAT_TEMPLATE, tiny_tokenizer, write_tokenizer
from truespec.tokenizer.backend import TokenizerBackend, load_tokenizer
from truespec.tokenizer.backend_error import TokenizerError
from truespec.tokenizer.chat_template import ChatTemplateError

TEXTS = [
    "",
    " ",
    "The other and the one\n\n  of it",
    "<|im_start|>user\nhi<|im_end|>",
    "héllo wörld 🙂 漢字\t\x00 end ",
    "a" * 200,
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi <there> & 'you' "},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def backend(directory: Path) -> TokenizerBackend:
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def oracle(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_those_of_transformers(
    text: str, backend: TokenizerBackend, oracle: PreTrainedTokenizerBase
) -> None:
    ids = backend.encode(text)
    assert ids == oracle.encode(text)
    for skip in (True, False):
        assert backend.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_join_to_the_text(text: str, backend: TokenizerBackend) -> None:
    assert b"".join(map(backend.token_bytes, backend.encode(text))) == text.encode()


def test_every_single_byte_has_a_token_with_exactly_that_byte(backend: TokenizerBackend) -> None:
    single = [backend.token_bytes(token_id) for token_id in range(3, 259)]
    assert sorted(single) == [bytes([byte]) for byte in range(256)]


def test_random_bytes_survive_as_tokens(backend: TokenizerBackend) -> None:
    generator = random.Random(0)
    ids = [generator.randrange(backend.vocab_size) for _ in range(500)]
    expected = b"".join(map(backend.token_bytes, ids)).decode("utf-8", errors="replace")
    assert backend.decode(ids, skip_special_tokens=False) == expected


def test_special_tokens_are_known(backend: TokenizerBackend) -> None:
    assert backend.vocab_size == 300
    assert backend.special_ids == {0, 1, 2}
    assert (backend.bos_token_id, backend.eos_token_id) == (1, 2)
    assert backend.token_text(2) == "<|im_end|>"
    assert backend.token_bytes(300) == b""


def test_a_post_processor_adds_its_tokens_only_when_asked(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    backend = load_tokenizer(tmp_path)
    plain = backend.encode("of the other", add_special_tokens=False)
    assert backend.encode("of the other") == [1, *plain]
    assert len(plain) > 3  # neither truncated nor padded
    assert 0 not in plain


def sentencepiece_directory(path: Path) -> Path:
    """A tokenizer shaped like Llama 2's: prefix space, byte fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "a", "b", "\u2581a", "ab"]
    merges = [("\u2581", "a"), ("a", "b")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_sentencepiece_tokens_have_the_bytes_of_spaces_and_fallbacks(tmp_path: Path) -> None:
    backend = load_tokenizer(sentencepiece_directory(tmp_path))
    ids = backend.encode("a bé")
    assert b"".join(map(backend.token_bytes, ids)) == " a bé".encode()
    assert backend.decode(ids) == "a bé"
    assert backend.token_bytes(3 + 0xC3) == b"\xc3"


def test_a_decoder_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="WordPiece"):
        load_tokenizer(tmp_path)


def test_a_directory_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_a_chat_renders_as_in_transformers(
    add_generation_prompt: bool, backend: TokenizerBackend, oracle: PreTrainedTokenizerBase
) -> None:
    ours = backend.apply_chat_template(CHAT, add_generation_prompt=add_generation_prompt)
    theirs = oracle.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert ours == theirs
    assert ours.endswith("assistant\n") == add_generation_prompt


# Templates that lean on everything published ones use.
TEMPLATES = {
    "loops and trimming": (
        "{%- for m in messages %}\n  {%- if loop.index0 == 1 %}{% continue %}{% endif %}\n"
        "    {{- m.role }}: {{ m['content'] | trim }}\n{% endfor %}\n"
    ),
    "json": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
    "variables": "{{ enable_thinking is defined and enable_thinking }}{{ tools is none }}",
    "generation blocks": "{% for m in messages %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "date": "{{ strftime_now('%Y') | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_published_templates_use_works_as_in_transformers(
    name: str, directory: Path, oracle: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATES[name])
    backend = load_tokenizer(directory, chat_template=path)
    ours = backend.apply_chat_template(
        CHAT, add_generation_prompt=False, variables={"enable_thinking": True}
    )
    theirs = oracle.apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], tokenize=False, enable_thinking=True
    )
    assert ours == theirs


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("content", ["So far", "So far ", "<|im_end|> So"])
def test_the_final_message_can_be_left_open(
    content: str, trims: bool, directory: Path, oracle: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    template = CHAT_TEMPLATE.replace("message['content']", "(message['content'] | trim)")
    path = tmp_path / "template.jinja"
    path.write_text(template if trims else CHAT_TEMPLATE)
    backend = load_tokenizer(directory, chat_template=path)
    chat = [*CHAT, {"role": "assistant", "content": content}]
    ours = backend.apply_chat_template(
        chat, add_generation_prompt=False, continue_final_message=True
    )
    theirs = oracle.apply_chat_template(
        chat, chat_template=path.read_text(), tokenize=False, continue_final_message=True
    )
    assert ours == theirs
    assert ours.endswith(content.strip() if trims else content)


def test_a_template_may_refuse_with_its_own_words(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        load_tokenizer(directory, chat_template=path).apply_chat_template(CHAT)


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ nothing.there }}"],
)
def test_a_template_cannot_leave_its_sandbox(source: str, directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(source)
    with pytest.raises(ChatTemplateError, match="refuses"):
        load_tokenizer(directory, chat_template=path).apply_chat_template(CHAT)


def test_a_broken_template_is_an_error_at_load(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% for %}")
    with pytest.raises(ChatTemplateError, match="does not compile"):
        load_tokenizer(directory, chat_template=path)
    with pytest.raises(TokenizerError, match="not a file"):
        load_tokenizer(directory, chat_template=tmp_path / "absent.jinja")


def test_options_that_exclude_each_other_are_refused(backend: TokenizerBackend) -> None:
    with pytest.raises(ChatTemplateError, match="cannot both be true"):
        backend.apply_chat_template(CHAT, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="content is text"):
        backend.apply_chat_template([], add_generation_prompt=False, continue_final_message=True)


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load_tokenizer(tmp_path).apply_chat_template(CHAT)


def test_templates_are_found_in_all_their_places(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "list"}]
    path.write_text(json.dumps(config | {"chat_template": named}))
    assert load_tokenizer(tmp_path).chat_template == "list"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert load_tokenizer(tmp_path).chat_template == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert load_tokenizer(tmp_path).chat_template == "jinja"
