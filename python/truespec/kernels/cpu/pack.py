"""Weights into panels: every type as 32-bit words per output, transposed into an arena.

Knows which panel format holds a type exactly; the stored size never grows to fp32 except for fp32
weights themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from truespec.kernels.api import Weight

from .arena import Arena
from .formats import FORMATS, PANEL, WORD_BYTES, Format
from .quants import DECODERS, Quantised

ROWS_AT_ONCE = 4096  # outputs repacked at once: bounds the memory of intermediate results
MAX_HALF = 65504.0


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in panels.

    Attributes:
        format: how words become values.
        shape: (n, k).
        words: [panels, words per output, 32] int32, in an arena.
    """

    format: Format
    shape: tuple[int, int]
    words: Tensor

    @property
    def num_panels(self) -> int:
        """Panels of 32 outputs; the last one may be padded with zeros."""
        return self.words.shape[0]

    @property
    def num_groups(self) -> int:
        """Groups along k, padding included."""
        return self.words.shape[1] // self.format.words

    @property
    def padded_k(self) -> int:
        """Inputs that the kernel reads."""
        return self.num_groups * self.format.group

    @property
    def panel_bytes(self) -> int:
        """Distance between panels."""
        return self.words.shape[1] * PANEL * WORD_BYTES


def pack(weight: Weight, arena: Arena) -> PackedWeight:
    """Pack a weight of any type that `Weight` lists.

    Raises:
        ValueError: the type or the size is not one we can read.
    """
    n, k = weight.shape
    data = weight.data.contiguous()
    if data.shape[0] != n:
        raise ValueError(f"weight has {data.shape[0]} rows, its shape says {n}")
    chosen = _choose_format(weight.type, data)
    num_words = -(-k // chosen.group) * chosen.words
    num_panels = -(-n // PANEL)
    memory = arena.allocate(num_panels * num_words * PANEL * WORD_BYTES)
    panels = memory.view(torch.int32).view(num_panels, num_words, PANEL)
    for first in range(0, n, ROWS_AT_ONCE):
        words = _words(data[first : first + ROWS_AT_ONCE], weight.type, chosen)
        if words.shape[1] != num_words:
            raise ValueError(f"rows of {weight.type} have {words.shape[1]} words, not {num_words}")
        _place(words, panels[first // PANEL :])
    return PackedWeight(chosen, (n, k), panels)


def _choose_format(type_name: str, data: Tensor) -> Format:
    """The smallest panel format that holds the values exactly."""
    names = {
        "F32": "f32", "BF16": "bf16", "F16": "f16", "Q4_0": "uint4", "Q4_1": "uint4",
        "Q5_0": "int8", "Q5_1": "int8", "Q8_0": "int8", "Q4_K": "uint4_pair",
        "Q5_K": "int8_pair", "Q6_K": "int8_scale",
    }  # fmt: skip
    if type_name not in names:
        raise ValueError(f"weight type is {type_name!r}, expected one of {', '.join(names)}")
    if type_name == "Q4_0":
        scales = data.reshape(data.shape[0], -1, 18)[..., :2].contiguous().view(torch.float16)
        if scales.abs().max() > MAX_HALF / 8:  # the minimum, -8 * scale, needs fp32
            return FORMATS["uint4_pair"]
    return FORMATS[names[type_name]]


def _words(data: Tensor, type_name: str, f: Format) -> Tensor:
    """[rows, words] int32 of some outputs."""
    if f.header == "none":
        padded = F.pad(data, (0, -data.shape[1] % f.group))
        return padded.view(torch.int32)
    if type_name == "Q4_1":  # already [scale | minimum] and 4 words of codes per group
        return data.view(torch.int32)
    block_bytes, decode = DECODERS[type_name]
    quantised = decode(data.reshape(data.shape[0], -1, block_bytes))
    return torch.cat([_header_words(quantised, f), _code_words(quantised.codes, f)], -1).flatten(1)


def _header_words(q: Quantised, f: Format) -> Tensor:
    """[rows, groups, header words] int32."""
    if f.header == "half_pair":
        return torch.stack([q.scales.half(), q.minimums.half()], dim=-1).view(torch.int32)
    columns = [q.scales] if f.header == "scale" else [q.scales, q.minimums]
    return torch.stack([c.float() for c in columns], dim=-1).view(torch.int32)


def _code_words(codes: Tensor, f: Format) -> Tensor:
    """[rows, groups, code words] int32 from [rows, groups, group] int8."""
    if f.codes == "uint4":
        low, high = codes.chunk(2, dim=-1)
        codes = low | (high << 4)
    return codes.contiguous().view(torch.int32)


def _place(words: Tensor, panels: Tensor) -> None:
    """Write [rows, words] into panels [P, words, 32], transposed; missing rows stay zero."""
    rows, width = words.shape
    whole, rest = divmod(rows, PANEL)
    full = words[: whole * PANEL].reshape(whole, PANEL, width)
    panels[:whole].copy_(full.transpose(1, 2))
    if rest:
        panels[whole, :, :rest] = words[whole * PANEL :].T
