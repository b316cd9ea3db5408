"""The dialects of multi-token-prediction heads: tensor names, and what each family feeds in.

Built are heads whose blocks are those of Llama, Qwen2 or Qwen3 (dense, full attention).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TARGET_NAMES = re.compile(
    r"(model\.)?(embed_tokens|norm|lm_head)\.weight|(model\.)?layers\.(\d+)\..*"
)


@dataclass(frozen=True, slots=True)
class MtpDialect:
    """How a family stores and runs its heads.

    Attributes:
        name: for messages.
        pattern: of stored names, with the groups `layer` (a number) and `name`.
        renames: (stored prefix of `name`, this project's), the first match counts.
        embedding_first: the joint input is [e; h], else [h; e].
        zero_first_embedding: e is zero at position 0.
        reads_normed: the target's hidden state after the final norm goes in, else before.
        carries_normed: a head's output is carried after its final norm, else before.
        is_chained: with one head per step, head j reads what head j - 1 carried; else every head
            reads the target's hidden state.
        norm_offset: added to the stored norm weights.
        counts_on: layer numbers go on from the target's.
    """

    name: str
    pattern: re.Pattern[str]
    renames: tuple[tuple[str, str], ...]
    embedding_first: bool = True
    zero_first_embedding: bool = False
    reads_normed: bool = True
    carries_normed: bool = True
    is_chained: bool = True
    norm_offset: float = 0.0
    counts_on: bool = False


_JOINS = (("eh_proj.", "join."), ("enorm.", "embedding_norm."), ("hnorm.", "hidden_norm."))
DIALECTS = (
    MtpDialect(
        "MiMo",
        re.compile(r"model\.mtp_layers\.(?P<layer>\d+)\.(?P<name>.*)"),
        (
            ("input_proj.", "join."),
            ("token_layernorm.", "embedding_norm."),
            ("hidden_layernorm.", "hidden_norm."),
            ("final_layernorm.", "norm."),
        ),
        embedding_first=False,
        zero_first_embedding=True,
    ),
    MtpDialect(
        "MiMo-V2",
        re.compile(r"model\.mtp\.layers\.(?P<layer>\d+)\.(?P<name>.*)"),
        (
            *_JOINS,
            ("final_layernorm.", "norm."),
            ("pre_mlp_layernorm.", "block.post_attention_layernorm."),
        ),
        is_chained=False,
    ),
    MtpDialect(
        "Step-3.5",
        re.compile(
            r"model\.layers\.(?P<layer>\d+)\."
            r"(?P<name>(eh_proj|enorm|hnorm|shared_head\.(norm|output)|transformer)\..*)"
        ),
        (
            *_JOINS,
            ("shared_head.norm.", "norm."),
            ("shared_head.output.", "head."),
            ("transformer.", "block."),
        ),
        reads_normed=False,
        carries_normed=False,
        norm_offset=1.0,
        counts_on=True,
    ),
    MtpDialect(
        "DeepSeek",
        re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<name>.*)"),
        (
            *_JOINS,
            ("shared_head.norm.", "norm."),
            ("shared_head.head.", "head."),
            ("embed_tokens.", "embed_tokens."),
        ),
        counts_on=True,
    ),
)
MARKS = {
    "MiMo": "input_proj",
    "MiMo-V2": "eh_proj",
    "Step-3.5": "transformer",
    "DeepSeek": "eh_proj",
}


def find_dialect(names: Iterable[str]) -> MtpDialect | None:
    """The dialect of a checkpoint with these tensors, `None` when it holds no such head."""
    stored = list(names)
    for dialect in DIALECTS:
        found = (dialect.pattern.fullmatch(name) for name in stored)
        if any(m is not None and m["name"].startswith(MARKS[dialect.name] + ".") for m in found):
            return dialect
    return None


def own_name(dialect: MtpDialect, num_target_layers: int, stored: str) -> str | None:
    """This project's name `<layer>.<name>` of a stored tensor; `None` for the target's own.

    A name that fits neither stays as it is, so that it is reported as left over.
    """
    match = dialect.pattern.fullmatch(stored)
    first = num_target_layers if dialect.counts_on else 0
    if match is not None and int(match["layer"]) >= first:
        layer, name = int(match["layer"]) - first, match["name"]
        for theirs, ours in dialect.renames:
            if name.startswith(theirs):
                return f"{layer}.{ours}{name.removeprefix(theirs)}"
        return f"{layer}.block.{name}"
    target = TARGET_NAMES.fullmatch(stored)
    is_target = target is not None and (target[4] is None or int(target[4]) < num_target_layers)
    return None if is_target else stored
